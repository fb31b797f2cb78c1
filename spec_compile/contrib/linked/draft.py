"""`LinkedDraft`, a DFlash draft with a transition, a prediction of acceptance, or both; its proposals and config."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ...drafters.checkpoints.config import SPECULATORS
from ...drafters.checkpoints.draft_files import DraftFiles
from ...drafters.checkpoints.files import Target
from ...drafters.modules.dflash import DFLASH, DFlashConfig, DFlashDraft
from ...drafters.modules.layers import Layer, LayerKnobs
from ...drafters.trees.grow import chain_parents, chain_scores
from ...drafters.trees.propose import BlockProposer, grow_levels, lattice_tree, propose_full, propose_grown
from ...kernels.top_logits import MAX_K, top_logits
from ...runtime.state import State
from .transitions import Confidence, Domino, GatedMarkov, Markov, RecurrentMarkov, Selector, Transition, table_rank


class LinkedDraft(DFlashDraft):
    """A DFlash draft whose blocks are drafted by its normed states, too.

    transition: how a block's drafts depend on each other (None: they do not).
    confidence: predicts their acceptance (None: it does not). It reads W1 of `transition` if its rank is not 0;
        ValueError if `transition` has no W1 of this rank.
    """

    def __init__(
        self, *arguments: Any, transition: Transition | None = None, confidence: Confidence | None = None, **named: Any
    ):
        super().__init__(*arguments, **named)
        if confidence is not None and confidence.rank not in (0, table_rank(transition)):
            raise ValueError(
                f"confidence: it reads {confidence.rank} numbers of the token before, and the transition's table has "
                f"{table_rank(transition)}; give it a Markov transition of this rank, or a rank of 0"
            )
        self.transition, self.confidence = transition, confidence

    def describe(self) -> list[str]:
        return [part.describe() for part in (self.transition, self.confidence) if part is not None]

    def forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """input_ids, positions [B, T] int64 -> the logits [B, T, Vd], and the normed states [B, T, h] that they come
        from."""
        normed = self.states(input_ids, positions)
        return self.logits(normed), normed

    def log_confidence(self, normed: Tensor, previous: Tensor | None = None) -> Tensor | None:
        """Logarithms [...] float32 of the chances that drafts are accepted; None if the draft does not predict them.

        normed [..., h]: of their places.
        previous [...] int64: the target's ids of the tokens before them, which only drafts with a transition need. Both
            are broadcast, see `Confidence.logits`.
        """
        if self.confidence is None:
            return None
        before = self.transition.embed(previous) if self.confidence.rank else None
        return F.logsigmoid(self.confidence.logits(normed, before))

    def proposer(self, *how):
        return super().proposer(*how) if self.transition is None else LinkedBlockProposer(self, *how)

    def propose(self, proposer, state: State, logits: Tensor, normed: Tensor) -> None:
        if self.transition is not None:
            return proposer.propose(state, logits, normed)
        predicted = self.log_confidence(normed[:, self.first :])
        proposer.propose(state, logits, self.first, self.draft_to_target, predicted)


@dataclass(frozen=True)
class ConvolvedKnobs(LayerKnobs):
    """Knobs of layers with convolutions. conv_taps, conv_group: see `BlockConvolution`."""

    conv_taps: int = 1
    conv_group: int = 1

    @property
    def extras(self) -> str:
        return f", convolutions of {self.conv_taps} slots around both parts"

    def make(self, config: LlamaConfig, number: int) -> "ConvolvedLayer":
        return ConvolvedLayer(config, number, self)


class BlockConvolution(nn.Module):
    """DFlash 2's two causal convolutions of few taps, whose coefficients are learned and also computed from each slot.

    Attention inside a block fades over the layers, and a slot's draft depends most on the slot before it.

    size: channels.
    taps: slots that are read, the slot itself and those before it in its block.
    group: neighbouring channels that share the computed part of a coefficient.
    """

    def __init__(self, size: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def around(self, x: Tensor, sublayer) -> Tensor:
        """x [B, T, H] -> convolve(sublayer(convolve(x))); the coefficients of both convolutions come from x."""
        computed = self.kernel_projection(x).unflatten(2, (2, self.taps, -1)).repeat_interleave(self.group, dim=4)
        before, after = (self.base_kernel + computed).unbind(dim=2)  # [B, T, taps, H]
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        out = kernel[:, :, 0] * x
        for tap in range(1, self.taps):
            shifted = F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]  # zero before the block's first slot
            out = out + kernel[:, :, tap] * shifted
        return out


class ConvolvedLayer(Layer):
    """A pre-norm decoder layer with a `BlockConvolution` around each of its two parts."""

    def __init__(self, config: LlamaConfig, number: int, knobs: ConvolvedKnobs):
        super().__init__(config, number, knobs)
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(config.hidden_size, knobs.conv_taps, knobs.conv_group) for _ in range(2)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention_conv.around(self.input_layernorm(x), partial(self.self_attn, rope=rope))
        return x + self.mlp_conv.around(self.post_attention_layernorm(x), self.mlp)


# Chains and trees over a block whose drafts depend on each other (see `transitions`).

TINY = 1e-6
"""Lower bound of the probability of all tokens that are no candidates."""


class LinkedBlockProposer(BlockProposer):
    """Proposes chains of the likeliest token after the one before, and the best trees over candidates.

    The candidates of a place are its likeliest tokens by the logits of the block, without the transition: as many as
    the draft's transition chooses among, or else `topk`; in a chain all tokens are. It takes the arguments of
    `BlockProposer`.
    """

    def __init__(self, draft: LinkedDraft, places: int, topk: int, nodes: int, draws: bool, temperature: float):
        self.draft, self.transition, self.is_tree = draft, draft.transition, topk > 1
        self.candidates = self.transition.candidates or (topk if self.is_tree else None)
        super().__init__(places, self.candidates if self.is_tree else 1, nodes, draws, temperature)

    def propose(self, state: State, logits: Tensor, normed: Tensor) -> None:
        """Propose trees below the last committed tokens.

        logits [B, first + P, Vd], normed [B, first + P, h]: the draft's output at a block, whose `first` rows draft
        nothing.
        """
        root, block = state.tree_tokens[:, 0].clone(), LinkedBlock(self, logits, normed)
        if self.drawn is not None:
            return self._draw(state, root, block)
        if not self.is_tree:
            return propose_full(state, *self.chain(root, block))
        candidates = block.to_target(block.ids)
        if self.transition.is_first_order:
            tree = lattice_tree(root, candidates, block.table(root, candidates), self.nodes)
        else:
            tree = grow_levels(root, candidates.shape[1], block.follow, block.start[:, 0], self.nodes)
        propose_full(state, *tree)

    def chain(self, root: Tensor, block: "LinkedBlock") -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest token after the one before, place by place, below the root: tokens, parents, scores [B, N].

        Scores sum logarithms of the chances that drafts are accepted: as the draft predicts them, or else their
        probabilities among the candidates.
        """
        tokens, logprobs, carried = [root[:, None]], [], block.start
        for place in range(self.nodes - 1):
            # The likeliest candidate after the last token, as the target's id.
            scores, carried = block.scores(place, tokens[-1], carried)
            logprob, best = top_logits(scores[:, 0], 1, 1.0)
            logprobs.append(logprob)
            tokens.append(best if block.ids is None else block.ids[:, place].gather(1, best))
            tokens[-1] = block.to_target(tokens[-1])
        path = torch.cat(tokens, dim=1)
        predicted = self.draft.log_confidence(block.normed[:, : self.nodes - 1], path[:, :-1])
        scores = chain_scores(torch.cat(logprobs, dim=1) if predicted is None else predicted)
        return path, chain_parents(root, self.nodes), scores

    def _draw(self, state: State, root: Tensor, block: "LinkedBlock") -> None:
        """Propose a chain whose tokens are drawn one after the other."""

        def step(tokens, carried, ancestors, depth, offset, wanted):
            scores, carried = block.scores(offset + 1, tokens, carried)
            if block.ids is not None:
                everywhere = scores.new_full((len(scores), 1, block.vocabulary), -math.inf)
                scores = everywhere.scatter(2, block.ids[:, offset + 1, None], scores)
            return carried, scores

        carried, logits = step(root[:, None], block.start, None, None, -1, 1)
        propose_grown(state, self.drawn, True, logits[:, 0], carried[:, 0], step, self.draft.draft_to_target)


class LinkedBlock:
    """The draft's output at one block, and the scores of candidates after each token in it.

    ids [B, P, K]: the candidates of each place, as rows of the output matrix (None: all tokens are).
    logprobs [B, P, K]: theirs by the logits of the block, without the transition, at the proposer's temperature.
    start [B, 1, C]: the state of the root.
    """

    def __init__(self, proposer: LinkedBlockProposer, logits: Tensor, normed: Tensor):
        self.draft, self.transition, self.temperature = proposer.draft, proposer.transition, proposer.temperature
        first, self.vocabulary = self.draft.first, logits.shape[2]
        self.logits, self.normed, self.ids = logits[:, first:], normed[:, first:], None
        if proposer.candidates is not None:
            scores, ids = top_logits(logits.flatten(0, 1), proposer.candidates, self.temperature)
            self.logprobs, self.ids = (x.view(*logits.shape[:2], -1)[:, first:] for x in (scores, ids))
        self.start = normed.new_zeros(len(normed), 1, self.transition.state_size)

    def to_target(self, ids: Tensor) -> Tensor:
        """The target's ids of rows of the output matrix."""
        return ids if self.draft.draft_to_target is None else self.draft.draft_to_target[ids]

    def scores(self, place: int | slice, previous: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, up to a constant, of the candidates of a place after each of W nodes: [B, W, K or Vd] float32.

        previous [B, W] int64, carried [B, W, C]: see `drafters.trees.propose.Follow`.

        Several places, of a transition of first order, stand before W in all shapes.
        """
        unlinked = (self.logits if self.ids is None else self.logprobs)[:, place, None].float()
        hidden = self.normed[:, place, None].expand(*previous.shape, -1)
        query, carried = self.transition.query(hidden, previous, carried, self.draft.embedding)
        if self.transition.skipped and place < self.transition.skipped:
            return unlinked.expand(-1, previous.shape[1], -1), carried
        if self.ids is None:
            return unlinked + F.linear(query, self.transition.keys).float(), carried
        keys = F.embedding(self.ids[:, place], self.transition.keys)  # [B, K, r]
        return unlinked + (query @ keys.mT).float() / self.temperature, carried

    def follow(self, place: int, previous: Tensor, carried: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `drafters.trees.propose.Follow`."""
        logprobs, carried = self.logprobs_after(place, previous, carried)
        return self.to_target(self.ids[:, place, None]), logprobs, carried

    def table(self, root: Tensor, candidates: Tensor) -> Tensor:
        """Log-probabilities [B, P, K, K] of all places, as `lattice_tree` takes them, of a transition of first order.

        candidates [B, P, K]: the target's ids.
        """
        # Each place's candidates follow the candidates of the place before; the first place's follow the root.
        first = root[:, None, None].expand(-1, 1, candidates.shape[2])
        previous = torch.cat([first, candidates[:, :-1]], dim=1)
        carried = self.start[:, :, None].expand(*previous.shape, -1)
        return self.logprobs_after(slice(None), previous, carried)[0]

    def logprobs_after(self, place: int | slice, previous: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """log(q) of the candidates of a place, q their probabilities; it has the arguments and the shapes of `scores`.

        Where the draft predicts the chance c that its draft after a token is accepted, it is log(c * q): the candidates
        after that token share c. c = 0.8 and q = [0.5, 0.25] give chances of [0.4, 0.2]. If q is the target's
        distribution, c is 1.
        """
        scores, carried = self.scores(place, previous, carried)
        total = scores.logsumexp(dim=-1, keepdim=True)
        # A transition over all tokens also shifts those that are no candidates. Their total probability is taken
        # without it, because the sum over all tokens would cost a product with the output matrix for each node.
        if self.transition.candidates is None:
            others = (1 - self.logprobs[:, place].exp().sum(dim=-1)).clamp(min=TINY).log()
            total = torch.logaddexp(total, others[..., None, None])
        logprobs = scores - total
        predicted = self.draft.log_confidence(self.normed[:, place, None], previous)
        return logprobs if predicted is None else logprobs + predicted[..., None], carried


# Its format: the config of a draft of the kin, and the parts that it asks for.

NAMES = {"dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino"}
"""As `drafters.modules.dflash.NAMES`."""
KEYS = {
    "dspark_bonus_anchor", "causal_head", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "markov_rank", "markov_head_type", "emb_dim", "gru_hidden_dim", "enable_confidence_head",
    "confidence_head_with_markov", "projector_type",
    # sizes of parts whose switches are not known here
    "dflash2_conv_kernel_size", "dflash2_conv_group_size", "dflash2_selector_rank", "dflash2_selector_top_k",
    "dflash2_selector_search_mode",
}  # fmt: skip
MARKOV = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}
"""Classes by ``markov_head_type``."""


class LinkedConfig(DFlashConfig):
    """The ``config.json`` of a draft of JetSpec, DSpark, Domino or DFlash 2."""

    only = DFlashConfig.only | {"projector_type": ("dflash", "dspark", "domino")}

    def __init__(self, raw: dict):
        super().__init__(raw, {*DFLASH, *KEYS})
        is_dspark = any("DSpark" in name for name in self.architectures)
        self.deepspec = is_dspark and not self.speculators
        self.drafts_first = is_dspark and not self.get("dspark_bonus_anchor")
        if self.get("projector_type") == "domino":
            self.keys.add("pure_draft_prefix_len")

    @classmethod
    def fits(cls, files: DraftFiles) -> bool:
        """True if a draft is of the kin: if its config or its tensors have more than DFlash has."""
        config = files.config
        sections = config, *(config.get(name) for name in ("dflash_config", "transformer_layer_config", "model"))
        return (
            config.get(SPECULATORS) in NAMES
            or any(name in files.architectures for name in NAMES.values())
            or any(not KEYS.isdisjoint(section) for section in sections if isinstance(section, dict))
            or any(name.startswith(("transition.", "confidence.")) for name in files.names)
        )

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        knobs = super().layer_knobs(names)
        if not self.get("conv_kernel_size"):
            return knobs
        taps, group = self.integer("conv_kernel_size", 1), self.integer("conv_group_size", 1)
        if self.layer.get("hidden_size", 0) % group:
            raise ValueError(f"draft: its config has conv_group_size {group}, which does not divide its hidden_size")
        return ConvolvedKnobs(**vars(knobs), conv_taps=taps, conv_group=group)

    @property
    def causal(self) -> tuple[bool, ...]:
        """JetSpec says by causal_head that all layers are. ValueError if two keys contradict each other."""
        if not self.get("causal_head"):
            return super().causal
        for name in ("is_causal", "causal"):
            if self.get(name) is False:
                raise ValueError(f"draft: its config has causal_head true and {name} false, which exclude each other")
        return (True,) * self.count

    def make(self, target: Target, rows: int, *arguments: Any, **named: Any) -> DFlashDraft:
        transition = self.transition(target.vocab_size, rows)
        confidence = self.confidence(transition)
        if transition is None and confidence is None:
            return super().make(target, rows, *arguments, **named)
        return LinkedDraft(*arguments, **named, transition=transition, confidence=confidence)

    def ignore(self, files: DraftFiles, draft: DFlashDraft) -> None:
        if getattr(draft, "confidence", None) is None:
            for name in files.checkpoint.shapes:
                if name.startswith("confidence_head."):
                    why = "it predicts acceptance, and the config has no enable_confidence_head"
                    files.checkpoint.ignore(name, why)

    def flavour(self, draft: DFlashDraft) -> str:
        transition = getattr(draft, "transition", None)
        name = "JetSpec" if self.get("causal_head") else draft.flavour
        name = name if transition is None else transition.flavour
        return name + (" (speculators)" if self.speculators else " (DeepSpec)" if self.deepspec else "")

    def transition(self, vocab_size: int, rows: int) -> Transition | None:
        """The transition between drafts, without weights; None if the config asks for none.

        vocab_size: tokens of the target.
        rows: tokens that the draft can draft.

        Raises ValueError, naming the key, if the config asks for two, or for one that is not built here.
        """
        switches = {
            "markov_rank": bool(self.get("markov_rank", self.get("projector_type") == "dspark")),
            "selector_rank": bool(self.get("selector_rank") or self.get("selector_top_k")),
            "projector_type 'domino'": self.get("projector_type") == "domino",
        }
        asked = [name for name, is_on in switches.items() if is_on]
        if len(asked) > 1:
            raise ValueError(f"draft: its config has {' and '.join(asked)}, of which a draft can have one")
        sizes = self.layer["hidden_size"], vocab_size, rows
        if asked == ["markov_rank"]:
            name = self.get("markov_head_type", "vanilla")
            if name not in MARKOV:
                expected = ", ".join(MARKOV)
                raise ValueError(f"draft: its config has markov_head_type {name!r}; expected one of {expected}")
            return MARKOV[name](*sizes, self.integer("markov_rank", 1))
        if asked == ["selector_rank"]:
            rank, candidates = self.integer("selector_rank", 1), self.integer("selector_top_k", 2)
            most = min(MAX_K, rows)
            if candidates > most:
                raise ValueError(f"draft: its config has selector_top_k {candidates}, at most {most} are built here")
            return Selector(*sizes, rank, candidates)
        if asked:
            rank, state_size = self.integer("emb_dim", 1), self.integer("gru_hidden_dim", 1)
            return Domino(sizes[0], rows, rank, state_size, self.get("pure_draft_prefix_len", 0))
        return None

    def confidence(self, transition: Transition | None) -> Confidence | None:
        """The prediction of acceptance, without weights; None if the config does not enable it.

        transition: the draft's; a prediction reads the table of a Markov head unless the config says that it does not.

        Raises ValueError if the config has it read a table that `transition` does not have.
        """
        if not self.get("enable_confidence_head"):
            return None
        rank = table_rank(transition)
        reads_table = bool(self.get("confidence_head_with_markov", rank > 0))
        if reads_table and rank == 0:
            raise ValueError(
                "draft: its config has confidence_head_with_markov, and no markov_rank of a table that this could read"
            )
        return Confidence(self.layer["hidden_size"], rank if reads_table else 0)
