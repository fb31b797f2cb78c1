"""`ExpertFormat`: how the weights of a mixture's experts lie in memory, and the gate after their first product."""

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from . import mxfp4
from .codes import Place, exact_linear
from .fp8 import Fp8Block, rounded_blocks
from .held import Rearranged
from .rows import rounds_activations


@dataclass(frozen=True)
class ExpertFormat:
    """The format of one product of all experts: E experts, O outputs, I inputs.

    Its parts are a list of tensors: the weight, the scales if it is quantised, the bias if it is biased.

    gate: applied to the outputs: "silu": ``silu(gate) * up``; "clamped" (gpt-oss): ``gate * sigmoid(alpha * gate) *
        (up + 1)`` of gate and up within `limit`; "none": no gate.
    interleaved: gates and ups alternate: columns [g0, u0, g1, u1]; else [g0, g1, u0, u1].
    transposed: the weight is [E, I, O]; else [E, O, I].
    biased: the last part is the bias [E, O].
    alpha, limit: constants of the gate "clamped".
    block: the weight is float8_e4m3fn with scales float32 [E, O / block, I / block]; 0: it is not.
    rounds: with a block, inputs are rounded to FP8, too.
    mxfp4: I, if the weight is in MXFP4 with the parts of `mxfp4.pack`; 0: it is not.
    first, of: the parts have only the experts from number `first` on, of as many as `of`; with of = 0 they have all.
        The first product of others is undefined, and the second one leaves them out.
    """

    gate: str = "none"
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    block: int = 0
    rounds: bool = True
    mxfp4: int = 0
    first: int = 0
    of: int = 0

    @property
    def text(self) -> str:
        """The constant in a graph that `format_of` reads."""
        return " ".join(map(str, astuple(self)))

    def sizes(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """Outputs O, before the gate, and inputs I."""
        outputs, inputs = parts[0].shape[1:]
        if self.mxfp4:
            return outputs, self.mxfp4
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def columns(self, parts: Sequence[Tensor]) -> int:
        """Outputs after the gate."""
        return self.sizes(parts)[0] // (1 if self.gate == "none" else 2)

    def bias(self, parts: Sequence[Tensor]) -> Tensor | None:
        return parts[-1] if self.biased else None

    def scales(self, parts: Sequence[Tensor]) -> Tensor | None:
        return parts[1] if self.block or self.mxfp4 else None

    @property
    def scale_size(self) -> int:
        """Inputs that share a scale; 0: there are no scales."""
        return mxfp4.GROUP if self.mxfp4 else self.block

    def weight(self, parts: Sequence[Tensor], expert: int, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] of an expert."""
        if self.mxfp4:
            return mxfp4.weight(parts[0][expert], parts[1][expert], self.mxfp4, dtype)
        weight = parts[0][expert].T if self.transposed else parts[0][expert]
        if not self.block:
            return weight.to(dtype)
        return Fp8Block(self.block, self.block).weight([weight, parts[1][expert]], weight.shape[1]).to(dtype)

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """Where each part but the bias has the outputs and the inputs; in MXFP4 only the outputs, because the inputs of
        a word are not neighbours."""
        if self.mxfp4:
            return [Place((1, 1)), Place((2, 1))]
        outputs, inputs = (2, 1) if self.transposed else (1, 2)
        scales = [Place((1, self.block), (2, self.block))] if self.block else []
        return [Place((outputs, 1), (inputs, 1)), *scales]

    def of_inputs(self, size: int) -> "ExpertFormat":
        """The format of shares with `size` of the inputs."""
        return replace(self, mxfp4=size) if self.mxfp4 else self

    def rearranged(self, parts: Sequence[Tensor], by_inputs: bool) -> Rearranged | None:
        """As `held.rearranged`: MXFP4 in the order of files, where inputs can be cut."""
        if not self.mxfp4 or not by_inputs:
            return None

        def pack(cut: list[Tensor], inputs: int) -> tuple[ExpertFormat, list[Tensor]]:
            return self.of_inputs(inputs), [*mxfp4.pack(*(part.contiguous() for part in cut))]

        places = [Place((1, 1), (2, mxfp4.GROUP)), Place((1, 1), (2, mxfp4.GROUP))]
        return Rearranged(places, lambda: [*mxfp4.unpack(*parts[:2], self.mxfp4)], pack)

    def product(self, x: Tensor, parts: Sequence[Tensor], expert: int) -> Tensor:
        """x [R, I] by the weight of an expert -> [R, O] of x's dtype."""
        bias = self.bias(parts)
        bias = None if bias is None else bias[expert].to(x.dtype)
        if not self.block:
            return F.linear(x, self.weight(parts, expert, x.dtype), bias)
        wide = rounded_blocks(x, self.block) if self.rounds else x.float()
        return exact_linear(wide, self.weight(parts, expert, torch.float32), bias).to(x.dtype)

    def gated(self, y: Tensor) -> Tensor:
        """The gate of y [..., O] -> [..., columns]."""
        if self.gate == "none":
            return y
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, -1)
        if self.gate == "silu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def format_here(text: str) -> ExpertFormat:
    """The format that has this `text`, with inputs that are not rounded where no layer rounds its activations."""
    layout = format_of(text)
    return layout if rounds_activations.get() else replace(layout, rounds=False)


@functools.cache
def format_of(text: str) -> ExpertFormat:
    """The format that has this `text`."""
    gate, interleaved, transposed, biased, alpha, limit, block, rounds, *numbers = text.split()
    interleaved, transposed, biased, rounds = (flag == "True" for flag in (interleaved, transposed, biased, rounds))
    return ExpertFormat(
        gate, interleaved, transposed, biased, float(alpha), float(limit), int(block), rounds, *map(int, numbers)
    )
