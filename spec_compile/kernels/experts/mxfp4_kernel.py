"""Products of routed experts with weights in MXFP4: a tile is decoded between shared memory and the tensor cores.

    sums[o, n] = sum over columns c of number(code[o, c]) * 2 ** (scale[o, c // 32] - 127) * x[n, c]

`quantised_kernel` explains the method; `quantised.mxfp4` has the order of codes. Import this module only where Triton
is installed. Shapes of a step over 32 columns: weights [BLOCK_O, 32], each from a half-word of 16 bits, activations
[BLOCK_N, 32], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..linear.quantised_kernel import half_words
from ..primitives import addresses, load_rows


@triton.jit
def multiply_mxfp4(
    weight, x, o, x_row, valid, begin, end, share, outputs, inputs, EVEN: tl.constexpr, CUT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_O, BLOCK_N] over columns begin .. end, for an expert's outputs o [BLOCK_O] and rows x_row [BLOCK_N].

    256 columns are one chain of the tensor cores, `acc` adds up the chains of `share` columns, and `total` adds up the
    shares. 1024 columns with share = 512 give (c0 + c1) + (c2 + c3), where c is a chain.

    weight: an expert's words and units, see `mxfp4`. valid [BLOCK_N]: True for rows that exist.
    EVEN: the inputs are a multiple of 256. CUT: there is more than one share. PTX: see `_numbers`.
    """
    column = tl.arange(0, 32)
    o = tl.minimum(o, outputs - 1)
    if PTX:
        w_at = addresses(weight.data.to(tl.pointer_type(tl.int16)), o, 2 * weight.stride, column)
    else:
        w_at = addresses(weight.data, o, weight.stride, column // 2)
    x_at = addresses(x.data, x_row, x.stride, column)
    total = tl.zeros([o.shape[0], x_row.shape[0]], tl.float32)
    acc = tl.zeros_like(total)
    for start in tl.range(begin, end, 256):
        # A new share begins.
        if CUT:
            if start % share == 0:
                total += acc
                acc = tl.zeros_like(total)
        # Eight steps of 32 columns; four of them share words and units.
        for step in tl.static_range(8):
            at = start + 32 * step
            if step % 4 == 0:
                words = tl.load(w_at + at // (4 if PTX else 8), eviction_policy="evict_first")
                unit = tl.load(weight.scales + at // 128 * outputs + o)[:, None]
            b = load_rows(x_at, at, column, valid, inputs, EVEN)
            a = _numbers(words, unit + tl.zeros([o.shape[0], 32], tl.int32), step % 4, PTX)
            # A chain across iterations of the loop would wait after each instruction of the tensor cores.
            if step == 0:
                part = tl.dot(a.to(b.dtype), b.T, input_precision="ieee")
            else:
                part = tl.dot(a.to(b.dtype), b.T, part, input_precision="ieee")
        acc += part
    return total + acc if CUT else acc


@triton.jit
def _numbers(words, unit, J: tl.constexpr, PTX: tl.constexpr):
    """Code J of each half-word as a number [BLOCK_O, 32].

    The code's bits are moved to their place in a bfloat16 (`mxfp4.PLACES`), which is multiplied by a bfloat16 with byte
    J of the unit as its exponent; the product is exact. With PTX, `words` are half-words and two are decoded at a time;
    without it they are whole words and the numbers are float32.
    """
    TURN: tl.constexpr = 26 if J == 0 else 30 if J == 1 else 4 if J == 2 else 0  # to the right
    if not PTX:
        turned = half_words(words, TURN)
        if J < 3:
            bits = turned & 0x81C0
        else:
            bits = (turned & 0x8180) | ((turned >> 8) & 0x0040)
        scale = (((unit >> 8 * J) & 255) << 23).to(tl.float32, bitcast=True)
        out = (bits << 16).to(tl.float32, bitcast=True) * scale
    elif J < 3:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, s, nought; shf.r.wrap.b32 a, $1, $1, $6; and.b32 a, a, 0x81C081C0; prmt.b32 s, $2, 0, $4;"
            "shl.b32 s, s, 7; mov.b32 nought, 0x80008000; fma.rn.bf16x2 $0, a, s, nought;}",
            "=r,r,r,r,r,r,r,r", [words, unit, 0x4040 + 0x0101 * J, TURN], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, b, s, nought; shr.b32 b, $1, 8; and.b32 a, $1, 0x81808180;"
            "lop3.b32 a, b, 0x00400040, a, 0xEA; prmt.b32 s, $2, 0, 0x4343; shl.b32 s, s, 7;"
            "mov.b32 nought, 0x80008000; fma.rn.bf16x2 $0, a, s, nought;}",
            "=r,r,r,r", [words, unit], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return out
