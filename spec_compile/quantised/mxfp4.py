"""MXFP4 weights of experts: 4 bits with a power of two for each 32 inputs, in the order in which the kernel reads them.

A code is a sign, two bits of exponent and one of mantissa (e2m1); a scale is an exponent of two plus 127 (e8m0).
Reference: OCP Microscaling Formats specification 1.0, sections 5.3 and 5.4. There are E experts of O outputs and I
inputs, and W is I / 256 rounded up.

Files have blocks [E, O, I / 32, 16] uint8 and scales [E, O, I / 32] uint8. Byte n of a block has the codes of columns
2 * n (low bits) and 2 * n + 1 (high bits).

The kernel reads words [E, O, W * 32] int32 and units [E, W * 2, O] int32. 16 words have the codes of 128 columns: word
w has the columns 32 * j + 2 * w and 32 * j + 2 * w + 1 for j = 0 .. 3. Example: word 3 has columns 6 and 7, 38
and 39, 70 and 71, 102 and 103.

Unit u has the scales of the four groups 4 * u .. 4 * u + 3, in bytes from the lowest one. A byte is the scale plus 126,
because the bits of a code, read as bits of a bfloat16, are a number that is 2 ** 126 too small.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .codes import Codes
from .fp4 import VALUES

WIDTH, GROUP = 256, 32
"""Columns of 32 words, which a tile reads at once, and columns that share a scale."""
LARGEST_SCALE = 128
"""The scale 2 = 2 ** (128 - 127). A larger one plus 126 does not fit into a byte of a unit."""
PLACES = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
"""PLACES[j][b]: the bit of a word where bit b of code j stands, for the first of its two columns. For the second column
it is 16 bits higher, modulo 32.

Bits 6, 7, 8 and 15 of a bfloat16 are the top of its mantissa, the two lowest bits of its exponent and its sign. One
rotation brings a code there: code 0 to the right by 26 (0 -> 6, 1 -> 7, 2 -> 8, 9 -> 15), code 1 by 30, code 2 by 4.
Code 3 needs none, except that its bit 14 must be shifted to 6. Example: -1.5 is code 0b1011; as code 0 it sets bits 0,
1 and 9 of the word, 0x203, which rotates to 0x80C0, the bfloat16 -1.5 * 2 ** -126."""


def pack(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The words and units of blocks and scales.

    Raises ValueError if their shapes or dtypes are others or scales are above 2; its text ends a sentence about the
    weights.
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
    """The weight [O, I] of one expert: words [O, W * 32], units [W * 2, O]. It is exact in bfloat16."""
    table, exponents = torch.tensor(VALUES, device=words.device), _scales(units, inputs).int() - 127
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return Codes(_codes(words, inputs), scales.T, table=table).weight().to(dtype)


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
    """[4, 2, 16] int32: number [j, half, code] has the bits of a word that `code` sets as code j of column `half`."""
    code = torch.arange(16, dtype=torch.int64, device=device)
    first = torch.stack([sum((code >> at & 1) << bit for at, bit in enumerate(places)) for places in PLACES])
    return torch.stack([first, first << 16 | first >> 16], dim=1).to(torch.int32)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
