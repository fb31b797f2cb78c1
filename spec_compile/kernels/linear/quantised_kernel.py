"""Skinny GEMMs with quantised weights: how a tile is loaded and what it means, a helper a format.

A tile is decoded in registers, between shared memory and the tensor cores, and rounded as the format's library rounds.
The order of summation is one chain along the columns, as of 16 bits, or a chain for each stretch of FP8's blocks, or of
256 columns of 4 bits, which are added up in their order.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...quantised.fp8 import FP8
from .. import card
from ..primitives import (
    LARGEST_FP8,
    addresses,
    finished,
    let_next_kernel_begin,
    load_rows,
    load_tile,
    nearest_fp8,
    over_scale,
)

UNIT_ROWS: tl.constexpr = tl.constexpr(128)
"""The scales of x's rows have memory for a multiple of this, which is at least a tile's rows."""


@triton.jit
def multiply_quantised(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The columns begin .. end of x times the weights -> sums [BLOCK_O, BLOCK_N].

    weight, x: each a `Matrix`. FORMAT, GROUP: of `WeightLayout.packing`. TABLE: `look_up` of its numbers, or None.
    """
    if FORMAT == "fp8_blocks":
        acc = multiply_fp8_blocks(weight, x, o, n, n < rows, begin, end, rows, inputs, late, GROUP, EVEN, UNROLL, PDL)
    elif FORMAT == "channels":
        acc = _multiply_channels(weight, x, o, n, begin, end, rows, inputs, late, BLOCK_K, EVEN, PDL, PTX)
    elif FORMAT == "nibbles_rounded":
        acc = multiply_w4a8(weight, x, o, n, begin, end, rows, outputs, inputs, late, GROUP, EVEN, PDL, PTX)
    else:
        acc = multiply_nibbles(
            weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, EVEN, PDL, PTX
        )
    return acc


@triton.jit
def multiply_fp8_blocks(
    weight, x, o, n, valid, begin, end, rows, inputs, late, SQUARE: tl.constexpr, EVEN: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FP8 with a scale for each SQUARE rows and columns of the weights [O / SQUARE, I / SQUARE], and x of `rows` rows,
    as `round_blocks_kernel` has rounded it; one chain a block, scaled, then added up.

    weight.data: float8_e4m3fn, or its bytes where tensor cores lack FP8. n [BLOCK_N]: rows of x; valid [BLOCK_N]: True
    for those that exist."""
    k = tl.arange(0, SQUARE)
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    scale_at = weight.scales + o // SQUARE * tl.cdiv(inputs, SQUARE)
    stride_u = tl.cdiv(rows, UNIT_ROWS) * UNIT_ROWS
    unit_at = x.scales + n  # any number after the last row
    acc = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
    block = begin // SQUARE
    scale, unit = tl.load(scale_at + block), tl.load(unit_at + block * stride_u)
    for start in tl.range(begin, end, SQUARE, loop_unroll_factor=UNROLL):
        if PDL:
            let_next_kernel_begin((end - start + SQUARE - 1) // SQUARE, late)
        a, b = load_tile(w_at, x_at, start, k, valid, inputs, EVEN)
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
    [blocks, rows rounded up], see `quantised.fp8.rounded_blocks`. It is launched as RMSNorm is: see `norms`."""
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
    weight, x, o, n, begin, end, rows, inputs, late, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """8 bits with a scale for each output: int8, or FP8 as in `multiply_fp8_blocks`. x.scales: a scale for each
    row of x that `round_rows` has rounded to the same type; None: only the weights are quantised."""
    k = tl.arange(0, BLOCK_K)
    INTEGERS: tl.constexpr = weight.data.dtype.element_ty == tl.int8
    BYTES: tl.constexpr = weight.data.dtype.element_ty == tl.uint8
    ROUNDED: tl.constexpr = x.scales is not None
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    scale = tl.load(weight.scales + o).to(tl.float32)
    acc = tl.zeros([o.shape[0], n.shape[0]], tl.int32 if INTEGERS and ROUNDED else tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if PDL:
            let_next_kernel_begin((end - start + BLOCK_K - 1) // BLOCK_K, late)
        a, b = load_tile(w_at, x_at, start, k, n < rows, inputs, EVEN)
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

    Every step is rounded to x's dtype, see `quantised.rows.rounded_rows`. It is launched as RMSNorm is: see `norms`.
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


# Weights of 4 bits: how words are decoded, between shared memory and the tensor cores.
#
# Instructions, not memory, would bound these products, so they are counted. A code and its neighbour, 16 bits apart,
# are turned and masked together, and become two numbers by one instruction (centred codes) or two. They stay in
# registers, where the tensor cores read them: every tensor that they are made of is loaded in the loop, or Triton would
# pass them through shared memory.
#
# Shapes of a tile: words [BLOCK_O, DEPTH] of 16 bits, activations [BLOCK_N, DEPTH], sums [BLOCK_O, BLOCK_N].


@triton.jit
def multiply_nibbles(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`multiply_quantised` of 4 bits, in the order of `pack_gpu.Words`. The weight's scales are the units of
    `pack_gpu.Nibbles`, or with FORMAT "nibbles_table" of `pack_gpu.TableNibbles`."""
    CENTRED: tl.constexpr = FORMAT == "nibbles_bf16_centred" or FORMAT == "nibbles_fp16_centred"
    PAIRS: tl.constexpr = CENTRED or TABLE is not None
    SPAN: tl.constexpr = 2 * GROUP if PAIRS and GROUP < 256 else GROUP  # columns of a unit
    DEPTH: tl.constexpr = GROUP if GROUP < 64 else 64  # half-words that lie side by side, and columns of a step
    unit_ptr = weight.scales
    if TABLE is not None:
        unit_ptr = unit_ptr.to(tl.pointer_type(tl.int64)) + outputs
    half = tl.arange(0, DEPTH)
    if PTX:
        w_at = addresses(weight.data.to(tl.pointer_type(tl.int16)), o, 2 * weight.stride, half)
    else:
        w_at = addresses(weight.data, o, weight.stride, half // 2)
    x_at = addresses(x.data, n, x.stride, half)
    acc = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
    for start in tl.range(begin, end, 256):
        if PDL:
            let_next_kernel_begin((end - start + 255) // 256, late)
        for step in tl.static_range(256 // DEPTH):
            column = start + step * DEPTH
            if step % 4 == 0:
                words = tl.load(w_at + column // (4 if PTX else 8), eviction_policy="evict_first")
            if step * DEPTH % SPAN == 0:
                unit = tl.load(unit_ptr + column // SPAN * outputs + o)[:, None]
            b = load_rows(x_at, column, half, n < rows, inputs, EVEN)
            if TABLE is not None:
                scale = (unit >> (32 if step * DEPTH % SPAN >= GROUP else 0)).to(tl.int32).to(tl.float32, bitcast=True)
                a = _numbers_in_table(words, weight.scales, step % 4, TABLE, PTX) * scale
            else:
                a = _numbers(
                    words, unit + tl.zeros([o.shape[0], DEPTH], tl.int32), step % 4, step * DEPTH % SPAN >= GROUP,
                    FORMAT, PTX,
                )  # fmt: skip
            # A separate sum for 256 columns: the tensor cores then work while the next numbers are decoded.
            if step == 0:
                part = tl.dot(a.to(b.dtype), b.T, input_precision="ieee")
            else:
                part = tl.dot(a.to(b.dtype), b.T, part, input_precision="ieee")
        acc += part
    return acc


@triton.jit
def half_words(words, TURN: tl.constexpr):
    """Half-words [O, D] from the word [O, D] of each, int32, turned by TURN bits to the right, or for those in the
    upper half of theirs by 16 more. The bits above theirs belong to the other half."""
    wide = words.to(tl.uint32, bitcast=True).to(tl.uint64)
    at = (TURN + 16 * (tl.arange(0, words.shape[1]) % 2)) % 32
    return ((wide | (wide << 32)) >> at.to(tl.uint64)[None, :]).to(tl.int32)


@triton.jit
def _codes(words, J: tl.constexpr, TURN: tl.constexpr):
    """Nibble J of each half-word [BLOCK_O, DEPTH]. words: of each the word that has it, turned by TURN bits."""
    return half_words(words, TURN + 4 * J) & 15


@triton.jit
def _numbers(words, unit, J: tl.constexpr, SECOND: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """Nibble J of each half-word [BLOCK_O, DEPTH]: (nibble - zero point) * scale, rounded once, of bfloat16 or float16.
    SECOND: its scale is in the unit's upper half. With PTX, two at a time."""
    if not PTX:
        out = _plain_numbers(words, unit, J, SECOND, FORMAT)
    elif FORMAT == "nibbles_bf16_centred":
        # The nibble is the begin of the mantissa of a number with the exponent 0. That times scale, less 8 * scale.
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z, nought; shf.r.wrap.b32 a, $1, $1, $6; and.b32 a, a, 0x00780078;"
            "prmt.b32 s, $2, $3, $4; mov.b32 nought, 0x80008000; mov.b32 z, 0x80408040;"
            "fma.rn.bf16x2 z, s, z, nought; fma.rn.bf16x2 $0, a, s, z;}",
            "=r,r,r,r,r,r,r,r", [words, unit, 0x3232 if SECOND else 0x1010, 4 * J], dtype=tl.bfloat16, is_pure=True,
            pack=2,
        )  # fmt: skip
    elif FORMAT == "nibbles_fp16_centred":
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z; shf.r.wrap.b32 a, $1, $1, $6; and.b32 a, a, 0x03C003C0; prmt.b32 s, $2, $3, $4;"
            "mov.b32 z, 0x82008200; mul.rn.f16x2 z, s, z; fma.rn.f16x2 $0, a, s, z;}",
            "=r,r,r,r,r,r,r,r", [words, unit, 0x3232 if SECOND else 0x1010, 4 * J], dtype=tl.float16, is_pure=True,
            pack=2,
        )  # fmt: skip
    elif FORMAT == "nibbles_bf16":
        # The nibbles become the lowest bits of numbers that are `pack_gpu.TOO_LARGE`.
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z, one, nought; shr.b32 a, $1, $4;"
            "lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; prmt.b32 s, $2, $3, 0x5410; prmt.b32 z, $2, $3, 0x7632;"
            "mov.b32 one, 0x3F803F80; mov.b32 nought, 0x80008000;"
            "fma.rn.bf16x2 a, a, one, z; fma.rn.bf16x2 $0, a, s, nought;}",
            "=r,r,r,r,r,r", [words, unit, 4 * J], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z; shr.b32 a, $1, $4;"
            "lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA; prmt.b32 s, $2, $3, 0x5410; prmt.b32 z, $2, $3, 0x7632;"
            "add.rn.f16x2 a, a, z; mul.rn.f16x2 $0, a, s;}",
            "=r,r,r,r,r,r", [words, unit, 4 * J], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return out


@triton.jit
def _plain_numbers(words, unit, J: tl.constexpr, SECOND: tl.constexpr, FORMAT: tl.constexpr):
    """`_numbers` without instructions that Triton has no words for, of bfloat16 in float32."""
    BF16: tl.constexpr = FORMAT == "nibbles_bf16_centred" or FORMAT == "nibbles_bf16"
    CENTRED: tl.constexpr = FORMAT == "nibbles_bf16_centred" or FORMAT == "nibbles_fp16_centred"
    code = _codes(words, J, (3 if BF16 else 6) if CENTRED else 0)
    lower, upper = unit << 16, unit & -0x10000  # the halves' bits, where float32's begin with bfloat16's
    if not BF16:
        lower = unit.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        upper = (unit >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    lower, upper = lower.to(tl.float32, bitcast=True), upper.to(tl.float32, bitcast=True)
    if CENTRED:
        scale = (upper if SECOND else lower) * (7.346839692639297e-40 if BF16 else 3.814697265625e-06)  # 2 ** -130, -18
        out = (code - 8) * scale
    else:
        out = (code + (128 if BF16 else 1024) + upper) * lower
    if BF16:
        bits = out.to(tl.int32, bitcast=True)  # Triton's interpreter would cut them off
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return out.to(tl.float16)


@functools.cache
def look_up(table: int) -> str:
    """PTX by which each thread of a warp has, in the register t, the number of a table at its place among 16. table:
    the bits of 16 numbers, float32, the first the lowest."""
    numbers = [f"0x{table >> 32 * place & 0xFFFFFFFF:08X}" for place in range(16)]
    selections = "".join(f"setp.eq.u32 p, l, {place}; selp.b32 t, {numbers[place]}, t, p;" for place in range(1, 16))
    return f".reg .b32 l, t; .reg .pred p; mov.u32 l, %laneid; and.b32 l, l, 15; mov.b32 t, {numbers[0]}; {selections}"


@triton.jit
def _numbers_in_table(words, table_ptr, J: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr):
    """The number in the table, float32, of nibble J of each half-word [BLOCK_O, DEPTH]. With PTX, two at a time: the
    threads of a warp hand each other numbers as fast as shared memory would."""
    if PTX:
        # The table is no operand: a tensor that comes from no load would keep the words from the tensor cores' layout.
        return tl.inline_asm_elementwise(
            "{.reg .b32 n;" + TABLE + "shr.u32 n, $2, $3; shfl.sync.idx.b32 $0, t, n, 0x101F, -1;"
            "shr.u32 n, $2, $5; shfl.sync.idx.b32 $1, t, n, 0x101F, -1;}",
            "=f,=f,r,r,r,r,r", [words, 4 * J, 16 + 4 * J], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.load(table_ptr + _codes(words, J, 0))


# Weights of 4 bits, and activations that are rounded to 8 bits by row.
#
# The tensor cores multiply codes: with int8 sums of up to 128 columns are exact. Each is scaled and added in float32,
# in the order of columns.
#
# Shapes of a tile: bytes [BLOCK_O, DEPTH] of two weights each, activations [BLOCK_N, DEPTH], sums [BLOCK_O, BLOCK_N].


@triton.jit
def multiply_w4a8(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`multiply_quantised` in the order of `w4a8.RoundedNibbles`, of x that `round_rows_kernel` has rounded."""
    DEPTH: tl.constexpr = GROUP if GROUP < 128 else 128
    k = tl.arange(0, DEPTH)
    w_at = addresses(weight.data.to(tl.pointer_type(tl.int8)), o, 4 * weight.stride, k)
    x_at = addresses(x.data, n, x.stride, k)
    acc = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
    for start in tl.range(begin, end, 2 * DEPTH):
        if PDL:
            let_next_kernel_begin((end - start + 2 * DEPTH - 1) // (2 * DEPTH), late)
        pairs = tl.load(w_at + start // 2, eviction_policy="evict_first")
        for half in tl.static_range(2):
            column = start + half * DEPTH
            b = load_rows(x_at, column, k, n < rows, inputs, EVEN)
            scale = tl.load(weight.scales + column // GROUP * outputs + o).to(tl.float32) * 0.0625
            a = _codes_times_16(pairs, half, PTX)
            if b.dtype == tl.int8:
                part = tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(a.to(tl.float32).to(b.dtype), b.T, input_precision="ieee")
            acc += part * scale[:, None]
    unit = tl.load(x.scales + n, mask=n < rows, other=0.0)
    return tl.fma(acc, unit[None, :] + tl.zeros_like(acc), tl.zeros_like(acc))  # rounded before parts are added


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


# Activations that are rounded to FP8 once for all products that read them.


BLOCKS, FEW_ROWS = 8, 16
"""A program rounds BLOCKS blocks of a row, or with more than FEW_ROWS rows twice as many."""


def has_fp8(device: torch.device) -> bool:
    """True if a GPU's tensor cores take FP8."""
    return card.card_of(device).capability >= card.FP8


def as_read(weight: Tensor) -> Tensor:
    """Weights as kernels read them: FP8 as bytes if the GPU's tensor cores have no FP8."""
    return weight.view(torch.uint8) if weight.dtype == FP8 and not has_fp8(weight.device) else weight


def rounded_blocks(x: Tensor, size: int, early: bool) -> tuple[Tensor, Tensor]:
    """`quantised.fp8.rounded_blocks` as codes and scales, by a kernel.

    x: [R, I], of any row stride.
    size: columns that share a scale.
    early: as of `skinny_gemm.launch`.

    -> codes [R, I] of float8_e4m3fn, or of x's dtype if the tensor cores have no FP8;
    scales [I / size, R] float32, with memory for more rows.
    """
    rows, inputs = x.shape
    blocks, of_program = -(-inputs // size), BLOCKS if rows <= FEW_ROWS else 2 * BLOCKS
    codes = x.new_empty(rows, inputs, dtype=FP8 if has_fp8(x.device) else x.dtype)
    units = x.new_empty(blocks, -(-rows // UNIT_ROWS.value) * UNIT_ROWS.value, dtype=torch.float32)
    round_blocks_kernel[(rows, -(-blocks // of_program))](
        x, codes, units, inputs, x.stride(0), SIZE=size, BLOCKS=of_program, EARLY=early, launch_pdl=early
    )
    return codes, units
