"""Products of the kernel "small_m" with weights of 4 bits: how words are decoded, between shared memory and the tensor
cores.

Instructions, not memory, would bound these products, so they are counted. A code and its neighbour, 16 bits apart, are
turned and masked together, and become two numbers by one instruction (centred codes) or two. They stay in registers,
where the tensor cores read them: every tensor that they are made of is loaded in the loop, or Triton would pass them
through shared memory.

Import this module only where Triton is installed. Shapes of a tile: words [BLOCK_O, DEPTH] of 16 bits, activations
[BLOCK_N, DEPTH], sums [BLOCK_O, BLOCK_N].
"""

import functools

import triton
import triton.language as tl

from ..ptx import let_next_kernel_begin
from .load_tile import addresses, load_rows


@triton.jit
def multiply_nibbles(
    weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`multiply_quantised` of 4 bits, in the order of `nibbles.Words`. The weight's scales are the units of
    `nibbles.Nibbles`, or with FORMAT "nibbles_table" of `nibbles.TableNibbles`."""
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
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, 256):
        if PDL:
            let_next_kernel_begin((end - start + 255) // 256, late)
        for step in tl.static_range(256 // DEPTH):
            column = start + step * DEPTH
            if step % 4 == 0:
                words = tl.load(w_at + column // (4 if PTX else 8), eviction_policy="evict_first")
            if step * DEPTH % SPAN == 0:
                unit = tl.load(unit_ptr + column // SPAN * outputs + o)[:, None]
            b = load_rows(x_at, column, half, n, rows, inputs, EVEN)
            if TABLE is not None:
                scale = (unit >> (32 if step * DEPTH % SPAN >= GROUP else 0)).to(tl.int32).to(tl.float32, bitcast=True)
                a = _numbers_in_table(words, weight.scales, step % 4, TABLE, PTX) * scale
            else:
                a = _numbers(
                    words, unit + tl.zeros([BLOCK_O, DEPTH], tl.int32), step % 4, step * DEPTH % SPAN >= GROUP, FORMAT,
                    PTX,
                )  # fmt: skip
            # A sum of its own for 256 columns: the tensor cores then work while the next numbers are decoded.
            if step == 0:
                part = tl.dot(a.to(b.dtype), b.T, input_precision="ieee")
            else:
                part = tl.dot(a.to(b.dtype), b.T, part, input_precision="ieee")
        acc += part
    return acc


@triton.jit
def half_words(words, TURN: tl.constexpr):
    """Half-words [O, D] from the word [O, D] of each, int32, turned by TURN bits to the right, or for those in the
    upper half of theirs by 16 more. The bits above theirs are those of the other half."""
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
        # The nibbles become the lowest bits of numbers that are `nibbles.TOO_LARGE`.
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
    lower, upper = unit << 16, unit & -0x10000  # the halves' bits, where those of float32 begin with bfloat16's
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
    """PTX by which each thread of a warp has a number of a table, that of its place among 16, in the register t. table:
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
