"""Products on a CPU in bfloat16 with the addition and the RMSNorm before them, and the gate after them, in one call.

Between products a decoder layer computes little, but each piece of compiled code costs some microseconds of Python, as
much as a product of a small model. `passes.fuse_around` puts these ops into the graph.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..launching import are_plain
from . import few_rows
from .few_rows import Around, ProductForm


def around_product(
    x: Tensor, norm: Tensor | None, eps: float, offset: float | None, parts: list[Tensor], bias: Tensor | None,
    kind: str, is_gated: bool,
) -> Tensor:  # fmt: skip
    """``F.linear(rms_norm(x), weight, bias)``: x [..., I], norm [I], bias [O] -> [..., O], all of one dtype.

    norm, eps, offset: of the RMSNorm, as `kernels.norms.rms_norm` takes them; None: x is multiplied as it is.
    parts, kind: of a quantised layer; with the kind "" the weight [O, I].
    is_gated: the result is ``silu(gate) * up`` [..., O / 2] of the halves of the outputs.

    Each step is rounded as PyTorch does without a compiler. A row has the same bits with any number of rows.
    """
    form = form_of(x, parts, kind)
    if form is None:
        return _plain(x, Around(norm, eps, offset, is_gated=is_gated), parts, bias, kind)
    return _run(form, x, parts, bias, Around(norm, eps, offset, is_gated=is_gated))


def add_around_product(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, offset: float | None, parts: list[Tensor],
    bias: Tensor | None, kind: str, is_gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> ``x + residual``, rounded to their dtype, and `around_product` of that; x, residual [..., I]."""
    if norm is None:  # the dispatcher takes it for a tensor
        raise TypeError("norm: expected a tensor, got None")
    check_residual(x, residual)
    form = form_of(x, parts, kind)
    if form is None:
        stream = x + residual
        return stream, _plain(stream, Around(norm, eps, offset, is_gated=is_gated), parts, bias, kind)
    stream = x.new_empty(x.shape)
    around = Around(norm, eps, offset, residual.contiguous(), stream, is_gated)
    return stream, _run(form, x, parts, bias, around)


def check_residual(x: Tensor, residual: Tensor) -> None:
    """TypeError and ValueError unless the kernel can add both."""
    if x is None or residual is None:
        raise TypeError("x, residual: expected tensors, got None")
    if residual.dtype is not x.dtype:
        raise TypeError(f"residual: expected {x.dtype}, got {residual.dtype}")
    if residual.shape != x.shape:
        raise ValueError(f"residual: expected x's shape {list(x.shape)}, got {list(residual.shape)}")


def serves(dtype: torch.dtype, parts: list[Tensor], kind: str) -> bool:
    """True if the kernel multiplies activations of a dtype by such a layer."""
    return (
        dtype == torch.bfloat16
        and form_of(parts[0].new_empty(1, parts[0].shape[1], dtype=dtype), parts, kind) is not None
    )


def form_of(x: Tensor, parts: list[Tensor], kind: str) -> ProductForm | None:
    """How the kernel takes the product; None: it does not."""
    if not parts or (not kind and len(parts) > 1) or not x.dim() or not x.shape[-1]:
        raise ValueError(f"x, parts: expected [..., I] and a layer, got {list(x.shape)} and {len(parts)} parts")
    if x.dtype != torch.bfloat16:
        few_rows.check_activations(x)
        return None
    if kind:
        return few_rows.form_here(kind, x, parts)
    serves = not are_plain() and parts[0].dtype is x.dtype and few_rows.serves(parts[0], x.numel() // x.shape[-1])
    return few_rows.NUMBERS[parts[0].dtype] if serves else None


def _run(form: ProductForm, x: Tensor, parts: list[Tensor], bias: Tensor | None, around: Around) -> Tensor:
    return few_rows.multiply(form, x, parts[0], parts[1] if len(parts) > 1 else None, bias, around=around)


def _plain(x: Tensor, around: Around, parts: list[Tensor], bias: Tensor | None, kind: str) -> Tensor:
    """The same in plain PyTorch."""
    if around.norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + around.eps)
        if around.offset is None:
            x = around.norm * wide.to(x.dtype)
        else:
            x = (wide * (around.norm.float() + around.offset)).to(x.dtype)
    if kind:
        out = torch.ops.spec_compile.quantised_linear(x, parts, bias, kind)
    else:
        out = F.linear(x, parts[0].to(x.dtype), bias)
    if around.is_gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out.contiguous()


# `torch.library.custom_op` would add 15 microseconds to each of the hundred products of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_TAIL = "float eps, float? offset, Tensor[] parts, Tensor? bias, str kind, bool is_gated"
_LIBRARY.define(f"around_product(Tensor x, Tensor? norm, {_TAIL}) -> Tensor")
_LIBRARY.define(f"add_around_product(Tensor x, Tensor residual, Tensor norm, {_TAIL}) -> (Tensor, Tensor)")
_LIBRARY.impl("around_product", around_product, "CPU")
_LIBRARY.impl("add_around_product", add_around_product, "CPU")
AROUND = torch.ops.spec_compile.around_product.default
ADD_AROUND = torch.ops.spec_compile.add_around_product.default


@torch.library.register_fake("spec_compile::around_product")
def _(x, norm, eps, offset, parts, bias, kind, is_gated):
    few_rows.check_devices(x, norm, *parts, bias)
    return x.new_empty(*x.shape[:-1], outputs_of(x, parts, kind, is_gated))


@torch.library.register_fake("spec_compile::add_around_product")
def _(x, residual, norm, eps, offset, parts, bias, kind, is_gated):
    few_rows.check_devices(x, residual, norm, *parts, bias)
    check_residual(x, residual)
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], outputs_of(x, parts, kind, is_gated))


def outputs_of(x: Tensor, parts: list[Tensor], kind: str, is_gated: bool) -> int:
    from ...quantised import layout_of

    outputs = layout_of(kind).outputs(parts, x.shape[-1]) if kind else parts[0].shape[0]
    return outputs // 2 if is_gated else outputs
