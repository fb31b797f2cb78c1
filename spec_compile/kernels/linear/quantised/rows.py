"""Activations that are rounded to 8 bits with a scale for each row, or a constant one, as compressed-tensors does."""

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from ...all_reduce import gather_parts
from .layout import WeightLayout, exact_linear

rounds_activations: ContextVar[bool] = ContextVar("rounds_activations", default=True)
"""False where no layer rounds its activations, whatever its format and kernel."""
FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.5}
"""By what the largest absolute value of a row is divided to get its scale."""


def rounded_rows(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """x [..., I] rounded to FP8 or int8 with a scale for each row, or the given; every step is rounded to x's dtype."""
    if scales is None:
        scales = x.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    codes = x / scales.where(scales > 0, 1.0)
    if dtype == torch.int8:
        codes = codes.round().clamp(-128, 127)
    else:
        codes = codes.clamp(-448, 448).to(dtype).to(x.dtype)
    return codes * scales


@torch.library.custom_op("spec_compile::rounded_over_ranks", mutates_args=())
def rounded_over_ranks(x: Tensor, dtype: torch.dtype, group_name: str) -> Tensor:
    """`rounded_rows` of rows [..., I] of which each rank has other columns, with the scales of the whole rows.

    group_name: of a process group of torch.distributed, see `all_reduce`.
    """
    if not rounds_activations.get():
        return x.clone()
    largest = gather_parts(x.abs().amax(dim=-1, keepdim=True), group_name).amax(dim=0)  # guard: rank-rounding
    return rounded_rows(x, dtype, largest / LARGEST[dtype])


@rounded_over_ranks.register_fake
def _(x, dtype, group_name):
    return torch.empty_like(x)


class RoundsRows(WeightLayout):
    """A layout whose activations are rounded by `rounded_rows` before the product; nothing if `row_dtype` is None."""

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        dtype, scale = self.row_dtype(parts[0]), self.constant_scale(parts)
        if dtype is not None:
            x = rounded_rows(x, dtype, None if scale is None else scale.to(x.dtype))
        return self.multiplied(x, parts, bias, exact_linear)
