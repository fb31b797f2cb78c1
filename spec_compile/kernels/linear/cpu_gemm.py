"""Products of few rows on a CPU, with weights as numbers or as codes (the kernel is C++, in cpu_gemm.cpp).

It reads the weights once for all rows of a round, and adds up each row in one order for any number of rows.
"""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import extensions
from ..cpu import AMX, HIGHEST, PRESENT, VARIABLE
from ..launching import LIBRARY, are_plain

if TYPE_CHECKING:
    from ...quantised.codes import WeightLayout

_cpu_gemm = extensions.load_if_built("kernels.native._cpu_gemm", "products on a CPU are slower")
LEVELS = ("", "AVX2", "AVX-512", "AVX-512 with VNNI, BF16 and VBMI")
"""The instructions of each level; the kernel takes the last that the CPU has and `kernels.cpu` allows."""
BEST = 0 if _cpu_gemm is None else min(_cpu_gemm.levels(), HIGHEST)
"""The level that it takes; 0: there is no kernel."""
new_chain = None if _cpu_gemm is None else _cpu_gemm.Chain
"""Makes an empty chain of products for a level; see `cpu_products`."""
MOST_ROWS = {torch.float32: (0, 0, 64, 64), torch.bfloat16: (0, math.inf, 64, 64)}
"""By dtype and level, the most rows with weights as numbers: BLAS uses the caches better with more. With AVX2 it has no
instructions for bfloat16: on two cores it takes 2 times as long with 4 rows, and 4.5 times with 64 and 256."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Number` of cpu_gemm.h."""
WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""`Weights` of cpu_gemm.h, by the dtype; then blocks of FP8, and `CodeBlocks` by their bits."""
FP8_BLOCKS, BLOCKS = 4, {4: 5, 8: 6}
ROUNDINGS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""`Rounding` of cpu_gemm.h, by the dtype of codes."""


class ProductForm(NamedTuple):
    """How cpu_gemm.cpp takes a product; see `Product` in cpu_gemm.h."""

    weights: int
    rounding: int = 0
    scaled_first: bool = False
    constant: bool = False
    table: Tensor | None = None
    group: int = 1
    second: int = 0
    rounds: int = 0


NUMBERS = {torch.float32: ProductForm(0), torch.bfloat16: ProductForm(1)}
"""The forms of weights that are no codes."""


def multiplies(dtype: torch.dtype, rows: float) -> bool:
    """True if the kernel multiplies `rows` rows by weights of numbers faster than BLAS."""
    return dtype in NUMBERS and rows <= MOST_ROWS[dtype][BEST]


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] -> [..., O], by the kernel where it is the faster."""
    if not (multiplies(weight.dtype, x.numel() // x.shape[-1]) and weight.is_contiguous()):
        return F.linear(x, weight, bias)
    return torch.ops.spec_compile.cpu_product(x, weight, bias)


def cpu_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`cpu_linear` of any number of rows by the kernel: x and weight float32 or bfloat16, weight contiguous."""
    if x is None or weight is None:  # the dispatcher takes it for a tensor
        raise TypeError("x, weight: expected tensors, got None")
    form = NUMBERS.get(weight.dtype)
    if form is None:
        raise TypeError(f"weight: expected float32 or bfloat16, got {weight.dtype}")
    if not BEST or (x.dtype == torch.bfloat16 != weight.dtype):  # the kernel multiplies no wider weights
        return F.linear(x, weight.to(x.dtype), bias)
    return multiply(form, x, weight, None, bias)


def why_not_on(dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply activations of a dtype on this CPU; None if it can."""
    if BEST == 0:
        if _cpu_gemm is None:
            return "the package was not built"
        return f"{VARIABLE} allows no AVX2" if _cpu_gemm.levels() else "the CPU has no AVX2"
    return None if dtype in NUMBERS else f"its kernel takes no {dtype}"


def why_not(layout: "WeightLayout", parts: list[Tensor], dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply activations of a dtype by the parts of a layout; None if it can."""
    reason = why_not_on(dtype)
    if reason is not None:
        return reason
    if form_of(layout, parts[0].dtype) is None:
        group = getattr(layout, "group", None)
        return "no kernel reads its layout" + (f", of groups of {group} inputs" if group else "")
    return None if all(part.is_contiguous() for part in parts) else "its parts do not lie one row after the other"


def form_here(kind: str, x: Tensor, parts: list[Tensor]) -> ProductForm | None:
    """How the kernel takes a quantised layer of a kind for activations x; None: it does not."""
    if x.device.type != "cpu" or are_plain() or not parts:
        return None
    form = _form_of_kind(kind, parts[0].dtype, x.dtype, BEST)
    if form is None or not all(part.is_cpu and part.is_contiguous() for part in parts):
        return None
    if len(parts) != 2:
        raise ValueError(f"parts: expected weights and scales, got {len(parts)} tensors")
    return form


@functools.cache
def _form_of_kind(kind: str, weights: torch.dtype, dtype: torch.dtype, best: int) -> ProductForm | None:
    """The form of a kind of layout with codes of the dtype `weights`, if this CPU takes activations of a dtype.

    The hundred products of a round ask, so all that the three decide is found once. best: `BEST`.
    """
    from ...quantised import layout_of

    return None if why_not_on(dtype) is not None else form_of(layout_of(kind), weights)


@functools.cache
def form_of(layout: "WeightLayout", dtype: torch.dtype) -> ProductForm | None:
    """The form of a layout whose first part has a dtype; None: the kernel does not read it."""
    if layout.of_cpu:
        if dtype != torch.int32:
            return None
        fields = dict(table=layout.table_numbers, group=layout.group, second=layout.second, rounds=layout.rounds)
        return ProductForm(BLOCKS[layout.width], **fields)
    name, _ = layout.packing or ("", 1)
    if dtype not in ROUNDINGS or name not in ("channels", "fp8_blocks"):
        return None
    if name == "fp8_blocks":
        return ProductForm(FP8_BLOCKS, 3) if dtype == torch.float8_e4m3fn else None
    rounds = layout.row_dtype(torch.empty(0, dtype=dtype))
    scaled_first = rounds is None and dtype != torch.int8  # guard: scales-before-products
    return ProductForm(WEIGHTS[dtype], ROUNDINGS.get(rounds, 0), scaled_first, not layout.norms_after)


def multiply(
    form: ProductForm, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, level: int | None = None
) -> Tensor:  # fmt: skip
    """The kernel, at a level of instructions (None: the best): x [..., I] -> [..., O] of x's dtype. See `constants` for
    what is raised."""
    shape, x = x.shape, x.contiguous()
    if not shape or not shape[-1]:
        raise ValueError(f"x: expected rows of at least one input, got the shape {list(shape)}")
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()
    inputs, level = shape[-1], BEST if level is None else level
    product = constants(form, x.dtype, inputs, weight, scales, bias)
    rows, out = x.numel() // inputs, x.new_empty(*shape[:-1], product[4])
    _cpu_gemm.multiply(x.data_ptr(), out.data_ptr(), rows, level, torch.get_num_threads(), *product)
    return out


def constants(
    form: ProductForm, dtype: torch.dtype, inputs: int, weight: Tensor, scales: Tensor | None, bias: Tensor | None
) -> tuple:  # fmt: skip
    """The arguments of a product that are the same in all calls; `product_of` in cpu_gemm.cpp compares their sizes.

    dtype: the activations' and the bias's; TypeError if it, or the scales', is none that the kernel takes. ValueError
    if a tensor is not laid out as the kernel takes it.
    """
    if dtype not in NUMBERS:
        raise TypeError(f"x: expected float32 or bfloat16, got {dtype}")
    sizes = weight.shape
    if len(sizes) != 2 or not weight.is_contiguous() or not weight.is_cpu:
        raise ValueError(f"weight: expected contiguous [O, I] on a CPU, got {told(weight)}")
    scale_type, scale_sizes, bias_count = 0, (0, 0), -1
    if scales is not None:
        scale_type, scale_sizes = DTYPES.get(scales.dtype), scales.shape
        if scale_type is None:
            raise TypeError(f"scales: expected float32, bfloat16 or float16, got {scales.dtype}")
        if len(scale_sizes) != 2 or not scales.is_contiguous() or not scales.is_cpu:
            raise ValueError(f"scales: expected contiguous rows on a CPU, got {told(scales)}")
    if bias is not None:
        bias_count = bias.numel()
        if bias.dim() != 1 or not bias.is_cpu:
            raise ValueError(f"bias: expected [O] on a CPU, got {told(bias)}")
    return (
        weight.data_ptr(), address(scales), address(bias), inputs, *sizes, *scale_sizes, bias_count,
        DTYPES[dtype], scale_type, *form[:4], address(form.table), *form[5:],
    )  # fmt: skip


def told(x: Tensor) -> str:
    """A tensor's layout, for messages."""
    return f"{x.dtype} {list(x.shape)} with the strides {list(x.stride())} on {x.device}"


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


LIBRARY.define("cpu_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("cpu_product", cpu_product, "CPU")


@torch.library.register_fake("spec_compile::cpu_product")
def _(x, weight, bias):
    check_devices(x, weight, bias)
    if x.dtype not in NUMBERS or weight.dtype not in NUMBERS:
        raise TypeError(f"x, weight: expected float32 or bfloat16, got {x.dtype} and {weight.dtype}")
    if not x.dim() or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.is_contiguous():
        raise ValueError(f"weight: expected contiguous [O, I] for x [..., I], got {told(weight)} for {told(x)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {told(bias)}")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def check_activations(x: Tensor) -> None:
    """TypeError unless x has floating-point numbers."""
    if not x.is_floating_point():
        raise TypeError(f"x: expected floating-point numbers, got {x.dtype}")


def check_devices(x: Tensor, *others: Tensor | None) -> None:
    """ValueError unless all tensors are on x's device; a meta tensor has no numbers for the kernel."""
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"x: expected all tensors on its device, {x.device}; one is on {other.device}")


# Form "transposed": products of few rows of bfloat16 on a CPU with AMX.


SUPPORTED = PRESENT[AMX] and HIGHEST >= AMX


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` (x [..., I], weight [O, I], bias [O] -> [..., O]) of 1 to 64 rows.

    oneDNN reads the weights up to twice as fast for ``weight @ x.T`` as for ``x @ weight.T``, which it packs first.
    One row is multiplied as two, because one takes the slower way again.
    """
    rows = x.numel() // x.shape[-1]
    columns = x.reshape(rows, x.shape[-1])
    columns = torch.cat([columns, columns]) if rows == 1 else columns
    out = (weight @ columns.t())[:, :rows].t().reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias
