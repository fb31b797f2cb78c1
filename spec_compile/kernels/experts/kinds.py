"""`Kind`: how the weights of a mixture's experts lie in memory, and what stands behind their first product."""

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linear.quantised.fp8_block import rounded_blocks
from ..linear.quantised.layout import exact_linear
from . import mxfp4


@dataclass(frozen=True)
class Kind:
    """Of one product of all experts, whose parts are the weight, the scales if it is quantised, and the bias.

    E experts, O outputs, I inputs. gate: of the outputs, "silu": ``silu(gate) * up``; "clamped": gpt-oss's, of gate and
    up within `limit`, ``gate * sigmoid(alpha * gate) * (up + 1)``; "none": there is none. interleaved: gate and up
    alternate, else the first half is the gate. transposed: the weight is [E, I, O], else [E, O, I]. biased: the bias is
    the last part, [E, O]. block: the weight is float8_e4m3fn with a scale for so many outputs and inputs, float32
    [E, O / block, I / block], and inputs are rounded to FP8, too, unless `rounds` says that they are not; 0: it is not.
    mxfp4: I of a weight in MXFP4, whose parts are those of `mxfp4.pack`; 0: it is not.
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

    @property
    def text(self) -> str:
        """The constant of a graph from which `kind_of` makes this kind again."""
        return " ".join(map(str, astuple(self)))

    def sizes(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """Outputs before the gate, and inputs."""
        outputs, inputs = parts[0].shape[1:]
        if self.mxfp4:
            return outputs, self.mxfp4
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def columns(self, parts: Sequence[Tensor]) -> int:
        """Outputs behind the gate."""
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
        scales = parts[1][expert].repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return weight.to(dtype) * scales[: weight.shape[0], : weight.shape[1]].to(dtype)

    def product(self, x: Tensor, parts: Sequence[Tensor], expert: int) -> Tensor:
        """x [R, I] by the weight of an expert -> [R, O] of x's dtype."""
        bias = self.bias(parts)
        bias = None if bias is None else bias[expert].to(x.dtype)
        if not self.block:
            return F.linear(x, self.weight(parts, expert, x.dtype), bias)
        wide = rounded_blocks(x, self.block) if self.rounds else x.float()
        return exact_linear(wide, self.weight(parts, expert, torch.float32), bias).to(x.dtype)

    def gated(self, y: Tensor) -> Tensor:
        """y [..., O] behind the gate."""
        if self.gate == "none":
            return y
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, -1)
        if self.gate == "silu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def unrounded(text: str) -> str:
    """The text of a kind whose inputs are not rounded."""
    return replace(kind_of(text), rounds=False).text


@functools.cache
def kind_of(text: str) -> Kind:
    """The kind of which `text` is the text."""
    gate, interleaved, transposed, biased, alpha, limit, block, rounds, inputs = text.split()
    interleaved, transposed, biased, rounds = (flag == "True" for flag in (interleaved, transposed, biased, rounds))
    return Kind(gate, interleaved, transposed, biased, float(alpha), float(limit), int(block), rounds, int(inputs))
