"""The passes, in the order they run. A pass is ``fn(graph, settings) -> summary`` and rewrites ``graph.gm``."""

from dataclasses import dataclass, field

from ..graph import ModelGraph, PassReport, calls
from ..kernels.attention import Use
from .fused_norms import fused_norms
from .logits_rows import logits_rows
from .merge_linears import merge_linears
from .qk_norms import qk_norms
from .rotary import rotary
from .skinny_linears import skinny_linears
from .swiglu import swiglu
from .taps import taps
from .tidy import tidy
from .tree_attention import tree_attention


@dataclass(frozen=True)
class Settings:
    """What the passes are asked for.

    merge_linears: one matrix product for linear layers of one input. taps: hidden states to return after the logits,
    numbered as transformers' ``hidden_states`` (0 the embeddings, i the residual stream after layer i; -1 what the
    output head multiplies). logits:
    "all" rows, chosen "rows" (a new input ``rows[B, R]``), or "none" (the head is dropped). attention: which backend.
    """

    merge_linears: bool = True
    taps: tuple[int, ...] = ()
    logits: str = "all"
    attention: Use = field(default_factory=Use)


PIPELINE = [
    tidy, merge_linears, taps, tree_attention, logits_rows, skinny_linears, swiglu, rotary, qk_norms, fused_norms,
]  # fmt: skip
"""What `speculate` runs; `backend.PIPELINE` is what ``torch.compile(backend="spec")`` runs on a single forward."""


def run(graph: ModelGraph, settings: Settings, pipeline=None) -> ModelGraph:
    """Apply the pipeline to a copy of `graph`; the result's ``log`` says what each pass changed."""
    graph = graph.copy()
    graph.log.clear()
    for rewrite in PIPELINE if pipeline is None else pipeline:
        before = len(calls(graph.gm))
        summary = rewrite(graph, settings)
        graph.gm.graph.eliminate_dead_code()
        graph.gm.graph.lint()
        graph.gm.recompile()
        code = graph.gm.print_readable(print_output=False)
        graph.log.append(PassReport(rewrite.__name__, summary, before, len(calls(graph.gm)), code))
    return graph
