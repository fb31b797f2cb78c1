"""The passes, in the order they run. A pass is ``fn(graph, settings) -> summary`` and rewrites ``graph.gm``."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from ..graph import ModelGraph
from ..kernels.attention import Use
from ..kernels.linear.low_rank import LowRank
from ..parallel.ranks import ALONE, Alone
from .apply import apply, check_order
from .cpu_products import fuse_cpu_products
from .fuse_attention import fuse_append, fuse_qk_norms, fuse_rotary
from .fuse_norms import fuse_norms, fuse_residuals
from .fuse_recurrent_norms import fuse_gated_norms, fuse_l2_norms
from .fuse_routers import fuse_routers
from .linears import add_adapters, fuse_swiglu, merge_linears, use_linear_forms
from .outputs import select_logits, tap_hidden_states
from .row_invariance import order_sums
from .shard import shard
from .tidy import tidy
from .use_cache import use_states, use_tree_attention


@dataclass(frozen=True)
class Settings:
    """Options of the passes.

    merge_linears: True for one matrix product for linear layers of one input.
    taps: hidden states to return after the logits, numbered as transformers' ``hidden_states`` (0 the embeddings, i the
        residual stream after layer i; -1 the input of the output head).
    attention: requirements on the attention backend; its role says what the graph is for.
    ranks: the processes that share the graph's weights.
    expert_parallel: how they share routed experts: by their numbers (True), by their width (False), or by their width
        if it divides (None).
    low_rank: by the paths of linear layers, the additions of which each row chooses one.
    exact: the option.
    """

    merge_linears: bool = True
    taps: tuple[int, ...] = ()
    attention: Use = field(default_factory=Use)
    ranks: Alone = ALONE
    expert_parallel: bool | None = None
    low_rank: dict[str, LowRank] = field(default_factory=dict)
    exact: str = "auto"

    @property
    def purpose(self) -> str:
        """The use of the graph: to "verify" trees, to "prefill" caches, or to "draft"."""
        return self.attention.role


PIPELINE = [
    tidy, shard, merge_linears, tap_hidden_states, use_tree_attention, use_states, add_adapters,
    select_logits, fuse_routers, use_linear_forms, fuse_swiglu, fuse_rotary, fuse_qk_norms, fuse_gated_norms,
    fuse_l2_norms, fuse_norms, fuse_cpu_products, order_sums, fuse_residuals, fuse_append,
]  # fmt: skip
"""The passes of `speculate`; `backend.PIPELINE` has the passes of ``torch.compile(backend="spec")``."""
check_order(PIPELINE)


def register(rewrite: Callable[[ModelGraph, Settings], str], after: str) -> None:
    """Add a pass of `contrib` or of another package to the pipeline, right after the pass of that name."""
    place = [each.__name__ for each in PIPELINE].index(after) + 1
    PIPELINE.insert(place, rewrite)
    check_order(PIPELINE)


def runnable(graph: ModelGraph, ranks: Alone, expert_parallel: bool | None) -> ModelGraph:
    """A captured graph that every rank can run: if its parameters are spread over the ranks, it is sharded."""
    is_spread = any(isinstance(parameter, DTensor) for parameter in graph.gm.parameters())
    return run(graph, Settings(ranks=ranks, expert_parallel=expert_parallel), [tidy, shard]) if is_spread else graph


def run(graph: ModelGraph, settings: Settings, pipeline=None, keep_code: bool = False) -> ModelGraph:
    """Apply the pipeline to a copy of `graph`; the result's ``log`` says what each pass changed.

    keep_code: the log also holds the readable graph after each pass, which takes longer to print than to rewrite.
    """
    graph = graph.copy()
    apply(graph, settings, PIPELINE if pipeline is None else pipeline, keep_code)
    return graph
