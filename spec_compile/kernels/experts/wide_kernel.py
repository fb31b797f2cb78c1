"""The kernels of routed experts of many tokens, such as a prompt's: pairs are sorted by expert first.

A program multiplies a tile of `sort_pairs` with a stretch of its expert's outputs. Sums run along the columns of
the weights in the same chains as in `experts_kernel`, parts are added in the same order by the same functions, and so
**a pair's result has the same bits as among few tokens**. With a descriptor of the weights (TMA on Hopper), a gate and
what it gates are two products of the same rows.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.product import Matrix
from ..linear.skinny_gemm_kernel import store
from ..primitives import addresses, let_next_kernel_begin, wait_for_kernel_before
from .kernel import combine, finish, gated, product, weight_rows, with_bias


@triton.jit
def _multiply(
    weight, x, row, distance, x_row, inputs, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The sums [HEIGHT, BLOCK_N] of the weights' rows from `row` on for the rows x_row [BLOCK_N] of x, in one chain,
    and, PAIRED, the sums of the rows from row + distance on (else 0). EVEN: no tile reaches beyond the inputs."""
    k = tl.arange(0, BLOCK_K)
    x_at = addresses(x.data, x_row, x.stride, k)
    first, second = tl.zeros([HEIGHT, x_row.shape[0]], tl.float32), 0.0
    if PAIRED:
        second = tl.zeros_like(first)
    for start in tl.range(0, inputs, BLOCK_K):
        if EVEN:
            b = tl.load(x_at + start)
        else:
            b = tl.load(x_at + start, mask=(k < inputs - start)[None, :], other=0.0)
        first = tl.dot(weight.load([row, start]), b.T, first)
        if PAIRED:
            second = tl.dot(weight.load([row + distance, start]), b.T, second)
    return first, second


@triton.jit(do_not_specialize=["x_rows"])
def wide_experts_kernel(
    x, order_ptr, tiles_ptr,  # of `experts_kernel`; see `sort_pairs`, with tiles of BLOCK_N pairs
    weight, bias_ptr,  # of `experts_kernel`; TILED: a descriptor of [E * outputs, inputs]
    pairs_ptr,  # [T * k, height], written
    x_rows, outputs, inputs, stride_e, scale_stride, alpha, limit, TOP: tl.constexpr, GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, MXFP4: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
    TILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs, tiles of pairs): programs that read the same rows begin together, and programs of one
    expert, too. TOP: pairs that read the same row of x. SCALED: inputs of an FP8 scale, or 0."""
    if EARLY:
        wait_for_kernel_before()
        let_next_kernel_begin(0, 0)
    tile, tiles_ptr = tl.program_id(0), tiles_ptr + tl.program_id(1) * 3
    expert, count = tl.load(tiles_ptr), tl.load(tiles_ptr + 2)
    if count == 0:
        return
    n = tl.arange(0, BLOCK_N)
    valid = n < count
    pair = tl.load(order_ptr + tl.load(tiles_ptr + 1) + n, mask=valid, other=0)
    GATED: tl.constexpr = GATE > 0
    HEIGHT: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    height = outputs // 2 if GATED else outputs
    column = tile * HEIGHT + tl.arange(0, HEIGHT)
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * outputs

    if TILED and GATED and not INTERLEAVED:
        row = expert * outputs + tile * HEIGHT
        gate, up = _multiply(weight, x, row, height, pair // TOP, inputs, HEIGHT, BLOCK_K, EVEN, True)
        gate, up = with_bias(gate, bias_ptr, column, height), with_bias(up, bias_ptr, column + height, outputs)
        store(gated(gate, up, alpha, limit, GATE), pairs_ptr, column, pair, valid, height)
    else:
        o = weight_rows(tile, outputs, GATED and not INTERLEAVED, BLOCK_O)
        if TILED:
            row = expert * outputs + tile * BLOCK_O
            acc, _ = _multiply(weight, x, row, 0, pair // TOP, inputs, BLOCK_O, BLOCK_K, EVEN, False)
        else:
            scales = weight.scales
            if scales is not None:
                scales += expert.to(tl.int64) * scale_stride
            weight = Matrix(weight.data + expert.to(tl.int64) * stride_e, scales, weight.stride)
            share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), PARTS) * BLOCK_K  # columns of a part
            acc = product(
                weight, x, o, pair // TOP, valid, 0, inputs, share, x_rows, outputs, inputs, BLOCK_K, EVEN, TRANSPOSED,
                SCALED, MXFP4, PARTS > 1, PTX,
            )  # fmt: skip
        finish(acc, bias_ptr, pairs_ptr, pair, valid, o, column, outputs, height, alpha, limit, GATE)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    pairs_ptr, ids_ptr, end, rows, height, TOP: tl.constexpr, BLOCK_R: tl.constexpr, HEIGHT: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, SQUARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`combine` of a tile of tokens a program. Grid (tiles of columns, tiles of tokens)."""
    if EARLY:
        wait_for_kernel_before()
        let_next_kernel_begin(0, 0)
    begin, tile = tl.program_id(1) * BLOCK_R, tl.program_id(0)
    combine(
        pairs_ptr, None, ids_ptr, None, end, begin, tile, rows, height, TOP, BLOCK_R, HEIGHT, 1, FIRST, HELD, SQUARED,
    )  # fmt: skip


# The pairs of tokens and experts, sorted by their experts and cut into tiles.
#
#     ids = [[5, 2], [2, 7]]: pairs 0 .. 3 of experts 5, 2, 2, 7; order = [1, 2, 0, 3]
#
# Tiles have at most SIZE pairs of one expert. As many tiles as any choice of experts may need are there, because a
# captured graph launches as many programs in every replay. If `first` pairs go to experts below e, the tiles of expert
# e begin with number first // SIZE + e. Tiles that no pair fills have 0 pairs. All pairs may go to experts elsewhere.
#
#     SIZE = 1 in the example: experts 0 .. 7 begin with tiles 0, 1, 2, 5, 6, 7, 9, 10; tiles 2, 3, 7 and 10 have a pair


FEW_PAIRS, MANY_PAIRS = 512, 4096
"""Pairs that a program looks through at a time."""


def sort_pairs(ids: Tensor, first: int, experts: int, size: int, early: bool) -> tuple[Tensor, Tensor]:
    """The pairs ids [T, k] int64 by expert -> their numbers [T * k] int32 and tiles [T * k // size + experts, 3] int32.

    Pairs of one expert stay in their order. A tile is its expert, where its pairs begin in the order, and how many it
    has. first, experts: the number of the first expert that is here, and how many are. size: the most pairs of a tile.
    early: as of `skinny_gemm.launch`.
    """
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    tiles = order.new_empty(ids.numel() // size + experts, 3)
    sort_kernel[(experts,)](
        ids.contiguous(), order, tiles, ids.numel(), FIRST=first, SIZE=size,
        CHUNK=FEW_PAIRS if ids.numel() <= FEW_PAIRS else MANY_PAIRS, EARLY=early, launch_pdl=early, num_warps=8,
    )  # fmt: skip
    return order, tiles


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    ids_ptr, order_ptr, tiles_ptr, pairs, FIRST: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`sort_pairs` of one expert a program, which looks through CHUNK pairs at a time. Grid (experts)."""
    if EARLY:
        wait_for_kernel_before()
        let_next_kernel_begin(0, 0)
    expert, pair = tl.program_id(0), tl.arange(0, CHUNK)

    # Count the pairs of experts below this one, and its own pairs.
    below, own = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        of_pair = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=0x7FFFFFFF) - FIRST
        below += ((of_pair >= 0) & (of_pair < expert)).to(tl.int32)
        own += (of_pair == expert).to(tl.int32)
    first, count = tl.sum(below, 0), tl.sum(own, 0)

    # The tiles. The last expert has those that remain, because other pairs are of experts elsewhere.
    tile, end = first // SIZE + expert, (first + count) // SIZE + expert + 1
    end = tl.where(expert == tl.num_programs(0) - 1, pairs // SIZE + expert + 1, end)
    for begin in range(0, end - tile, CHUNK):
        done, at = (begin + pair) * SIZE, tiles_ptr + (tile + begin + pair) * 3
        mask = begin + pair < end - tile
        tl.store(at, pair * 0 + expert, mask=mask)
        tl.store(at + 1, first + done, mask=mask)
        tl.store(at + 2, tl.minimum(tl.maximum(count - done, 0), SIZE), mask=mask)

    # The order.
    for begin in range(0, pairs, CHUNK):
        same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=0x7FFFFFFF) - FIRST == expert
        tl.store(order_ptr + first + tl.cumsum(same.to(tl.int32), 0) - 1, begin + pair, mask=same)
        first += tl.sum(same.to(tl.int32), 0)
