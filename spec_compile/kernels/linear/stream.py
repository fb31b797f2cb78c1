"""Products of a decoder layer with what stands around them: the residual stream, and the RMSNorm that follows it.

An RMSNorm needs a whole row before it can divide by its root mean square. The product that ends at the residual stream
(`small_m_add`) does the first half, times the norm's weight, and adds up squares; the one that begins there
(`normed_matmul`, `normed_swiglu`) divides its result. No kernel for the norm is left.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import as_rows
from .plans import ceil_div, squared_columns
from .quantised import packed_linear
from .small_m import Normed, Stream, plan_of, run


@torch.library.custom_op("spec_compile::small_m_add", mutates_args=())
def small_m_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, offset: float,
    scales: Tensor | None = None, kind: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The residual stream behind a linear layer, and the first half of the RMSNorm that follows.

    x [..., I], weight [O, I], bias [O] or None, residual [..., O], norm_weight [O], all of one dtype, but for a
    quantised weight, with scales and kind as of `small_m_matmul`.
    -> stream [..., O], ``F.linear(x, weight, bias) + residual``, rounded twice as these are;
    scaled [..., O], ``stream * (norm_weight + offset)``;
    squares [R, T] float32: sums of the squares of each `squared_columns` columns of the stream's R rows.
    """
    how = plan_of(x, weight, kind)
    if how is None:
        return plain_stream(packed_linear(x, weight, bias, scales, kind), residual, norm_weight, offset)
    behind = stream_behind(residual, norm_weight, offset)
    out = run(x, weight, bias, how, stream=behind, scales=scales, kind=kind)
    return out, behind.scaled.view(residual.shape), behind.squares


@small_m_add.register_fake
def _(x, weight, bias, residual, norm_weight, offset, scales=None, kind=""):
    behind = stream_behind(residual, norm_weight, offset)
    return x.new_empty(residual.shape), behind.scaled.view(residual.shape), behind.squares


def stream_behind(residual: Tensor, norm_weight: Tensor, offset: float) -> Stream:
    """What a kernel needs to add to residual [..., O], with memory for what it returns beside the stream."""
    size = residual.shape[-1]
    squares = residual.new_empty(residual.numel() // size, ceil_div(size, squared_columns(size)), dtype=torch.float32)
    before = as_rows(residual)
    return Stream(before, norm_weight.contiguous(), offset, before.new_empty(before.shape), squares)


def plain_stream(
    product: Tensor, residual: Tensor, norm_weight: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `small_m_add` means, of a product that is rounded."""
    stream = product + residual
    return stream, (stream.float() * (norm_weight.float() + offset)).to(stream.dtype), _squares(stream)


def _squares(stream: Tensor) -> Tensor:
    """[..., O] -> [R, T] float32, see `small_m_add`."""
    size = stream.shape[-1]
    wide = F.pad(stream.reshape(-1, size).float().square(), (0, -size % squared_columns(size)))
    return wide.unflatten(1, (-1, squared_columns(size))).sum(dim=2)


@torch.library.custom_op("spec_compile::normed_matmul", mutates_args=())
def normed_matmul(
    scaled: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scales: Tensor | None = None,
    kind: str = "",
) -> Tensor:  # fmt: skip
    """A linear layer behind an RMSNorm whose first half is done: scaled [..., I] and squares as of `small_m_add`,
    weight [O, I], bias [O] or None -> [..., O], ``F.linear(scaled / rms, weight, bias)`` rounded once, with rms the
    root of the mean of the squares plus eps."""
    how = plan_of(scaled, weight, kind)
    if how is None:
        out = packed_linear(scaled, weight, None, scales, kind).float() * _inverse_rms(scaled, squares, eps)
        return (out if bias is None else out + bias.float()).to(scaled.dtype)
    return run(scaled, weight, bias, how, normed=Normed(squares, eps), scales=scales, kind=kind)


@normed_matmul.register_fake
def _(scaled, squares, weight, bias, eps, scales=None, kind=""):
    return scaled.new_empty(*scaled.shape[:-1], weight.shape[0])


@torch.library.custom_op("spec_compile::normed_swiglu", mutates_args=())
def normed_swiglu(
    scaled: Tensor, squares: Tensor, weight: Tensor, eps: float, scales: Tensor | None = None, kind: str = ""
) -> Tensor:
    """``silu(gate) * up`` [..., O / 2] of the halves of `normed_matmul` without a bias, rounded once."""
    how = plan_of(scaled, weight, kind)
    if how is None:
        product = packed_linear(scaled, weight, None, scales, kind).float()
        gate, up = (product * _inverse_rms(scaled, squares, eps)).chunk(2, -1)
        return (F.silu(gate) * up).to(scaled.dtype)
    return run(scaled, weight, None, how, gated=True, normed=Normed(squares, eps), scales=scales, kind=kind)


@normed_swiglu.register_fake
def _(scaled, squares, weight, eps, scales=None, kind=""):
    return scaled.new_empty(*scaled.shape[:-1], weight.shape[0] // 2)


def _inverse_rms(scaled: Tensor, squares: Tensor, eps: float) -> Tensor:
    """[..., 1] float32."""
    return torch.rsqrt(squares.sum(dim=1) / scaled.shape[-1] + eps).view(*scaled.shape[:-1], 1)
