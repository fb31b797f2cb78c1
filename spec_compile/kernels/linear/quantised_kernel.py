"""Products of the kernel "small_m" with quantised weights: how a tile is loaded and what it means, a helper a format.

A tile is decoded in registers, between shared memory and the tensor cores, and rounded as the format's library rounds.
The order of summation is one chain along the columns, as of 16 bits, or a chain for each stretch of FP8's blocks, or of
256 columns of 4 bits, which are added up in their order.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..ptx import finished, let_next_kernel_begin
from ..rounding import LARGEST_FP8, nearest_fp8, over_scale
from .load_tile import addresses, load_tile
from .nibbles_kernel import multiply_nibbles
from .w4a8_kernel import multiply_w4a8

UNIT_ROWS: tl.constexpr = tl.constexpr(128)
"""The scales of x's rows have memory for a multiple of this, which is at least a tile's rows."""


@triton.jit
def multiply_quantised(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The columns begin .. end of x times the weights -> sums [BLOCK_O, BLOCK_N].

    weight, x: each a `Matrix`. FORMAT, GROUP: of `WeightLayout.packing`. TABLE: `look_up` of its numbers, or None.
    """
    if FORMAT == "fp8_blocks":
        acc = _multiply_fp8_blocks(
            weight, x, o, n, begin, end, rows, inputs, late, GROUP, BLOCK_N, BLOCK_O, EVEN, UNROLL, PDL
        )
    elif FORMAT == "channels":
        acc = _multiply_channels(
            weight, x, o, n, begin, end, rows, inputs, late, BLOCK_N, BLOCK_O, BLOCK_K, EVEN, PDL, PTX
        )
    elif FORMAT == "nibbles_rounded":
        acc = multiply_w4a8(
            weight, x, o, n, begin, end, rows, outputs, inputs, late, GROUP, BLOCK_N, BLOCK_O, EVEN, PDL, PTX
        )
    else:
        acc = multiply_nibbles(
            weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, BLOCK_N, BLOCK_O, EVEN, PDL,
            PTX,
        )  # fmt: skip
    return acc


@triton.jit
def _multiply_fp8_blocks(
    weight, x, o, n, begin, end, rows, inputs, late, SQUARE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FP8 with a scale for each SQUARE rows and columns of the weights [O / SQUARE, I / SQUARE], and x as
    `round_blocks_kernel` has rounded it. weight_ptr: float8_e4m3fn, or where the tensor cores have no such type its
    bytes."""
    k = tl.arange(0, SQUARE)
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    scale_at = weight.scales + o // SQUARE * tl.cdiv(inputs, SQUARE)
    stride_u = tl.cdiv(rows, UNIT_ROWS) * UNIT_ROWS
    unit_at = x.scales + n  # any number after the last row
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    block = begin // SQUARE
    scale, unit = tl.load(scale_at + block), tl.load(unit_at + block * stride_u)
    for start in tl.range(begin, end, SQUARE, loop_unroll_factor=UNROLL):
        if PDL:
            let_next_kernel_begin((end - start + SQUARE - 1) // SQUARE, late)
        a, b = load_tile(w_at, x_at, start, k, n, rows, inputs, EVEN)
        # The scales of the next tile are on their way while this one is multiplied.
        block = tl.minimum(start + SQUARE, end - 1) // SQUARE
        following, following_unit = tl.load(scale_at + block), tl.load(unit_at + block * stride_u)
        if weight.data.dtype.element_ty == tl.uint8:
            part = tl.dot(float_of_fp8(a, b.dtype), b.T, input_precision="ieee")
        else:
            part = tl.dot(a, b.T)
        acc = tl.fma(part, scale[:, None] * unit[None, :], acc)  # in every tile, whatever compilers make of a * b + c
        scale, unit = following, following_unit
    return acc


@triton.jit
def _fp8_over_scale(x):
    """`nearest_fp8` of `over_scale` of x [R, C], bfloat16 or float16, and the scales [R, 1], in half of the
    instructions, on GPUs that have FP8.

    A product with an inverse that is off by no more than 4 units in the last place, corrected once, has the codes of
    the quotient: all pairs of a number and a largest one were compared. Where the largest number of a block is tiny,
    all are lifted, because what the correction adds would be subnormal.
    """
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    unit = tl.div_rn(largest, tl.full([x.shape[0]], LARGEST_FP8, tl.float32))
    unit = tl.where(unit > 0, unit, 1.0)
    lift = tl.where(largest < 1e-20, 18446744073709551616.0, 1.0)  # 2 ** 64
    divisor, wide = (unit * lift)[:, None], wide * lift[:, None]
    inverse = 1.0 / divisor + tl.zeros_like(wide)
    near = wide * inverse
    rest = tl.fma(near, tl.zeros_like(wide) - divisor, wide)
    return tl.fma(rest, inverse, near).to(tl.float8e4nv), unit[:, None]


@triton.jit
def round_blocks_kernel(
    x_ptr, codes_ptr, unit_ptr, inputs, stride_x, SIZE: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid (rows, BLOCKS blocks of SIZE columns each): x [rows, inputs] as codes, and scales of their blocks
    [blocks, rows rounded up], see `fp8_block.rounded_blocks`. It is launched as RMSNorm is: see `norm`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + row * stride_x + column, mask=column < inputs, other=0.0)
    if codes_ptr.dtype.element_ty == tl.float8e4nv:
        codes, unit = _fp8_over_scale(x)
    else:
        x, unit = over_scale(x)
        codes = nearest_fp8(x).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * inputs + column, codes, mask=column < inputs)
    stride_u = tl.cdiv(tl.num_programs(0), UNIT_ROWS) * UNIT_ROWS
    tl.store(unit_ptr + block[:, None] * stride_u + row, unit, mask=block[:, None] * SIZE < inputs)


@triton.jit
def float_of_fp8(codes, dtype: tl.constexpr):
    """Bytes of float8_e4m3fn, without NaN, as numbers of a dtype that has them all."""
    bits = codes.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2 ** 120: the exponents' difference


@triton.jit
def _multiply_channels(
    weight, x, o, n, begin, end, rows, inputs, late,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """8 bits with a scale for each output: int8, or FP8 as in `_multiply_fp8_blocks`. unit_ptr: of x that `round_rows`
    has rounded to the same type, the scale of each row; else None, and only weights are quantised."""
    k = tl.arange(0, BLOCK_K)
    INTEGERS: tl.constexpr = weight.data.dtype.element_ty == tl.int8
    BYTES: tl.constexpr = weight.data.dtype.element_ty == tl.uint8
    ROUNDED: tl.constexpr = x.scales is not None
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    scale = tl.load(weight.scales + o).to(tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.int32 if INTEGERS and ROUNDED else tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if PDL:
            let_next_kernel_begin((end - start + BLOCK_K - 1) // BLOCK_K, late)
        a, b = load_tile(w_at, x_at, start, k, n, rows, inputs, EVEN)
        if ROUNDED and INTEGERS:
            acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
        elif ROUNDED and not BYTES:
            acc += tl.dot(a, b.T)  # a sum apart, because Hopper's tensor cores keep few bits of a sum of FP8
        elif ROUNDED:
            acc = tl.dot(float_of_fp8(a, b.dtype), b.T, acc, input_precision="ieee")
        elif INTEGERS:
            acc = tl.dot(a.to(b.dtype), b.T, acc, input_precision="ieee")
        else:  # weights are rounded to x's dtype
            wide = float_of_fp8(a, tl.float32) if BYTES else a.to(tl.float32)
            acc = tl.dot((wide * scale[:, None]).to(b.dtype), b.T, acc, input_precision="ieee")
        if PTX and not ROUNDED:
            acc = finished(acc)
    if ROUNDED:
        unit = tl.load(x.scales + n, mask=n < rows, other=0.0)
        acc = acc.to(tl.float32) * (scale[:, None] * unit[None, :])
    elif INTEGERS:
        acc *= scale.to(x.data.dtype.element_ty).to(tl.float32)[:, None]
    return acc


@triton.jit
def round_rows_kernel(
    x_ptr, out_ptr, unit_ptr, static_ptr, inputs, stride_x, largest, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid (rows,): a row of x over its largest absolute value and times `largest`, or over the static scale, as codes,
    and the scale.

    Every step is rounded to x's dtype, see `compressed_tensors.rounded_rows`. It is launched as RMSNorm is: see `norm`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + column, mask=column < inputs, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if static_ptr is None:
        unit = tl.div_rn(tl.max(tl.abs(x), 0), largest).to(dtype).to(tl.float32)
    else:
        unit = tl.load(static_ptr).to(dtype).to(tl.float32)
    divisor = tl.where(unit > 0, unit, 1.0)
    codes = tl.div_rn(x, divisor + tl.zeros_like(x)).to(dtype).to(tl.float32)
    if out_ptr.dtype.element_ty == tl.int8:
        codes = tl.clamp((codes + 12582912.0) - 12582912.0, -128.0, 127.0)  # 1.5 * 2 ** 23 makes whole numbers
    else:
        codes = nearest_fp8(codes)
    tl.store(out_ptr + row * inputs + column, codes.to(out_ptr.dtype.element_ty), mask=column < inputs)
    tl.store(unit_ptr + row, unit)
