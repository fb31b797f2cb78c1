"""Products of the kernel "small_m" with quantised weights: how a tile is loaded and what it means, a helper a format.

A tile is decoded in registers, between shared memory and the tensor cores, and rounded as the format's library rounds.
The order of summation is that of 16 bits: one chain along the columns.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..ptx import let_next_kernel_begin

LARGEST: tl.constexpr = tl.constexpr(448.0)
"""Of float8_e4m3fn."""


@triton.jit
def multiply_quantised(
    weight_ptr, scale_ptr, x_ptr, o, n, begin, end, rows, outputs, inputs, stride_w, stride_x, late,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The columns begin .. end of x times the weights -> sums [BLOCK_O, BLOCK_N]. FORMAT, GROUP: of `Layout.packing`.
    stride_w: elements of weight_ptr in a row."""
    if FORMAT == "fp8_blocks":
        acc = _multiply_fp8_blocks(
            weight_ptr, scale_ptr, x_ptr, o, n, begin, end, rows, inputs, stride_w, stride_x, late, GROUP, BLOCK_N,
            BLOCK_O, EVEN, PDL,
        )  # fmt: skip
    else:
        acc = _multiply_nibbles(
            weight_ptr, scale_ptr, x_ptr, o, n, begin, end, rows, outputs, inputs, stride_w, stride_x, late,
            FORMAT == "nibbles_bf16", GROUP, BLOCK_N, BLOCK_O, EVEN, PDL, PTX,
        )  # fmt: skip
    return acc


@triton.jit
def _multiply_fp8_blocks(
    weight_ptr, scale_ptr, x_ptr, o, n, begin, end, rows, inputs, stride_w, stride_x, late, SQUARE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FP8 with a scale for each SQUARE rows and columns of the weights [O / SQUARE, I / SQUARE], and for each row of x
    and SQUARE columns. weight_ptr: float8_e4m3fn, or where the tensor cores have no such type its bytes."""
    k = tl.arange(0, SQUARE)
    w_at = weight_ptr + o.to(tl.int64)[:, None] * stride_w + k[None, :]
    x_at = x_ptr + n.to(tl.int64)[:, None] * stride_x + k[None, :]
    scale_at = scale_ptr + o // SQUARE * tl.cdiv(inputs, SQUARE)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    scale = tl.load(scale_at + begin // SQUARE)
    for start in tl.range(begin, end, SQUARE):
        if PDL:
            let_next_kernel_begin((end - start + SQUARE - 1) // SQUARE, late)
        if EVEN:
            a = tl.load(w_at + start, eviction_policy="evict_first")
            b = tl.load(x_at + start, mask=(n < rows)[:, None], other=0.0)
        else:
            inside = (k < inputs - start)[None, :]
            a = tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            b = tl.load(x_at + start, mask=(n < rows)[:, None] & inside, other=0.0)
        # The scale of the next tile is on its way while this one is multiplied.
        following = tl.load(scale_at + tl.minimum(start + SQUARE, end - 1) // SQUARE)
        codes, unit = _rounded_to_fp8(b.to(tl.float32), BLOCK_N, SQUARE)
        if weight_ptr.dtype.element_ty == tl.uint8:
            part = tl.dot(_float_of_fp8(a, b.dtype), _nearest_fp8(codes).to(b.dtype).T, input_precision="ieee")
        else:
            part = tl.dot(a, codes.to(a.dtype).T)
        acc += part * (scale[:, None] * unit[None, :])
        scale = following
    return acc


@triton.jit
def _rounded_to_fp8(x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [BLOCK_N, BLOCK_K] float32 over the scale of each row, and these scales [BLOCK_N]."""
    unit = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([BLOCK_N], LARGEST, tl.float32))
    unit = tl.where(unit > 0, unit, 1.0)
    # The correctly rounded quotient from that of 1 (Markstein 1990), because many quotients lie halfway between codes.
    inverse = tl.div_rn(tl.full([BLOCK_N], 1.0, tl.float32), unit)[:, None] + tl.zeros_like(x)
    near = x * inverse
    rest = tl.fma(-near, unit[:, None] + tl.zeros_like(x), x)
    return tl.fma(rest, inverse, near), unit


@triton.jit
def _nearest_fp8(x):
    """The value of float8_e4m3fn next to each x, float32: ties to even, nothing beyond the largest."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # steps of 2 ** -9 from here on
    return tl.clamp(tl.where(tl.abs(x) < 0.015625, small, normal), -LARGEST, LARGEST)


@triton.jit
def _float_of_fp8(codes, dtype: tl.constexpr):
    """Bytes of float8_e4m3fn, without NaN, as numbers of a dtype that has them all."""
    bits = codes.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2 ** 120: the exponents' difference


@triton.jit
def _multiply_nibbles(
    weight_ptr, unit_ptr, x_ptr, o, n, begin, end, rows, outputs, inputs, stride_w, stride_x, late,
    BF16: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """4 bits: nibble j of word w of each 256 columns is column 32 * j + w of them. unit_ptr [I / GROUP, O]: see
    `nibbles.Nibbles`."""
    word = tl.arange(0, 32)
    w_at = weight_ptr + o.to(tl.int64)[:, None] * stride_w + word[None, :]
    x_at = x_ptr + n.to(tl.int64)[:, None] * stride_x + word[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, 256):
        if PDL:
            let_next_kernel_begin((end - start + 255) // 256, late)
        words = tl.load(w_at + start // 8, eviction_policy="evict_first")
        for j in tl.static_range(8):
            if j * 32 % GROUP == 0:
                unit = tl.load(unit_ptr + (start + j * 32) // GROUP * outputs + o)
            if EVEN:
                b = tl.load(x_at + start + 32 * j, mask=(n < rows)[:, None], other=0.0)
            else:
                inside = (word < inputs - start - 32 * j)[None, :]
                b = tl.load(x_at + start + 32 * j, mask=(n < rows)[:, None] & inside, other=0.0)
            a = _numbers(words, unit[:, None] + tl.zeros_like(words), j, BF16, PTX)
            acc = tl.dot(a.to(b.dtype), b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _numbers(words, unit, J: tl.constexpr, BF16: tl.constexpr, PTX: tl.constexpr):
    """Nibble J of each word [BLOCK_O, 32]: (nibble - zero point) * scale, rounded once, of bfloat16 or float16."""
    half: tl.constexpr = 0x5410 if J < 4 else 0x7632
    # Two words at a time: their nibbles become the lowest bits of two numbers that are `nibbles.TOO_LARGE`.
    if not PTX:
        number = ((words >> 4 * J) & 15) + (128 if BF16 else 1024)
        if BF16:
            scale, added = (unit << 16).to(tl.float32, bitcast=True), (unit & -0x10000).to(tl.float32, bitcast=True)
            bits = ((number + added) * scale).to(tl.int32, bitcast=True)  # Triton's interpreter would cut them off
            out = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        else:
            scale, added = unit.to(tl.int16).to(tl.float16, bitcast=True), (unit >> 16).to(tl.int16)
            out = (number + added.to(tl.float16, bitcast=True).to(tl.float32)) * scale.to(tl.float32)
            out = out.to(tl.float16)
    elif BF16:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z, one, nought; prmt.b32 a, $1, $2, $5; shr.b32 a, a, $7;"
            "lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; prmt.b32 s, $3, $4, 0x5410; prmt.b32 z, $3, $4, 0x7632;"
            "mov.b32 one, 0x3F803F80; mov.b32 nought, 0x80008000;"
            "fma.rn.bf16x2 a, a, one, z; fma.rn.bf16x2 $0, a, s, nought;}",
            "=r,r,r,r,r,r,r,r,r", [words, unit, half, 4 * (J % 4)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, z; prmt.b32 a, $1, $2, $5; shr.b32 a, a, $7;"
            "lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA; prmt.b32 s, $3, $4, 0x5410; prmt.b32 z, $3, $4, 0x7632;"
            "add.rn.f16x2 a, a, z; mul.rn.f16x2 $0, a, s;}",
            "=r,r,r,r,r,r,r,r,r", [words, unit, half, 4 * (J % 4)], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return out
