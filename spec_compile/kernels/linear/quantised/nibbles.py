"""4 bits as the kernel for few rows reads them: what layers of GPTQ, AWQ and compressed-tensors are repacked into."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import Layout

WIDTH = 256
"""Columns whose words lie side by side."""
DTYPES = torch.bfloat16, torch.float16
TOO_LARGE = {torch.bfloat16: 128, torch.float16: 1024}
"""A number of this dtype whose lowest bits are a code is too large by this."""


@dataclass(frozen=True)
class Nibbles(Layout):
    """words [O, W * 32] int32, W = I / 256 rounded up: nibble j of word w of each 32 is the code of column 32 * j + w
    of their 256. units [W * 256 / group, O] int32: a scale in the lower half; in the upper half what is added to a code
    that is `TOO_LARGE`, so that it is the code minus its zero point. dtype: of both halves, an index of `DTYPES`."""

    group: int
    dtype: int
    bits = 4

    def serves(self, dtype: torch.dtype) -> bool:
        return dtype == DTYPES[self.dtype]

    @property
    def packing(self) -> tuple[str, int]:
        return "nibbles_fp16" if self.dtype else "nibbles_bf16", self.group

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        words, units = parts
        dtype = DTYPES[self.dtype]
        codes = words.view(torch.uint8).unflatten(1, (-1, 32, 4)).transpose(2, 3)
        codes = torch.stack([codes & 15, codes >> 4], dim=3).flatten(1)
        scales, added = units.T.contiguous()[:, :, None].view(dtype).unbind(2)
        groups = (codes.to(dtype) + TOO_LARGE[dtype]).unflatten(1, (-1, self.group))
        return ((groups + added[:, :, None]) * scales[:, :, None]).flatten(1)[:, :inputs]


LAYOUTS = (Nibbles,)


def pack(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> tuple[Nibbles, list[Tensor]] | None:
    """The layout of codes and its parts; None if the kernel does not read such groups.

    codes [O, I] uint8 of 0 to 15, zeros [G, O] or one for all, scales [G, O].
    """
    (outputs, inputs), groups = codes.shape, len(scales)
    group = inputs // groups if groups > 1 else -(-inputs // WIDTH) * WIDTH
    if scales.dtype not in DTYPES or (group % WIDTH and group not in (32, 64, 128)):
        return None
    codes = F.pad(codes, (0, -inputs % WIDTH)).view(outputs, -1, 4, 2, 32)
    words = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(2, 3).contiguous().view(torch.int32)
    added = (-TOO_LARGE[scales.dtype] - zeros + torch.zeros_like(scales, dtype=torch.int32)).to(scales.dtype)
    units = torch.stack([scales, added], dim=2).view(torch.int32)[:, :, 0]
    units = F.pad(units, (0, 0, 0, codes.shape[1] * WIDTH // group - groups))
    return Nibbles(group, DTYPES.index(scales.dtype)), [words.view(outputs, -1), units.contiguous()]
