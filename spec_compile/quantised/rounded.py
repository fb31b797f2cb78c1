"""Weights of 16 or 32 bits rounded to nearest and packed, for drafts: only their acceptance depends on the rounding."""

from collections.abc import Callable

import torch
from torch import Tensor

from .codes import WEIGHTS, Packed
from .compressed_tensors import Int4Group
from .fp8 import FP8
from .torchao import Float8Weight, Int8Weight

GROUPS = 128, 64, 32
"""Inputs that share a scale of 4 bits: the first number that divides a layer's inputs."""
SMALLEST = 1e-12
"""The least absolute value that gives a scale, so that zeros have one."""


def fp8(weight: Tensor) -> Packed:
    """float8_e4m3fn with a scale for each output. weight [O, I]."""
    return _packed(Float8Weight(), weight, lambda rows: _by_output(rows, torch.finfo(FP8).max, lambda x: x.to(FP8)))


def int8(weight: Tensor) -> Packed:
    """int8 with a scale for each output. weight [O, I]."""
    return _packed(Int8Weight(), weight, lambda rows: _by_output(rows, 127, lambda x: x.round().to(torch.int8)))


def int4(weight: Tensor, group: int | None = None) -> Packed | None:
    """Symmetric 4 bits with a scale of the weight's dtype for each output and `group` inputs (None: as GROUPS says);
    None if groups do not divide the inputs. weight [O, I]."""
    group = next((each for each in (GROUPS if group is None else (group,)) if weight.shape[1] % each == 0), None)
    return None if group is None else _packed(Int4Group(group), weight, lambda rows: int4_words(rows, group))


def int4_words(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight [O, I] in symmetric 4 bits: words [O, I / 8] int32, and scales [O, I / group] in the weight's dtype.

    A word holds 8 inputs, the first in the lowest 4 bits: codes 1, 2, 3, 0, 0, 0, 0, 0 give 0x321. Codes are -8 to 7,
    and the scale has the sign that makes the group's largest number -8 times it: [4, -2, 1, 0] with the scale -0.5 is
    -8, 4, -2, 0. Scales that cut the largest off have a smaller error, but a larger perplexity.
    """
    groups = weight.float().unflatten(1, (-1, group))
    scales = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)) / -8
    scales = torch.where(scales.abs() < SMALLEST, SMALLEST, scales).to(weight.dtype)
    codes = (groups / scales.float()).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8, device=codes.device))).sum(dim=2).to(torch.int32)
    return words, scales[:, :, 0]


FORMATS: dict[str, Callable[[Tensor], Packed | None]] = {"fp8": fp8, "int8": int8, "int4": int4}
"""Name -> a function of a weight [O, I], which returns None if it does not take its inputs."""


def _packed(layout, weight: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Packed:
    """The layer of a layout, a few rows at a time, because numbers in float32 take much memory."""
    rows = [rounded(some) for some in weight.detach().split(max(WEIGHTS // weight.shape[1], 1))]
    codes, scales = (torch.cat(parts) for parts in zip(*rows))
    return Packed(layout, {"codes": codes, "scales": scales}, None, weight.shape[1])


def _by_output(rows: Tensor, largest: float, to_codes: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Codes of rows, and scales [R, 1] float32 that make each row's largest absolute value `largest`."""
    scales = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST) / largest
    return to_codes(rows.float() / scales), scales
