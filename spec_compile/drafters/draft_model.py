"""A standalone draft model: a smaller causal LM with the tokenizer of its target.

Its cache has the target's slots. Every draft begins with the tokens before the root that its cache may lack: after full
acceptance the last draft was never fed, and the accepted path of a tree lies scattered.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from .. import passes
from ..cache import Cache
from ..capture.admit import Inventory, admit, in_served_dtype
from ..capture.checks import check_capture
from ..capture.kinds import is_known
from ..capture.quantised import hold_one_layout
from ..capture.trace import capture
from ..compile.part import PartCompiler
from ..compile.regions import compile_regions
from ..compile.start import draft_graph
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import UnsupportedModelError
from ..graph import ModelGraph
from ..runtime.state import State
from .options import DraftOptions
from .shared_draft import DraftWeights, choose_ranks
from .trees.propose import propose_grown


class SameTokens:
    """A draft model's tokens, of vocabulary Vd, as its target's, of vocabulary V, if both have one tokenizer.

    known: tokens that both have; each vocabulary may have padding besides.
    embedded: tokens that the draft can read.
    vocab_size: V.
    """

    draft_to_target: Tensor | None = None
    """[Vc] int64: the target's id of each column of `logits`, all different; None: column i is token i."""
    share: float | None = None
    """See `Algorithm.vocabulary_share`."""

    def __init__(self, known: int, embedded: int, vocab_size: int):
        self.known, self.embedded, self.vocab_size = known, embedded, vocab_size

    def read(self, ids: Tensor) -> Tensor:
        """The draft's id that stands for each of the target's `ids`, both int64 of any shape."""
        return ids.clamp(max=self.embedded - 1)

    def logits(self, logits: Tensor) -> Tensor:
        """[..., Vd] -> [..., Vc]."""
        return F.pad(logits[..., : self.known], (0, self.vocab_size - self.known), value=-math.inf)

    def explain(self) -> list[str]:
        """Lines for ``explain()``."""
        return []


class DraftModel(Algorithm):
    """Drafts of one model, in trees as `schedule` says."""

    def __init__(self, draft: PreTrainedModel, graph: ModelGraph, options: DraftOptions, mapping: SameTokens):
        """graph: of `draft`. mapping: of its tokens and the target's."""
        self.draft_module = draft
        self.schedule, self.mapping, self.vocabulary_share = options.schedule, mapping, mapping.share
        # Rewrite the graph twice, for drafting and for prompts, on the ranks that share it.
        ranks, self.sharing = choose_ranks(options.draft_ranks, options.ranks, graph)
        self.weights = DraftWeights(options.draft_weights, draft)
        drafting, prefilling = (
            passes.Settings(options.merge_linears, attention=options.attention(role, of_draft=True), ranks=ranks)
            for role in ("draft", "prefill")
        )
        self.graph, self.prefill = passes.run(graph, drafting, self.weights.pipeline()), passes.run(graph, prefilling)
        path = self.schedule.num_steps + 1
        self.refill = 1 if self.schedule.topk == 1 and options.joined is None else options.longest(path)
        """Tokens before the root that are fed again."""
        self.plan = DraftPlan(
            self.schedule.nodes, lookahead_slots=1 + self.schedule.fed, draws=options.draws, levels=path - 1
        )

    def drafter(self, batch: int, slots: int) -> Drafter:
        return ModelDrafter(self, batch, slots)

    def refresh(self) -> None:
        self.weights.refresh()

    def explain(self) -> list[str]:
        return [line for line in (self.sharing, *self.mapping.explain(), *self.weights.explain()) if line]


class ModelDrafter(Drafter):
    """Runs a draft model over the prompts and over the trees it grows."""

    fuses = False  # its layers are compiled once, not once a step

    def __init__(self, algorithm: DraftModel, batch: int, slots: int):
        super().__init__()
        self.schedule, self.draws, self.mapping = algorithm.schedule, algorithm.plan.draws, algorithm.mapping
        self.graph, self.filling = algorithm.graph, algorithm.prefill.gm
        self.refill = algorithm.refill
        self.wanted = self.schedule.topk  # rows of a forward whose logits are used
        self.cache = Cache(algorithm.graph, batch, slots)
        self.compiled_slots, self.compiler = 0, None
        self.models: dict[int, nn.Module] = {}

    def compile(self, compiler: PartCompiler) -> None:
        if self.compiled_slots == self.cache.slots:
            return
        self.compiled_slots, self.compiler = self.cache.slots, compiler
        self.models.clear()
        if not compiler.exact:  # one compilation serves all numbers of rows above one
            batch = len(self.cache.table)
            ids = torch.zeros(batch, compiler.nodes, dtype=torch.int64, device=self.graph.device)
            last = ids[:, 0] + self.cache.slots - compiler.nodes  # slots that are never committed
            self._run(ids, ids, last, ids + 1, compiler.slots, ids.new_zeros(batch, self.wanted))

    def _model(self, rows: int) -> nn.Module:
        """The draft model for blocks of `rows` rows, compiled if steps are."""
        if self.compiler is None:
            return self.graph.gm
        code = rows if self.compiler.exact else min(rows, 2)
        if code not in self.models:
            self.models[code] = compile_regions(self.graph, self.compiler, f"draft_{code}")
        return self.models[code]

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        ids, positions = self.mapping.read(ids), self._inside(positions)
        self.filling(ids, positions, state.lengths, None, self.cache.argument, max_kv_len)

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        # Feed the root, and before it the tokens whose keys and values the cache may lack.
        begin = (state.lengths - self.refill).clamp(min=0)
        places = begin[:, None] + torch.arange(self.refill + 1, device=begin.device)
        ids = self.mapping.read(state.tokens.gather(1, places))
        rows = (state.lengths - begin)[:, None].expand(-1, self.wanted)  # the root's, as often as `_step` wants rows
        chain = (torch.ones_like(places) << torch.arange(1, self.refill + 2, device=begin.device)) - 1  # 0b1, 0b11, ...
        logits = self._run(ids, places, begin, chain, max_kv_len, rows)[:, 0]
        # Grow the tree below it.
        step = partial(self._step, state.lengths.clone(), max_kv_len)
        to_target = self.mapping.draft_to_target
        propose_grown(state, self.schedule, self.draws, logits, logits[:, :1], step, to_target, nodes)

    def _step(self, lengths, max_kv_len, tokens, hidden, ancestors, depth, offset, wanted) -> tuple[Tensor, Tensor]:
        """See `trees.grow.Step`."""
        rows = torch.arange(tokens.shape[1] - wanted, tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        positions = lengths[:, None] + depth
        ids = self.mapping.read(tokens)  # guard: another-tokenizer
        return hidden, self._run(ids, positions, lengths + 1 + offset, ancestors, max_kv_len, rows)

    def _run(self, ids, positions, lengths, ancestors, max_kv_len, rows) -> Tensor:
        """Logits [B, R, Vc] of the mapping at `rows` [B, R] of a block of the draft's ids that begins at slots
        `lengths`."""
        model = self._model(ids.shape[1])
        ids, positions, ancestors, rows = (x.contiguous() for x in (ids, self._inside(positions), ancestors, rows))
        return self.mapping.logits(model(ids, positions, lengths, ancestors, self.cache.argument, max_kv_len, rows)[0])

    def _inside(self, positions: Tensor) -> Tensor:
        """Positions clamped to a learned table. Only slots that are never committed lie outside."""
        limit = self.graph.position_limit
        return positions if limit is None else positions.clamp(max=limit - 1)


def build(target: Inventory, options: DraftOptions) -> DraftModel:
    """The algorithm for `options.draft`: a model, a path or a name on the hub."""
    draft = open_draft(target, options)
    graph = capture_draft(target, draft, options)
    return DraftModel(draft, graph, options, map_one(target, graph))


def open_draft(target: Inventory, options: DraftOptions) -> PreTrainedModel:
    """The model that `options.draft` names."""
    if not isinstance(options.draft, str):
        return options.draft
    return AutoModelForCausalLM.from_pretrained(options.draft, dtype=target.model.dtype).to(target.device).eval()


def capture_draft(target: Inventory, draft: PreTrainedModel, options: DraftOptions) -> ModelGraph:
    """The graph of `draft`, which fits `target`.

    Raises ValueError, TypeError or UnsupportedModelError, beginning with "draft:", if it cannot draft.
    """

    def trace() -> ModelGraph:
        graph = capture(draft, not is_known(draft))  # a draft of other code has nothing to fall back on
        if options.check:
            check_capture(draft, graph)
        return graph

    try:
        in_served_dtype(admit(draft), options.convert_bfloat16)
        hold_one_layout(draft)
        graph = draft_graph(draft, options, trace)
    except (TypeError, ValueError) as error:
        raise type(error)(f"draft: {error}") from error
    if any(spec.stash for spec in graph.recurrences):  # tokens change these states
        raise UnsupportedModelError(
            f"draft: {type(draft).__name__} keeps recurrent states, and a draft model is fed some tokens again in each "
            "round; pass a draft model of attention alone"
        )
    if draft.device != target.device:
        raise ValueError(f"draft: it is on {draft.device}, the model on {target.device}; move it: draft.to(...)")
    return graph


def map_one(target: Inventory, graph: ModelGraph) -> SameTokens:
    """The mapping of a draft and a model with one tokenizer; ValueError if the vocabularies differ by more than
    padding. graph: of the draft."""
    target_vocab, draft_vocab = target.embedded, graph.embedded
    if abs(target_vocab - draft_vocab) > PADDING * max(target_vocab, draft_vocab):
        raise ValueError(
            f"draft: its vocabulary of {draft_vocab} tokens is not the model's ({target_vocab}); it must have the same "
            "tokenizer, or, with algo='draft_model', use_heterogeneous_vocab=True"
        )
    known = min(graph.common_tokens, target_vocab, target.vocab_size)
    return SameTokens(known, graph.embedded, target.vocab_size)


PADDING = 0.02
"""Vocabularies may differ by this share, because both are padded."""
