"""The product "small_m" of many rows, such as those of a prompt: as fast as the tensor cores multiply.

A program reads its tiles with descriptors (TMA on Hopper) and adds up all parts of the columns by itself, one after the
other. So each row goes through the same instructions, and each part is added in the same order, as in `small_m_kernel`,
and **a row's result has the same bits as among few rows**. A product whose outputs come in pairs, a gate's or those of
the halves of a head, is two products of the same rows x.

Import this module only where Triton is installed. Shapes of a tile: weights [HEIGHT, BLOCK_K], activations [BLOCK_N,
BLOCK_K], sums [HEIGHT, BLOCK_N].
"""

import triton
import triton.language as tl

from .append_kernel import load_for_heads, store_heads
from .product_end import inverse_rms, load_bias, load_squares, load_stream, scale_rows, store, store_stream


@triton.jit
def _multiply(
    x, weight, row, o, distance, inputs,
    HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The products [HEIGHT, BLOCK_N] of the rows of x from `row` on with the weights' rows from `o` on and, PAIRED,
    with those from o + distance on (else 0). Columns are cut as in `small_m_kernel._share_of_program`."""
    cuts = tl.cdiv(inputs, CUT)
    first, second = tl.zeros([HEIGHT, BLOCK_N], tl.float32), 0.0
    if PAIRED:
        second = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        acc, other = tl.zeros([HEIGHT, BLOCK_N], tl.float32), 0.0
        if PAIRED:
            other = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
        end = tl.minimum((part + 1) * cuts // PARTS * CUT, inputs)
        for start in tl.range(part * cuts // PARTS * CUT, end, BLOCK_K):
            b = x.load([row, start]).T
            acc = tl.dot(weight.load([o, start]), b, acc)
            if PAIRED:
                other = tl.dot(weight.load([o + distance, start]), b, other)
        first, second = (acc, other) if part == 0 else (first + acc, second + other)
    return first, second


@triton.jit(do_not_specialize=["rows", "nodes"])
def wide_kernel(
    x, weight,  # descriptors of [rows, inputs] in blocks [BLOCK_N, BLOCK_K], [outputs, inputs] in [HEIGHT, BLOCK_K]
    bias_ptr, out_ptr, before, stream, heads, rows, outputs, inputs, stride_r, nodes, capacity,
    BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr,
    TERMS: tl.constexpr, SQUARED: tl.constexpr, GATED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T, and what stands around it. Grid (tiles of x's rows, tiles of the weights' rows): programs
    that read the same weights begin together."""
    # The columns of out [HEIGHT] and the rows of x [BLOCK_N] of the tile, and its rows of the weights.
    APPENDS: tl.constexpr = HEADS > 0
    PAIRED: tl.constexpr = GATED or APPENDS
    tile, row = tl.program_id(1), tl.program_id(0) * BLOCK_N
    begin, height = tile * HEIGHT, outputs // 2 if PAIRED else outputs
    o, distance = begin, height
    if APPENDS:
        o, distance = begin // (D // 2) * D + begin % (D // 2), D // 2
    column, n = begin + tl.arange(0, HEIGHT), row + tl.arange(0, BLOCK_N)
    if before is not None:  # here, because later registers are full of sums
        scale = inverse_rms(load_squares(before.squares, n, rows, TERMS), inputs, before.eps)
    first, second = _multiply(x, weight, row, o, distance, inputs, HEIGHT, BLOCK_N, BLOCK_K, CUT, PARTS, PAIRED)

    # The steps after the product, with the sums in registers.
    r = tl.minimum(o + tl.arange(0, HEIGHT), outputs - 1)
    next_r = tl.minimum(r + distance, outputs - 1)
    if before is not None:
        first = scale_rows(first, scale, load_bias(bias_ptr, r))
        if PAIRED:
            second = scale_rows(second, scale, load_bias(bias_ptr, next_r))
    elif bias_ptr is not None:
        first += load_bias(bias_ptr, r)[:, None]
        if PAIRED:
            second += load_bias(bias_ptr, next_r)[:, None]
    if APPENDS:
        loaded = load_for_heads(heads, column, n, rows, nodes, HEADS, KV_HEADS, D)
        store_heads(
            first, second, loaded, out_ptr, heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, D, HEIGHT,
            BLOCK_N,
        )  # fmt: skip
    elif stream is not None:
        residual, norm = load_stream(stream, column, n, rows, height, stride_r)
        store_stream(first, residual, norm, out_ptr, stream, column, n, tile, rows, height, BLOCK_N, HEIGHT, SQUARED)
    elif GATED:
        store(first / (1 + tl.exp(-first)) * second, out_ptr, column, n, rows, height)
    else:
        store(first, out_ptr, column, n, rows, height)
