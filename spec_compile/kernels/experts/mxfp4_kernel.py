"""The kernel of routed experts with weights in MXFP4: how a tile is decoded between shared memory and the tensor cores.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, 256] in words [BLOCK_O, 32],
activations [BLOCK_N, 256], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl


@triton.jit
def multiply_mxfp4(
    weight_ptr, unit_ptr, x_ptr, o, x_row, valid, outputs, inputs, stride_w, stride_x, BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_O, BLOCK_N] of an expert's outputs o [BLOCK_O] for the rows x_row [BLOCK_N], in one chain.
    weight_ptr, unit_ptr: of `mxfp4.pack`. EVEN: the inputs are a multiple of 256. PTX: see `_numbers`."""
    word = tl.arange(0, 32)
    o = tl.minimum(o, outputs - 1)
    w_at = weight_ptr + o.to(tl.int64)[:, None] * stride_w + word[None, :]
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * stride_x + word[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(0, inputs, 256):
        words = tl.load(w_at + start // 8, eviction_policy="evict_first")
        for j in tl.static_range(8):
            if j % 4 == 0:
                units = tl.load(unit_ptr + (start // 128 + j // 4) * outputs + o)
            unit = ((units >> 8 * (j % 4)) & 255) * 0x00800080  # a bfloat16 twice
            inside = (word < (32 if EVEN else inputs - start - 32 * j))[None, :]
            b = tl.load(x_at + start + 32 * j, mask=valid[:, None] & inside, other=0.0)
            a = _numbers(words, unit[:, None] + tl.zeros_like(words), j, PTX)
            acc = tl.dot(a.to(b.dtype), b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _numbers(words, unit, J: tl.constexpr, PTX: tl.constexpr):
    """Code J of each word [BLOCK_O, 32] as a number: its bits, see `mxfp4.PLACES`, are those of a bfloat16, which times
    the unit is exact. PTX: two words at a time become two numbers; else the same in float32."""
    half: tl.constexpr = 0x5410 if J < 4 else 0x7632
    if not PTX:
        at = words >> 16 * (J // 4)
        if J % 4 < 3:
            bits = (at << 3 * (J % 4)) & 0x81C0
        else:
            bits = ((at << 1) & 0x8000) | ((at >> 3) & 0x0180) | ((at >> 7) & 0x0040)
        out = (bits << 16).to(tl.float32, bitcast=True) * (unit << 16).to(tl.float32, bitcast=True)
    elif J % 4 < 3:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, nought; mov.b32 nought, 0x80008000; prmt.b32 a, $1, $2, $5; shl.b32 a, a, $7;"
            "and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $0, a, $3, nought;}",
            "=r,r,r,r,r,r,r,r,r", [words, unit, half, 3 * (J % 4)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a, b, c, nought; mov.b32 nought, 0x80008000; prmt.b32 a, $1, $2, $5; shl.b32 b, a, 1;"
            "and.b32 b, b, 0x80008000; shr.b32 c, a, 3; lop3.b32 b, c, 0x01800180, b, 0xEA; shr.b32 c, a, 7;"
            "lop3.b32 b, c, 0x00400040, b, 0xEA; fma.rn.bf16x2 $0, b, $3, nought;}",
            "=r,r,r,r,r,r,r", [words, unit, half], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return out
