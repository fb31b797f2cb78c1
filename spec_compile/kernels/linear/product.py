"""`Product`: a linear layer of few rows, with what stands before and after it in a decoder layer."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..all_reduce import Exchange
from ..ops import is_paged


class Matrix(NamedTuple):
    """Weights or activations [R, I] as kernels take them. scales: of codes. stride: from one row to the next."""

    data: Tensor
    scales: Tensor | None
    stride: int


class RmsNorm(NamedTuple):
    """x is normed before the product, as by `kernels.norms.rms_norm`. Kernels for a CPU do it.

    weight: [I]. offset: added to the weight; None: the quotient is rounded before it is multiplied by the weight.
    """

    weight: Tensor
    eps: float
    offset: float | None


class Normed(NamedTuple):
    """x is the first half of an RMSNorm, ``stream * (norm weight + offset)``; the product is divided by the root mean
    square of the stream.

    squares: [R, T] float32; sums of the stream's squares, T for each row.
    eps: the norm's.
    """

    squares: Tensor
    eps: float


@dataclass(frozen=True)
class Gate:
    """The first half of the outputs is a gate of the second half: ``silu(gate) * up``."""


class ResidualStream(NamedTuple):
    """The product is added to the residual stream, and the norm that follows is begun.

    residual: [R, O]; the stream before.
    weight: [O]; of the norm. offset: added to the weight.
    scaled: [R, O]; memory for the first half of the norm, which is x of the next product, see `Normed`.
    squares: [R, T] float32; memory for the sums of squares.
    """

    residual: Tensor
    weight: Tensor
    offset: float
    scaled: Tensor
    squares: Tensor


class QkvHeads(NamedTuple):
    """The product is queries, keys and values, in the order of its outputs. Queries and keys are normed and rotated;
    keys and values are appended to the caches. The fields are named as in `attention.base.AttentionCall`."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    offset: float | None
    key_cache: Tensor
    value_cache: Tensor
    lengths: Tensor
    table: Tensor | None = None

    @property
    def page(self) -> int:
        """The slots of a page; 0 if each row has one page."""
        return self.key_cache.shape[2] if is_paged(self.table) else 0

    @property
    def slots(self) -> int:
        """The slots of a row."""
        return self.key_cache.shape[2] * (self.table.shape[1] if self.page else 1)


@dataclass(frozen=True)
class Product:
    """A linear layer, and the layer's steps around it that the kernel also does.

    x: [..., I]; activations of 16 bits.
    weight: [O, I]; of x's dtype, or codes.
    bias: [O].
    scales, kind: what codes mean: their `WeightLayout` has this kind and a `packing`; its parts are weight and scales.
    before: what x is besides activations.
    after: what becomes of the result; an `Exchange` sends it to all ranks of a group.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    kind: str = ""
    before: RmsNorm | Normed | None = None
    after: Gate | ResidualStream | QkvHeads | Exchange | None = None
