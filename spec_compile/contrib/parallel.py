"""P-EAGLE and PARD: all tokens of a chain are drafted in one forward, at masks after the text.

P-EAGLE (arXiv:2602.01469) is an EAGLE-3 head. The last committed slot drafts the first token. After it come num_steps -
1 masks: pairs of the mask's embedding and a learned state, in the slots that the next accepted tokens are written to.

PARD (arXiv:2504.18583) is a draft model. The row of the root drafts the first token, the rows of num_steps - 1 masks
the others. The masks' keys and values are of no use: tokens that were accepted in their slots are fed again, before the
next root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from ..capture.admit import Inventory
from ..drafters import ALGORITHMS, ALIASES, Entry
from ..drafters.checkpoints.config import SPECULATORS
from ..drafters.checkpoints.draft_files import DraftFiles
from ..drafters.checkpoints.files import Target
from ..drafters.checkpoints.load import DraftFormat, load_head, register_format
from ..drafters.draft_model import DraftModel, ModelDrafter, SameTokens, capture_draft, map_one, open_draft
from ..drafters.heads import HeadAlgorithm, HeadDrafter
from ..drafters.modules.eagle import EAGLE3_OVERRIDES, Eagle3Head, read_eagle3
from ..drafters.options import DraftOptions
from ..drafters.self_check import best_reading
from ..drafters.trees.grow import Schedule
from ..drafters.trees.propose import BlockProposer
from ..drafting import Drafter, DraftPlan
from ..errors import check_int
from ..graph import ModelGraph
from ..kernels.top_logits import MAX_K
from ..runtime.state import State
from ..tree import MAX_NODES

MAX_PARALLEL = 31
"""Tokens drafted in one forward at most. As many tokens of the text may be fed again before them."""
PARD_MASKS = ("pard_token", "ptd_token_id")
"""Names of the mask's id in configs of PARD, as vLLM looks for them."""
MASKS = ("mask_token_id", *PARD_MASKS)
"""Names of the mask's id in published configs of P-EAGLE, in the order in which they are looked for."""
P_EAGLE_KEYS = {
    *MASKS, "num_depths", "para_depths", "down_sample_ratio", "down_sample_ratio_min", "parallel_drafting",
}  # fmt: skip
"""Keys of P-EAGLE's configs besides EAGLE-3's: the mask, and options of its training."""


@dataclass(frozen=True)
class ParallelOptions(DraftOptions):
    """Options of the drafts that give all tokens of a chain in one forward.

    num_draft_tokens: nodes verified, the root included (default: num_steps + 1).
    num_steps: tokens drafted in one forward.
    topk: tokens of each place that are looked at (1: a chain).
    """

    num_steps: int = 7

    def __post_init__(self):
        check_int("num_steps", self.num_steps, 1, MAX_PARALLEL, "tokens drafted in one forward")
        check_int("topk", self.topk, 1, MAX_K, "tokens of each place that are looked at")
        check_int("num_draft_tokens", self.nodes, 2, MAX_NODES, "nodes verified, the root included")
        super().__post_init__()

    @property
    def schedule(self) -> Schedule:
        """The chain of all tokens. ValueError if more nodes of a chain are wanted."""
        return Schedule(self.num_steps, 1, self.nodes if self.topk == 1 else None, self.score_temperature)

    @property
    def nodes(self) -> int:
        """Nodes verified, the root included."""
        return self.draft_nodes(self.num_steps + 1 if self.topk == 1 else MAX_NODES) or self.num_steps + 1

    @property
    def path(self) -> int:
        """Nodes of an accepted path at most, the root included."""
        return self.longest(min(self.nodes, self.num_steps + 1))

    def proposer(self) -> BlockProposer:
        """Proposes trees of the tokens; ValueError if there are not as many nodes."""
        return BlockProposer(self.num_steps, self.topk, self.nodes, self.draws, self.score_temperature)


def checked_mask(found: list, names: tuple[str, ...], rows: int, of: str, remedy: str = "") -> int:
    """The first id of a mask among `found`. ValueError if there is none that has an embedding.

    names: keys of the config that may hold it. rows, of: number of embeddings, and what they are. remedy: for the error
    """
    mask = next((value for value in found if value is not None), None)
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < rows:
        known = " or ".join(names)
        raise ValueError(f"draft: its config must have a {known} below {rows}, {of}, it has {mask!r}{remedy}")
    return mask


# P-EAGLE


class ParallelEagle3Head(Eagle3Head):
    """P-EAGLE (arXiv:2602.01469): EAGLE-3 that also reads masks, in place of tokens that are not drafted yet.

    mask_hidden [1, 1, taps * h] replaces the target's states at a mask, the token `mask_token_id`.
    """

    flavour = "P-EAGLE"
    mask_token_id: int

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, taps: tuple[int, ...], feature_size: int, *args, **flags
    ):
        super().__init__(config, embedding, taps, feature_size, *args, **flags)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, feature_size * len(taps)))

    @torch.no_grad()
    def mask_state(self) -> Tensor:
        """The state of a mask [1, 1, H]."""
        return self.project(list(self.mask_hidden.chunk(len(self.taps), dim=-1)))


def is_p_eagle(files: DraftFiles) -> bool:
    """True if the config says P-EAGLE, or if there is a state for masks."""
    return files.config.get(SPECULATORS) == "peagle" or "mask_hidden" in files.names


def read_p_eagle(files: DraftFiles, target: Target, overrides: dict) -> ParallelEagle3Head:
    """A P-EAGLE head: EAGLE-3 with a state for masks. It has the arguments and errors of `read_eagle3`."""
    config, rows = files.config, target.embedding.shape[0]
    inner = config.get("dflash_config") or {}
    named = [inner.get("mask_token_id"), *(config.get(name) for name in MASKS)]
    mask = checked_mask(named, MASKS, rows, "the model's embeddings")
    head = read_eagle3(files, target, overrides, ParallelEagle3Head, P_EAGLE_KEYS)
    head.mask_token_id = mask
    head.report.insert(1, f"drafts in parallel, masked by token {mask}")
    return head


@dataclass(frozen=True)
class ParallelHeadOptions(ParallelOptions):
    """Options of P-EAGLE.

    rope_theta: base of the head's RoPE, if its config is known to be wrong.
    """

    rope_theta: float | None = None


class ParallelHeads(HeadAlgorithm):
    """Drafts of one `head`, all in one forward."""

    def __init__(self, head: ParallelEagle3Head, options: ParallelHeadOptions):
        super().__init__(head, options)
        self.proposer, self.longest = options.proposer(), options.path
        self.plan = DraftPlan(options.nodes, head.taps, self.schedule.fed, options.draws)
        self.mask = head.mask_state()

    def drafter(self, batch: int, slots: int) -> Drafter:
        return ParallelHeadDrafter(self, batch, slots)

    def refresh(self) -> None:
        super().refresh()
        self.mask.copy_(self.head.mask_state())


class ParallelHeadDrafter(HeadDrafter):
    """Runs a head over committed tokens, and once over the masks after them."""

    def __init__(self, algorithm: ParallelHeads, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.proposer, self.mask = algorithm.proposer, algorithm.mask

    def propose(self, state: State, max_kv_len: int) -> None:
        lengths, masks = state.lengths.clone(), self.schedule.num_steps - 1
        logits = self.logits(self.normed.clone())[:, None]
        if masks:
            positions = lengths[:, None] + torch.arange(masks, device=lengths.device)
            ids = torch.full_like(positions, self.head.mask_token_id)
            states = self.mask.expand(ids.shape[0], masks, -1).contiguous()
            _, normed = self.block(ids, positions, states, lengths, None, self.cache.argument, max_kv_len)
            logits = torch.cat([logits, self.logits(normed)], dim=1)
        self.proposer.propose(state, logits, 0, self.head.draft_to_target)


def build_p_eagle(target: Inventory, options: ParallelHeadOptions) -> ParallelHeads:
    """The algorithm with the head that `options` names, in the reading that has most first drafts accepted."""
    head = load_head(options.draft, target.model, "p_eagle", rope_theta=options.rope_theta)
    return ParallelHeads(best_reading(target, head, options, drafts=1), options)


# PARD


class Pard(DraftModel):
    """Drafts of one model, all in one forward."""

    def __init__(
        self, draft: PreTrainedModel, graph: ModelGraph, options: ParallelOptions, mapping: SameTokens, mask: int
    ):  # fmt: skip
        """graph: of `draft`. mapping: of its tokens and the target's. mask: the id of the masks."""
        super().__init__(draft, graph, options, mapping)
        self.mask, self.proposer, self.refill = mask, options.proposer(), options.path - 1
        fed = self.refill + options.num_steps
        self.plan = DraftPlan(options.nodes, lookahead_slots=fed, draws=options.draws)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return PardDrafter(self, batch, slots)

    def explain(self) -> list[str]:
        line = f"PARD: {self.schedule.num_steps} tokens are drafted in one forward, masked by token {self.mask}"
        return [line, *super().explain()]


class PardDrafter(ModelDrafter):
    """Feeds accepted tokens, the root and the masks to the draft model."""

    def __init__(self, algorithm: Pard, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.proposer, self.mask = algorithm.proposer, algorithm.mask
        self.wanted = algorithm.schedule.num_steps

    def propose(self, state: State, max_kv_len: int) -> None:
        """refill = 2, num_steps = 3 and a root r at slot 5 give the rows [t3, t4, r, mask, mask]; the last 3 draft."""
        # The rows' slots: accepted tokens that are fed again, the root, and masks after it.
        lengths = state.lengths.clone()
        begin = (lengths - self.refill).clamp(min=0)
        slots = begin[:, None] + torch.arange(self.refill + self.wanted, device=begin.device)
        ids = self.mapping.read(state.tokens.gather(1, slots.clamp(max=state.capacity - 1)))
        ids = torch.where(slots <= lengths[:, None], ids, self.mask)
        # Each row sees itself and all rows before it.
        chain = (torch.ones_like(slots) << torch.arange(1, slots.shape[1] + 1, device=begin.device)) - 1
        rows = (lengths - begin)[:, None] + torch.arange(self.wanted, device=begin.device)
        self.proposer.propose(state, self._run(ids, slots, begin, chain, max_kv_len, rows))


def build_pard(target: Inventory, options: ParallelOptions) -> Pard:
    """The algorithm for `options.draft`: a model, a path or a name on the hub."""
    draft = open_draft(target, options)
    named = [getattr(draft.config, name, None) for name in PARD_MASKS]
    rows = draft.get_input_embeddings().weight.shape[0]
    mask = checked_mask(
        named, PARD_MASKS, rows, "its embeddings", "; a draft model without masks goes with algo='draft_model'"
    )
    graph = capture_draft(target, draft, options)
    return Pard(draft, graph, options, map_one(target, graph), mask)


register_format("p_eagle", DraftFormat(is_p_eagle, read_p_eagle, EAGLE3_OVERRIDES), before="eagle3")
ALIASES["peagle"] = "p_eagle"
ALGORITHMS["p_eagle"] = Entry(ParallelHeadOptions, build_p_eagle, "a P-EAGLE head")
ALGORITHMS["pard"] = Entry(ParallelOptions, build_pard, "a smaller model that was trained to draft in parallel")
