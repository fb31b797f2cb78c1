"""The kernel of routed experts of few tokens: both products, each of which reads an expert's weights once.

A pair is a token and one of its experts: pair p is expert e(p) = ids[p // k, p % k] of token p // k.

    first product:   pairs[p] = gate(x[p // k] @ W[e(p)]^T + bias[e(p)])
    second product:  pairs[p] = x[p] @ W[e(p)]^T + bias[e(p)],   out[t] = sum over r of routing[t, r] * pairs[t * k + r]

Each program has a slot, finds the expert and the pairs of that slot (`slots`), and multiplies them in tiles. The last
program to arrive at a stretch of outputs adds up what a token's experts have computed, in the router's order. With few
rows in MXFP4, PARTS programs share the columns of the weights, and the last one to arrive adds up their sums.

**A row's result has the same bits whatever other rows there are**: every row of a tile is computed by the same
instructions, sums run along the columns of the weights in chains that only the format and shape of the weights cut, and
parts are added in the same order by one program as by several.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..linear.product import Matrix
from ..linear.quantised_kernel import multiply_fp8_blocks
from ..linear.skinny_gemm_kernel import fetch_first_tiles, load_stream, store, store_stream
from ..primitives import addresses, let_next_kernel_begin, load_rows, wait_for_kernel_before
from .mxfp4_kernel import multiply_mxfp4


@triton.jit
def weight_rows(tile, outputs, SPLIT: tl.constexpr, BLOCK_O: tl.constexpr):
    """The outputs [BLOCK_O] of a tile; numbers from `outputs` on do not exist.

    SPLIT: the first half of the outputs are gates, the second half what they gate, and they alternate in the tile:
    outputs = 8, BLOCK_O = 4 give tile 0 the outputs 0, 4, 1, 5 and tile 1 the outputs 2, 6, 3, 7.
    """
    r = tl.arange(0, BLOCK_O)
    if SPLIT:
        pair = tile * (BLOCK_O // 2) + r // 2
        return tl.where(pair < outputs // 2, pair + r % 2 * (outputs // 2), outputs)
    else:
        return tile * BLOCK_O + r


@triton.jit
def _multiply(
    weight, x, o, x_row, valid, outputs, inputs, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """The sums [BLOCK_O, BLOCK_N] of an expert's outputs o [BLOCK_O] for the rows x_row [BLOCK_N], in one chain.

    weight, x: each a `Matrix`. valid [BLOCK_N]: True for rows that exist. EVEN: the inputs are a multiple of BLOCK_K.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = addresses(x.data, x_row, x.stride, k)
    if TRANSPOSED:
        w_at = addresses(weight.data, k, weight.stride, o)
        exists = (o < outputs)[None, :]
    else:
        w_at = addresses(weight.data, o, weight.stride, k)
        exists = (o < outputs)[:, None]
    acc = tl.zeros([o.shape[0], x_row.shape[0]], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K):
        inside = k < (BLOCK_K if EVEN else inputs - start)
        if TRANSPOSED:
            step, mask = start * weight.stride, exists & inside[:, None]
        else:
            step, mask = start, exists & inside[None, :]
        a = tl.load(w_at + step, mask=mask, other=0.0, eviction_policy="evict_first")
        b = load_rows(x_at, start, k, valid, inputs, EVEN)
        acc = tl.dot((a.T if TRANSPOSED else a).to(b.dtype), b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """The gate of a product, see `ExpertFormat.gate`: silu(gate) * up or, if GATE is 2, gpt-oss's."""
    if GATE == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
    else:
        alpha = 1.0
    return gate / (1 + tl.exp(-alpha * gate)) * up


@triton.jit
def product(
    weight, x, o, x_row, valid, begin, end, share, x_rows, outputs, inputs, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, MXFP4: tl.constexpr, CUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_O, BLOCK_N] by the function for the weights' format; MXFP4: only of the columns begin .. end."""
    if SCALED > 0:
        o = tl.minimum(o, outputs - 1)
        acc = multiply_fp8_blocks(weight, x, o, x_row, valid, 0, inputs, x_rows, inputs, 0, SCALED, EVEN, 1, False)
    elif MXFP4:
        acc = multiply_mxfp4(weight, x, o, x_row, valid, begin, end, share, outputs, inputs, EVEN, CUT, PTX)
    else:
        acc = _multiply(weight, x, o, x_row, valid, outputs, inputs, BLOCK_K, EVEN, TRANSPOSED)
    return acc


@triton.jit
def _sum_of_parts(parts_ptr, at, mask, size, PARTS: tl.constexpr):
    """The numbers at `at`, added up over PARTS parts of `size` numbers each, in ascending order."""
    total = tl.load(parts_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + at + part * size, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _is_last(arrived_ptr, count):
    """True if this program is the last of `count` to arrive. The counter is zero before and after."""
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(arrived_ptr, 0)
    return is_last


@triton.jit
def with_bias(acc, bias_ptr, o, outputs):
    """The sums acc [BLOCK_O, BLOCK_N] of an expert's outputs o [BLOCK_O], plus its bias, if it has one."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def finish(acc, bias_ptr, pairs_ptr, pair, valid, o, column, outputs, height, alpha, limit, GATE: tl.constexpr):
    """Add the expert's bias to sums [BLOCK_O, BLOCK_N], apply the gate, and store them to pairs_ptr [pairs, height].

    With a gate, rows g0, u0, g1, u1 ... of the sums alternate.
    """
    acc = with_bias(acc, bias_ptr, o, outputs)
    if GATE > 0:
        gate, up = acc.reshape(acc.shape[0] // 2, 2, acc.shape[1]).permute(0, 2, 1).split()
        acc = gated(gate, up, alpha, limit, GATE)
    store(acc, pairs_ptr, column, pair, valid, height)


@triton.jit
def _add_parts(
    parts_ptr, bias_ptr, pairs_ptr, ids_ptr, slot, expert, count, pairs, o, column, outputs, height, alpha, limit,
    GATE: tl.constexpr, ONE_TOKEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the parts [PARTS, pairs, outputs] of an expert's rows, and `finish` them."""
    for begin in range(0, count, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        pair = pairs_of(ids_ptr, slot, expert, n, pairs, ONE_TOKEN, CHUNK, BLOCK_N)
        at = pair.to(tl.int64)[None, :] * outputs + o[:, None]
        mask = (n < count)[None, :] & (o < outputs)[:, None]
        acc = _sum_of_parts(parts_ptr, at, mask, pairs.to(tl.int64) * outputs, PARTS)
        finish(acc, bias_ptr, pairs_ptr, pair, n < count, o, column, outputs, height, alpha, limit, GATE)


@triton.jit
def combine(
    pairs_ptr, parts_ptr, ids_ptr, bias_ptr, end, begin, tile, rows, height, TOP: tl.constexpr, BLOCK_R: tl.constexpr,
    HEIGHT: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """out[n] = sum over r of routing[n, r] * pairs[n * TOP + r], in ascending order of r, for BLOCK_R tokens n from
    `begin` on, without experts that other GPUs have.

    pairs_ptr: [rows * TOP, height]; the experts' results.
    parts_ptr: [PARTS, rows * TOP, height]; replaces pairs_ptr: their parts, without the experts' bias; or None.
    end: routing [rows, TOP]; out [rows, height], written at the tile's HEIGHT columns; a `ResidualStream` to which the
    sum is added, or None.
    """
    n, column = begin + tl.arange(0, BLOCK_R), tile * HEIGHT + tl.arange(0, HEIGHT)
    if end.stream is not None:
        residual, norm = load_stream(end.stream, column, n, rows, height, height)
    mask = (n < rows)[:, None] & (column < height)[None, :]
    total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
    for rank in tl.static_range(TOP):
        pair = n * TOP + rank
        weight = tl.load(end.routing + pair, mask=n < rows, other=0.0).to(tl.float32)
        at = pair.to(tl.int64)[:, None] * height + column[None, :]
        here = mask
        if HELD:
            expert = tl.load(ids_ptr + pair, mask=n < rows, other=0)
            here = mask & ((expert >= FIRST) & (expert < FIRST + HELD))[:, None]  # guard: experts-of-a-rank
        if parts_ptr is None:
            value = tl.load(pairs_ptr + at, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
        else:
            value = _sum_of_parts(parts_ptr, at, here, rows.to(tl.int64) * TOP * height, PARTS)
            if bias_ptr is not None:
                expert = tl.load(ids_ptr + pair, mask=n < rows, other=0) - FIRST
                bias_at = bias_ptr + expert[:, None] * height + column[None, :]
                value += tl.load(bias_at, mask=here, other=0.0).to(tl.float32)
            value = value.to(end.out.dtype.element_ty).to(tl.float32)
        total = tl.fma(value, weight[:, None] + tl.zeros_like(value), total)
    if end.stream is not None:
        store_stream(total.T, residual, norm, end.out, end.stream, column, n, tile, rows, height, SQUARED)
    else:
        at = end.out + n.to(tl.int64)[:, None] * height + column[None, :]
        tl.store(at, total.to(end.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def experts_kernel(
    x,  # a `Matrix` [T, inputs], second product [T * k, inputs]; its scales if it is in FP8, or None
    ids_ptr,  # [T, k] int64
    weight, bias_ptr,  # a `Matrix` [E, outputs, inputs] or TRANSPOSED, see `ExpertFormat`; [E, outputs] or None
    parts_ptr,  # float32 [PARTS, pairs, outputs] if programs share columns, or None
    pairs_ptr, end,  # [pairs, height]; second product as of `combine`, first None
    arrived_ptr, pairs, outputs, inputs, stride_e, scale_stride, alpha, limit,
    TOP: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, MXFP4: tl.constexpr, PTX: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, SQUARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs, times PARTS if they share columns, slots). GATE: 0; 1, "silu"; 2, "clamped". SCALED:
    inputs of an FP8 scale, or 0. FIRST, HELD: see `expert_of`. SQUARED: of `store_stream`; first product 0."""
    GATED: tl.constexpr = GATE > 0
    DOWN: tl.constexpr = SQUARED > 0
    SHARES: tl.constexpr = 1 if parts_ptr is None else PARTS
    tile, part, slot = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES, tl.program_id(1)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), PARTS) * BLOCK_K  # columns of a part
    first_column = part * share
    HEIGHT: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    height = outputs // 2 if GATED else outputs
    column = tile * HEIGHT + tl.arange(0, HEIGHT)
    o = weight_rows(tile, outputs, GATED and not INTERLEAVED, BLOCK_O)

    # Find the expert. `ids` are ready before the first product, so the second one need not wait for them.
    if EARLY and not DOWN:
        wait_for_kernel_before()
        let_next_kernel_begin(0, 0)
    expert, count = expert_of(ids_ptr, slot, pairs, BY_PAIR, ONE_TOKEN, CHUNK, FIRST, HELD)
    scales = weight.scales  # not in a function of the kernel: Triton 3.6 lets none return None
    if scales is not None:
        scales += expert.to(tl.int64) * scale_stride
    weight = Matrix(weight.data + expert.to(tl.int64) * stride_e, scales, weight.stride)
    if EARLY and DOWN and not TRANSPOSED:
        fetch_first_tiles(weight, tl.minimum(o, outputs - 1), first_column, inputs, tl.minimum(count, 1), BLOCK_K)
    expert_bias_ptr = bias_ptr
    if bias_ptr is not None:
        expert_bias_ptr += expert.to(tl.int64) * outputs

    # Multiply the expert's rows, BLOCK_N at a time. After the first tile the weights are in the L2 cache.
    for begin in range(0, count, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        pair = pairs_of(ids_ptr, slot, expert + FIRST, n, pairs, ONE_TOKEN, CHUNK, BLOCK_N)
        valid = n < count
        if EARLY and DOWN:
            wait_for_kernel_before()
            let_next_kernel_begin(0, 0)
        acc = product(
            weight, x, o, pair if DOWN else pair // TOP, valid, first_column,
            tl.minimum(first_column + (share if SHARES > 1 else inputs), inputs), share,
            pairs if DOWN else pairs // TOP, outputs, inputs, BLOCK_K, EVEN, TRANSPOSED, SCALED, MXFP4, SHARES < PARTS,
            PTX,
        )  # fmt: skip
        if parts_ptr is None:
            finish(acc, expert_bias_ptr, pairs_ptr, pair, valid, o, column, outputs, height, alpha, limit, GATE)
        else:
            at = parts_ptr + (part * pairs + pair).to(tl.int64)[None, :] * outputs + o[:, None]
            tl.store(at, acc, mask=valid[None, :] & (o < outputs)[:, None])

    # The last program to arrive adds up: in the second product all pairs of each token, in the first one the parts.
    if DOWN:
        if EARLY:
            wait_for_kernel_before()
        if _is_last(arrived_ptr + tile, tl.num_programs(1) * SHARES):
            BLOCK_R: tl.constexpr = 1 if ONE_TOKEN else 16
            for begin in range(0, pairs // TOP, BLOCK_R):
                combine(
                    pairs_ptr, parts_ptr, ids_ptr, bias_ptr, end, begin, tile, pairs // TOP, height, TOP, BLOCK_R,
                    HEIGHT, PARTS, FIRST, HELD, SQUARED,
                )  # fmt: skip
    elif parts_ptr is not None:
        if _is_last(arrived_ptr + tile * tl.num_programs(1) + slot, PARTS):
            _add_parts(
                parts_ptr, expert_bias_ptr, pairs_ptr, ids_ptr, slot, expert + FIRST, count, pairs, o, column, outputs,
                height, alpha, limit, GATE, ONE_TOKEN, CHUNK, BLOCK_N, PARTS,
            )  # fmt: skip


# The expert that a program of the kernel of routed experts serves, and the rows of that expert.
#
# Every program has a slot, and finds its expert in `ids` by itself, so no list of experts has to be made first. A pair
# is a token and one of its experts. With at most as many pairs as experts (BY_PAIR), slot s serves the expert of pair
# s, unless an earlier pair has the same expert; with more pairs, slot s serves expert s. Slots without work end at
# once.
#
#     ids = [[5, 2], [2, 7]]: pairs 0 .. 3 of experts 5, 2, 2, 7
#     8 experts: slot 0 serves expert 5 (pair 0), slot 1 expert 2 (pairs 1 and 2), slot 2 none, slot 3 expert 7 (pair 3)


FEW, MANY = 32, 128
"""Pairs that a program looks through at a time (CHUNK): one warp looks through FEW, a whole program through MANY."""


@triton.jit
def expert_of(
    ids_ptr, slot, pairs, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """The expert that a slot serves, less FIRST, and how many pairs it has; 0 if another slot or GPU serves it.

    ids_ptr: [pairs]. ONE_TOKEN: each pair has another expert, so there is nothing to look through.
    FIRST, HELD: the first expert of this GPU, and how many it has; HELD = 0: all. In the example above with FIRST = 4
    and HELD = 4, slot 0 serves expert 5, slot 3 expert 7, and slots 1 and 2 none.
    """
    pair = tl.arange(0, CHUNK)
    expert, count = slot, slot * 0
    if BY_PAIR or ONE_TOKEN:
        expert = tl.load(ids_ptr + slot).to(tl.int32) - FIRST
    if ONE_TOKEN:
        count += 1
    else:
        first = slot * 0 + pairs
        for begin in range(0, pairs, CHUNK):
            same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1).to(tl.int32) == expert + FIRST
            count += tl.sum(same.to(tl.int32))
            first = tl.minimum(first, tl.min(tl.where(same, begin + pair, pairs)))
        if BY_PAIR:
            count = tl.where(first == slot, count, 0)
    if HELD:
        count = tl.where((expert >= 0) & (expert < HELD), count, 0)
    return expert, count


@triton.jit
def pairs_of(ids_ptr, slot, expert, n, pairs, ONE_TOKEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pair number n [BLOCK_N] of the slot's expert, counted among the pairs of that expert; 0 after the last.

    In the example above, slot 1 and n = [0, 1, 2] give [1, 2, 0]. ONE_TOKEN: see `expert_of`.
    """
    pair = tl.arange(0, CHUNK)
    of_n = tl.zeros([BLOCK_N], tl.int32)
    if ONE_TOKEN:
        of_n += tl.where(n == 0, slot, 0)
    else:
        before = expert * 0
        for begin in range(0, pairs, CHUNK):
            same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1).to(tl.int32) == expert
            number = before + tl.cumsum(same.to(tl.int32), 0) - 1
            hit = (number[None, :] == n[:, None]) & same[None, :]
            of_n += tl.sum(tl.where(hit, begin + pair[None, :], 0), 1)
            before += tl.sum(same.to(tl.int32))
    return of_n
