"""Gemma 4's assistants: heads that attend to the target's own keys and values and keep none themselves.

All nodes of a tree are drafted at the position of the root and see the committed slots, not each other: a node's draft
depends on the tokens above it only by the state that the assistant passes on. So a forward takes one level of a tree.
"""

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .. import passes
from ..capture.admit import Inventory
from ..capture.trace import capture_head
from ..compile.part import PartCompiler
from ..compile.regions import compile_regions
from ..compile.start import draft_graph
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, calls
from ..kernels.attention.backends import attend_to_committed, load_triton
from ..kernels.ops import arguments_of
from ..parallel.ranks import ALONE
from ..passes.apply import replace_node
from ..passes.use_cache import use_tree_attention
from ..runtime.state import State
from ..tree import Accepted
from .checkpoints.load import load_head
from .draft_weights import DraftWeights
from .modules.assistant import Assistant
from .options import DraftOptions
from .shared_draft import DraftHead, keep_row
from .trees.propose import propose_grown


class AssistantAlgorithm(Algorithm):
    """Drafts of one assistant, in trees of `schedule`."""

    remembers = False
    token_bytes = 0

    def __init__(self, assistant: Assistant, options: DraftOptions):
        self.assistant, self.schedule = assistant, options.schedule
        self.weights = DraftWeights(options.draft_weights, assistant, assistant.head_weight)
        self.draft_module = options.draft if isinstance(options.draft, nn.Module) else assistant
        captured = draft_graph(assistant, options, partial(capture_head, assistant, assistant.hidden_size))
        _check_backend(options, assistant.head_weight.device)
        settings = passes.Settings(options.merge_linears, attention=options.attention("draft"))
        reads = partial(read_target, scaled=options.attention("verify").scaled)
        reads.__name__ = read_target.__name__
        pipeline = [reads if each is use_tree_attention else each for each in passes.PIPELINE]
        self.graph = passes.run(captured, settings, self.weights.pipeline(pipeline))
        self.logits = DraftHead(assistant.head_weight, ALONE, self.weights) if assistant.clusters is None else None
        self.plan = DraftPlan(self.schedule.nodes, assistant.taps, draws=options.draws, levels=self.schedule.num_steps)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return AssistantDrafter(self, batch)

    def refresh(self) -> None:
        self.weights.refresh()

    def explain(self) -> list[str]:
        return ["assistant:", *(f"  {line}" for line in [*self.assistant.report, *self.weights.explain()])]


def _check_backend(options: DraftOptions, device: torch.device) -> None:
    """UnsupportedModelError if `options` name another backend than that of `attend_to_committed`."""
    ours, name = "triton" if device.type == "cuda" else "sdpa", options.attention_backends["draft"]
    if name not in ("auto", ours):  # guard: drafting-backend
        raise UnsupportedModelError(
            f"attention_backend: an assistant attends to the target's cache by {ours!r} only, not by {name!r}: pass a "
            f"dict with {ours!r} for 'draft'; 'prefill' and 'verify' may have others"
        )


def read_target(graph: ModelGraph, settings: passes.Settings, scaled: bool) -> str:
    """A pass in the place of `use_tree_attention`: every marker becomes attention to the target's committed slots.

    The graph gains the inputs ``lengths[B]``, ``cache``, a list of keys, values and, if `scaled`, scales for each of
    its own layers, and ``max_kv_len``.

    transformers' mask of sliding layers shows the last committed token and as many before it as the window counts.
    """
    gm = graph.gm
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    with gm.graph.inserting_after(inputs[-1]):
        max_kv_len = gm.graph.placeholder("max_kv_len")
        cache = gm.graph.placeholder("cache")
        lengths = gm.graph.placeholder("lengths")
    if graph.device.type == "cuda":
        load_triton(settings.attention)
    tensors = 3 if scaled else 2
    for number, node in enumerate(calls(gm, torch.ops.spec_compile.attention.default)):
        marker = arguments_of(node)
        with gm.graph.inserting_before(node):
            places = range(number * tensors, (number + 1) * tensors)
            parts = [gm.graph.call_function(operator.getitem, (cache, place)) for place in places]
            keys, values, scales = (*parts, None)[:3]
            window = None if marker["window"] is None else marker["window"] + 1
            seen = lengths, max_kv_len, marker["scale"], marker["softcap"], window
            new = gm.graph.call_function(attend_to_committed, (marker["q"], keys, values, scales, *seen))
        replace_node(node, new)
    gm.graph.eliminate_dead_code()
    return f"{len(graph.layers)} layers attend to the committed slots of the target's cache"


class AssistantDrafter(Drafter):
    """Keeps the target's state at the last committed slot, and grows the trees below the root."""

    fuses = False  # its layers are compiled once, not once a level

    def __init__(self, algorithm: AssistantAlgorithm, batch: int):
        super().__init__()
        self.assistant, self.graph, self.schedule = algorithm.assistant, algorithm.graph, algorithm.schedule
        self.draws, self.logits = algorithm.plan.draws, algorithm.logits
        self.compiler: PartCompiler | None = None
        self.compiled: dict[int, tuple[nn.Module, Callable]] = {}
        like = self.assistant.head_weight
        self.register_buffer("hidden", like.new_zeros(batch, self.assistant.hidden_size), persistent=False)

    def compile(self, compiler: PartCompiler) -> None:
        if compiler is not self.compiler:
            self.compiler, self.compiled = compiler, {}

    def _parts(self, rows: int) -> tuple[nn.Module, Callable]:
        """The layers and the output matrix for a level of `rows` rows, compiled if steps are."""
        if self.compiler is None:
            return self.graph.gm, self.score
        if rows not in self.compiled:
            layers = compile_regions(self.graph, self.compiler, f"layers_{rows}")
            self.compiled[rows] = layers, self.compiler(self.score, f"score_{rows}")
        return self.compiled[rows]

    def score(self, normed: Tensor) -> Tensor:
        """Logits [B, R, V] of normed [B, R, H]. A method, so that its part finds the weights in the drafter."""
        assistant = self.assistant
        return assistant.clusters(normed, assistant.head_weight) if self.logits is None else self.logits(normed)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.hidden.zero_()  # a prompt of one token has no slot to draft from: these drafts are rejected

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        last = state.prompt_lengths - 2 - state.lengths  # the prompt's last token is the root
        keep_row(self.hidden, features[0], last, (last >= 0) & (last < ids.shape[1]))

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int) -> None:
        gained = state.lengths - begin
        last = accepted.path.gather(1, (gained - 1).clamp(min=0)[:, None])[:, 0]
        keep_row(self.hidden, features[0], last, gained > 0)

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        cache = [
            tensor for layer, *_ in self.assistant.sources for tensor in state.kv.layer(layer) if tensor is not None
        ]
        step = partial(self._step, state.lengths.clone(), cache, max_kv_len)
        root, hidden = state.tree_tokens[:, :1].clone(), self.hidden.clone()
        hidden, logits = step(root, hidden[:, None], None, None, 0, 1)
        propose_grown(state, self.schedule, self.draws, logits[:, 0], hidden[:, 0], step, nodes=nodes)

    def _step(
        self, lengths, cache, max_kv_len, tokens, hidden, ancestors, depth, offset, wanted
    ) -> tuple[Tensor, Tensor]:
        """See `trees.grow.Step`; only the wanted rows are computed, because none reads another."""
        tokens, hidden = tokens[:, -wanted:].contiguous(), hidden[:, -wanted:].contiguous()
        positions = lengths[:, None].expand_as(tokens).contiguous()
        layers, score = self._parts(wanted)
        hidden, normed = layers(tokens, positions, hidden, lengths, cache, max_kv_len)
        return hidden, score(normed)


def build(target: Inventory, options: DraftOptions) -> AssistantAlgorithm:
    """The algorithm with the assistant that `options` names."""
    if options.ranks.size > 1:
        raise UnsupportedModelError(
            "draft: an assistant reads all keys and values of the target, of which each rank of tensor_parallel has a "
            "part; leave tensor_parallel out, or use another algo"
        )
    return AssistantAlgorithm(load_head(options.draft, target.model, "assistant"), options)
