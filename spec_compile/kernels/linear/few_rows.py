"""Products of few rows on a CPU, with weights as numbers or as codes (the kernel is C++, in few_rows.cpp).

It reads the weights once for all rows of a round, and adds up each row in one order for any number of rows.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import extensions
from ..cpu_level import HIGHEST, VARIABLE
from ..plain import are_plain

if TYPE_CHECKING:
    from .quantised.layout import WeightLayout

_few_rows = extensions.load_if_built("kernels.linear._few_rows", "products on a CPU are slower")
LEVELS = ("", "AVX2", "AVX-512", "AVX-512 with VNNI, BF16 and VBMI")
"""The instructions of each level; the kernel takes the last that the CPU has and `cpu_level` allows."""
BEST = 0 if _few_rows is None else min(_few_rows.levels(), HIGHEST)
"""The level that it takes; 0: there is no kernel."""
WIDE = 2
"""The first level that is faster than BLAS with weights as numbers."""
MAX_ROWS = 64
"""The most rows with weights as numbers: BLAS uses the caches better with more."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Number` of few_rows.h."""
WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""`Weights` of few_rows.h, by the dtype; then blocks of FP8, and `CodeBlocks` by their bits."""
FP8_BLOCKS, BLOCKS = 4, {4: 5, 8: 6}
ROUNDINGS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""`Rounding` of few_rows.h, by the dtype of codes."""


class ProductForm(NamedTuple):
    """How few_rows.cpp takes a product; see `Product` in few_rows.h."""

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


def serves(weight: Tensor, rows: int) -> bool:
    """True if the kernel multiplies so many rows by a weight [O, I] of numbers faster than BLAS."""
    return rows <= MAX_ROWS and weight.dtype in NUMBERS and BEST >= WIDE and weight.is_contiguous()


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] -> [..., O], by the kernel where it is the faster."""
    if not serves(weight, x.numel() // x.shape[-1]):
        return F.linear(x, weight, bias)
    return torch.ops.spec_compile.few_rows_product(x, weight, bias)


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`cpu_linear` of any number of rows by the kernel."""
    return multiply(NUMBERS[weight.dtype], x, weight, None, bias)


def lack_of_device(dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply activations of a dtype on this CPU; None if it can."""
    if BEST == 0:
        if _few_rows is None:
            return "the package was not built"
        return f"{VARIABLE} allows no AVX2" if _few_rows.levels() else "the CPU has no AVX2"
    return None if dtype in NUMBERS else f"its kernel takes no {dtype}"


def lack(layout: "WeightLayout", parts: list[Tensor], dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply activations of a dtype by the parts of a layout; None if it can."""
    reason = lack_of_device(dtype)
    if reason is not None:
        return reason
    if form_of(layout, parts[0].dtype) is None:
        group = getattr(layout, "group", None)
        return "no kernel reads its layout" + (f", of groups of {group} inputs" if group else "")
    return None if all(part.is_contiguous() for part in parts) else "its parts do not lie one row after the other"


def quantised_product(kind: str, x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor | None:
    """A quantised layer on a CPU, x [..., I] -> [..., O], of any number of rows; None if the kernel does not serve.
    kind: of its layout."""
    form = form_here(kind, x, parts)
    return None if form is None else multiply(form, x, parts[0], parts[1], bias)


def form_here(kind: str, x: Tensor, parts: list[Tensor]) -> ProductForm | None:
    """How the kernel takes a quantised layer of a kind for activations x; None: it does not."""
    if x.device.type != "cpu" or are_plain():
        return None
    form = _form_of_kind(kind, parts[0].dtype, x.dtype, BEST)
    return None if form is None or not all(part.is_contiguous() for part in parts) else form


@functools.cache
def _form_of_kind(kind: str, weights: torch.dtype, dtype: torch.dtype, best: int) -> ProductForm | None:
    """The form of a kind of layout with codes of the dtype `weights`, if this CPU takes activations of a dtype.

    The hundred products of a round ask, so all that the three decide is found once. best: `BEST`.
    """
    from .quantised import layout_of

    return None if lack_of_device(dtype) is not None else form_of(layout_of(kind), weights)


@functools.cache
def form_of(layout: "WeightLayout", dtype: torch.dtype) -> ProductForm | None:
    """The form of a layout whose first part has a dtype; None: the kernel does not read it."""
    if layout.of_cpu:
        fields = dict(table=layout.table_numbers, group=layout.group, second=layout.second, rounds=layout.rounds)
        return ProductForm(BLOCKS[layout.width], **fields)
    name, _ = layout.packing or ("", 1)
    if name == "fp8_blocks":
        return ProductForm(FP8_BLOCKS, 3)
    if name != "channels":
        return None
    rounds = layout.row_dtype(torch.empty(0, dtype=dtype))
    scaled_first = rounds is None and dtype != torch.int8
    return ProductForm(WEIGHTS[dtype], ROUNDINGS.get(rounds, 0), scaled_first, not layout.norms_after)


class Around(NamedTuple):
    """The norm before a product of bfloat16 and the gate after it; see `Around` in few_rows.h, and around.py.

    norm: [I] or None. stream: memory for x plus the residual, or None.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    offset: float | None = None
    residual: Tensor | None = None
    stream: Tensor | None = None
    is_gated: bool = False

    @property
    def constants(self) -> tuple:
        """The arguments that are the same in all calls."""
        return address(self.norm), self.eps, self.offset or 0.0, self.offset is None, self.is_gated


NOTHING = Around()


def multiply(
    form: ProductForm, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None,
    level: int | None = None, around: Around = NOTHING,
) -> Tensor:  # fmt: skip
    """The kernel, at a level of instructions (None: the best): x [..., I] -> [..., O], or a gate's [..., O / 2], of x's
    dtype."""
    shape, x = x.shape, x.contiguous()
    inputs, outputs = shape[-1], weight.shape[0]
    rows, out = x.numel() // inputs, x.new_empty(*shape[:-1], outputs // 2 if around.is_gated else outputs)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    level = BEST if level is None else level
    _few_rows.multiply(
        x.data_ptr(), out.data_ptr(), address(around.residual), address(around.stream), rows, level,
        torch.get_num_threads(), *constants(form, x.dtype, inputs, weight, scales, bias), *around.constants,
    )  # fmt: skip
    return out


def constants(
    form: ProductForm, dtype: torch.dtype, inputs: int, weight: Tensor, scales: Tensor | None, bias: Tensor | None
) -> tuple:  # fmt: skip
    """The arguments of a product that are the same in all calls; see `call_of` in few_rows.cpp. bias: of `dtype`."""
    return (
        weight.data_ptr(), address(scales), address(bias), inputs, weight.shape[0],
        weight.stride(0) * weight.element_size(), DTYPES[dtype], 0 if scales is None else DTYPES.get(scales.dtype, 0),
        *form[:4], address(form.table), *form[5:],
    )  # fmt: skip


def made_chain():
    """A chain of the kernel without links; see `chain`."""
    return _few_rows.Chain(BEST)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# `torch.library.custom_op` would add 15 microseconds to each of the hundred products of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_LIBRARY.define("few_rows_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("few_rows_product", few_rows_product, "CPU")


@torch.library.register_fake("spec_compile::few_rows_product")
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])
