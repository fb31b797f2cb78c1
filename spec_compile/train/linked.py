"""DSpark and Domino drafts: DFlash whose drafts depend on those before them in the block.

The true tokens of the text stand in place of these drafts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..drafters.checkpoints.dflash_config import MARKOV
from ..drafters.modules.confidence import Confidence
from ..drafters.modules.transitions import Domino, Transition
from .blocks import Blocks
from .data import Batch, move
from .dflash import DFlashTrainer
from .features import Features
from .loss import Distilled, Mix
from .options import TrainingOptions
from .positions import FIXED

SPREAD = 0.02
"""Standard deviation of new weights of a transition, as ``initializer_range`` of published configs."""
RANK = 256
"""Numbers of the low-rank table of a transition by default."""
DISTANCE = Mix(cross_entropy=0.1, l1=0.9)
"""DSpark's distance of distributions (arXiv:2607.05147; DeepSpec: ce_loss_alpha, l1_loss_alpha)."""
GAMMA = 4.0
"""Decay of the weights of DSpark's slots (DeepSpec: loss_decay_gamma)."""
GRU_SIZE, UNLINKED = 1024, 1
"""Domino's state (SpecForge: gru_hidden_dim), and the first places without a bias (pure_draft_prefix_len)."""
BASE_UNTIL = 0.5
"""The share of a training in which Domino's loss without the transition fades (lambda_base_decay_ratio)."""


class LinkedTrainer(DFlashTrainer):
    """Blocks whose first slot drafts, too, and a transition: logits are U h + keys . query(h, tokens before)."""

    first = 0

    def outputs(self, batch: Batch, features: Features, drawn: Blocks) -> list[Tensor]:
        states, before = self.draft(batch, features, drawn), self.tokens_before(batch, drawn)
        return [states, self.queries(states, before)]

    @property
    def matrices(self) -> list[Tensor]:
        return [self.module.head_weight, self.module.transition.keys]

    def tokens_before(self, batch: Batch, drawn: Blocks) -> Tensor:
        """The text's token before each slot's draft, [B, n, T] int64, on the draft's device."""
        # Slot k drafts after the token at anchor + k.
        length = batch.ids.shape[1]
        places = (drawn.anchors[:, :, None] + torch.arange(self.block_size)).clamp(max=length - 1).flatten(1)
        return move(batch.ids.gather(1, places), self.device).view(*drawn.anchors.shape, self.block_size)

    def queries(self, states: Tensor, before: Tensor) -> Tensor:
        """The queries of the transition, [B, n, T, r]; zeros at places that it skips.

        states: [B, n, T, h]
        before: [B, n, T] int64; the token before each slot's draft
        """
        transition, queries = self.module.transition, []
        embedding = self.module.embedding
        carried = states.new_zeros(*states.shape[:2], transition.state_size)
        if transition.is_first_order:
            return transition.query(states, before, carried, embedding)[0]
        for slot in range(self.block_size):
            query, carried = transition.query(states[:, :, slot], before[:, :, slot], carried, embedding)
            queries.append(torch.zeros_like(query) if slot < transition.skipped else query)
        return torch.stack(queries, dim=2)


class DSparkTrainer(LinkedTrainer):
    """DSpark (arXiv:2607.05147): a Markov head, and a prediction of each draft's acceptance.

    The loss is 0.1 * cross entropy + 0.9 * L1 distance + the binary cross entropy of the prediction c with the chance
    1 - L1 / 2 that a draft is accepted (deepseek-ai/DeepSpec, deepspec/modeling/dspark/loss.py, which takes the cross
    entropy with the text's tokens).
    """

    name = "dspark"
    takes = DFlashTrainer.takes | {"markov_rank", "markov_head_type"}
    default_block_size = 7
    position_weight = FIXED
    architecture = "DSparkDraftModel"

    def link(self, options: TrainingOptions) -> tuple[Transition, Confidence]:
        self.kind, self.rank, target = options.markov_head_type or "vanilla", options.markov_rank or RANK, self.target
        transition = MARKOV[self.kind](target.hidden_size, target.vocab_size, target.vocab_size, self.rank)
        confidence = Confidence(target.hidden_size, self.rank)
        for part in (transition, confidence):
            spread(part)
        return transition, confidence

    def outputs(self, batch: Batch, features: Features, drawn: Blocks) -> list[Tensor]:
        states, before = self.draft(batch, features, drawn), self.tokens_before(batch, drawn)
        predicted = self.module.confidence.logits(states, self.module.transition.embed(before))
        return [states, self.queries(states, before), predicted]

    def objective(self, rows: list[Tensor], distil: Callable[..., Distilled]) -> Tensor:
        made = distil(list(zip(rows, self.matrices)), mix=DISTANCE)
        overlaps, weights = (values.float() for values in (made.overlaps, made.weights))
        predicted = F.binary_cross_entropy_with_logits(rows[-1].float(), overlaps, weights, reduction="sum")
        return made.loss + predicted

    def slot_weights(self) -> Tensor:
        return torch.exp(-torch.arange(self.block_size) / GAMMA)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """SpecForge's form: DFlash's files with a ``projector_type``, without copies of the target's matrices."""
        config, tensors = super().publish()
        config["dflash_config"] |= {
            "projector_type": "dspark", "sample_from_anchor": True, "markov_rank": self.rank,
            "markov_head_type": self.kind, "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip
        return config, renamed(tensors, {"transition.": "markov_head.", "confidence.": "confidence_head."})


class DominoTrainer(LinkedTrainer):
    """Domino (arXiv:2605.29707): a GRU reads the tokens before a draft.

    The loss is (1 - l) * distance + l * distance without the transition, with l from 1 to 0 over the first half of the
    training (sgl-project/SpecForge, specforge/core/domino.py).
    """

    name = "domino"
    takes = DFlashTrainer.takes | {"emb_dim", "gru_hidden_dim"}

    def link(self, options: TrainingOptions) -> tuple[Transition, None]:
        self.rank, size, target = options.emb_dim or RANK, options.gru_hidden_dim or GRU_SIZE, self.target
        transition = Domino(target.hidden_size, target.vocab_size, self.rank, size, UNLINKED)
        spread(transition.embed_proj)
        for parameter in transition.prefix_gru.parameters():
            torch.nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)  # as in `torch.nn.GRU`
        return transition, None

    def objective(self, rows: list[Tensor], distil: Callable[..., Distilled]) -> Tensor:
        products = list(zip(rows, self.matrices))
        base = max(0.0, 1 - self.share / BASE_UNTIL)
        linked = (1 - base) * distil(products).loss
        return linked + base * distil(products[:1]).loss if base else linked

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        config, tensors = super().publish()
        config["dflash_config"] |= {
            "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": UNLINKED, "emb_dim": self.rank,
            "gru_hidden_dim": self.module.transition.state_size,
        }  # fmt: skip
        return config, renamed(tensors, {"transition.": ""})


def spread(module: nn.Module) -> None:
    """New weights for a part of a transition."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=SPREAD) if parameter.dim() > 1 else torch.nn.init.zeros_(parameter)


def renamed(tensors: dict[str, Tensor], prefixes: dict[str, str]) -> dict[str, Tensor]:
    """The tensors with other prefixes of their names."""
    for ours, theirs in prefixes.items():
        tensors = {theirs + name.removeprefix(ours) if name.startswith(ours) else name: value
                   for name, value in tensors.items()}  # fmt: skip
    return tensors
