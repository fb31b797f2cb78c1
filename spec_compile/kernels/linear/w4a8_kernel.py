"""Products of the kernel "small_m" with weights of 4 bits and activations that are rounded to 8 bits by row.

The tensor cores multiply codes: with int8 sums of up to 128 columns are exact. Each is scaled and added in float32, in
the order of columns.

Import this module only where Triton is installed. Shapes of a tile: bytes [BLOCK_O, DEPTH], each of two weights,
activations [BLOCK_N, DEPTH], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..ptx import let_next_kernel_begin
from .load_tile import addresses, load_rows


@triton.jit
def multiply_w4a8(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`multiply_quantised` in the order of `w4a8.RoundedNibbles`, of x that `round_rows_kernel` has rounded."""
    DEPTH: tl.constexpr = GROUP if GROUP < 128 else 128
    k = tl.arange(0, DEPTH)
    w_at = addresses(weight.data.to(tl.pointer_type(tl.int8)), o, 4 * weight.stride, k)
    x_at = addresses(x.data, n, x.stride, k)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, 2 * DEPTH):
        if PDL:
            let_next_kernel_begin((end - start + 2 * DEPTH - 1) // (2 * DEPTH), late)
        pairs = tl.load(w_at + start // 2, eviction_policy="evict_first")
        for half in tl.static_range(2):
            column = start + half * DEPTH
            b = load_rows(x_at, column, k, n, rows, inputs, EVEN)
            scale = tl.load(weight.scales + column // GROUP * outputs + o).to(tl.float32) * 0.0625
            a = _codes_times_16(pairs, half, PTX)
            if b.dtype == tl.int8:
                part = tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(a.to(tl.float32).to(b.dtype), b.T, input_precision="ieee")
            acc += part * scale[:, None]
    unit = tl.load(x.scales + n, mask=n < rows, other=0.0)
    return acc * unit[None, :]


@triton.jit
def _codes_times_16(pairs, HALF: tl.constexpr, PTX: tl.constexpr):
    """The lower (0) or upper (1) halves of bytes as int8 that are 16 times as large. With PTX, four at a time."""
    if not PTX:
        out = pairs & -16 if HALF else pairs << 4
    else:
        out = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;" if HALF else "{.reg .b32 a; shl.b32 a, $1, 4; and.b32 $0, a, 0xF0F0F0F0;}",
            "=r,r", [pairs], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return out
