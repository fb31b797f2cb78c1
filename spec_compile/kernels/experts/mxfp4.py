"""MXFP4 weights of experts: 4 bits with a power of two for each 32 inputs, in the order in which the kernel reads them.

A code is a sign, two bits of exponent and one of mantissa (e2m1); a scale is an exponent of two plus 127 (e8m0).
Reference: OCP Microscaling Formats specification 1.0, sections 5.3 and 5.4. There are E experts of O outputs and I
inputs, and W is I / 256 rounded up.

Files have blocks [E, O, I / 32, 16] uint8, in each byte the first of two codes in the low bits, and scales
[E, O, I / 32] uint8. The kernel reads words [E, O, W * 32] int32 and units [E, W * 2, O] int32. Word w of each 16 has
the codes of the columns 32 * j + 2 * w and 32 * j + 2 * w + 1 of their 128, j = 0 .. 3. Byte i of unit u belongs to the
columns from 32 * (4 * u + i) on: it is the scale plus 126, because the bits of a code, taken for those of a bfloat16,
are a number that is 2 ** 126 too small.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, GROUP = 256, 32
"""Columns whose words lie side by side, and columns that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the codes."""
LARGEST_SCALE = 128
"""The scale 2, above which a byte of a unit has no room."""
PLACES = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
"""Where the four bits of each of four codes stand in a word, of the first of two columns; those of the second stand 16
bits further on, behind the last bit at the first. One turn brings those of each of the first three to where a bfloat16
has its sign, the end of its exponent and the begin of its mantissa; of the last all but one stand there."""


def pack(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The words and units of blocks and scales.

    Raises ValueError, whose text ends a sentence about the weights, if they are of another form or have scales above 2.
    """
    experts, outputs, groups, size = blocks.shape
    is_uint8 = {blocks.dtype, scales.dtype} == {torch.uint8}
    if not is_uint8 or size != GROUP // 2 or scales.shape != blocks.shape[:3]:
        shapes = f"blocks {_text(blocks)} and scales {_text(scales)}"
        raise ValueError(f"has {shapes}, expected uint8 [E, O, I / 32, 16] and [E, O, I / 32]")
    if int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"has scales above 2 (bytes above {LARGEST_SCALE}, of which 255 is NaN)")
    chunks = -(-groups * GROUP // WIDTH)
    words = blocks.new_empty(experts, outputs, chunks * 32, dtype=torch.int32)
    table = _table(blocks.device)
    for expert, each in enumerate(blocks):  # one at a time, because the indices take 8 times the memory
        codes = torch.stack([each & 15, each >> 4], dim=3).view(outputs, -1)
        codes = F.pad(codes, (0, chunks * WIDTH - codes.shape[1])).view(outputs, -1, 4, 16, 2)
        placed = sum(table[j, half][codes[:, :, j, :, half].int()] for j in range(4) for half in range(2))
        words[expert] = placed.view(outputs, -1)
    exponents = F.pad(scales + 126, (0, chunks * 8 - groups)).view(torch.int32)
    return words, exponents.transpose(1, 2).contiguous()


def unpack(words: Tensor, units: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """The blocks and scales of words and units."""
    codes = torch.stack([_codes(each, inputs) for each in words])
    pairs = codes.view(*codes.shape[:2], -1, GROUP // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, torch.stack([_scales(each, inputs) for each in units])


def weight(words: Tensor, units: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] of one expert: words [O, W * 32], units [W * 2, O]. bfloat16 has all of its numbers."""
    values = torch.tensor(VALUES, device=words.device)[_codes(words, inputs).int()].unflatten(1, (-1, GROUP))
    return torch.ldexp(values, (_scales(units, inputs).int() - 127)[:, :, None]).flatten(1).to(dtype)


def _codes(words: Tensor, inputs: int) -> Tensor:
    """The codes [O, I] uint8 of the words [O, W * 32] of an expert."""
    places = [[(at + 16 * half) % 32 for at in places] for places in PLACES for half in range(2)]
    columns = [sum((words >> bit & 1) << at for at, bit in enumerate(bits)).to(torch.uint8) for bits in places]
    codes = torch.stack(columns, dim=2).unflatten(1, (-1, 16)).unflatten(3, (4, 2))  # [O, W * 2, 16, 4, 2]
    return codes.transpose(2, 3).flatten(1)[:, :inputs]


def _scales(units: Tensor, inputs: int) -> Tensor:
    """The scales [O, I / 32] uint8 of the units [W * 2, O] of an expert."""
    return units.T.contiguous().view(torch.uint8)[:, : inputs // GROUP] - 126


def _table(device: torch.device) -> Tensor:
    """[4, 2, 16] int32: the bits in a word of code c of the columns 32 * j + 2 * w, and of those behind them."""
    code = torch.arange(16, dtype=torch.int64, device=device)
    first = torch.stack([sum((code >> at & 1) << bit for at, bit in enumerate(places)) for places in PLACES])
    return torch.stack([first, first << 16 | first >> 16], dim=1).to(torch.int32)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
