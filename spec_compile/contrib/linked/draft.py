"""`LinkedDraft`: a DFlash draft with a transition, a prediction of acceptance, or both; and the layers of DFlash 2."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ...drafters.modules.dflash import DFlashDraft
from ...drafters.modules.layers import Layer, LayerKnobs
from ...runtime.state import State
from .proposer import LinkedBlockProposer
from .transitions import Confidence, Transition, table_rank


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
            are broadcast, see `Confidence.forward`.
        """
        if self.confidence is None:
            return None
        before = self.transition.embed(previous) if self.confidence.rank else None
        return self.confidence(normed, before)

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
