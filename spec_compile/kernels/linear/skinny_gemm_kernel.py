"""The kernel of the form "skinny_gemm": a product that takes about as long as reading the weights from memory.

    out[n, o] = sum over k of x[n, k] * weight[o, k]

**A row's result has the same bits however many rows there are.** Every row goes through the same instructions of the
tensor cores, which add its products up in one chain along the columns of the weights (`quantised_kernel` has others).
If several programs share that chain, the shape of the weights decides at which columns it is cut, and the parts are
added in ascending order: 1000 columns in 2 parts are cut at 512, because cuts are multiples of 256. An even number of
parts of 4 bits is added in pairs, (0 + 1) + (2 + 3), so that a program may multiply a pair, and store only its sum.

The kernel loses little time at its beginning and end:

- Programs begin while the kernel before them still runs (see `launching`), and fetch a few of their first
  weights to the L2 cache before they wait for it (to fetch more, or in bulk, made whole rounds slower). A kernel
  launched the same way after this one begins no earlier than when all that came before this one is done.
- The steps around a product in a decoder layer are done while its sums are in registers: the RMSNorm of x before it
  (`before`), the gate of an MLP, the addition to the residual stream and the first half of the next norm (`to_stream`),
  or the norms, the rotation and the append of queries, keys and values (`heads`). A part of a sum over ranks is sent to
  all of them (`sent`).

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..all_reduce_kernel import send, slot_of_turn
from ..primitives import (
    addresses,
    as_stored,
    let_next_kernel_begin,
    load_tile,
    prefetch_l2,
    scaled,
    sum_in_pairs,
    sum_rows_in_pairs,
    wait_for_kernel_before,
)
from .quantised_kernel import multiply_quantised


@triton.jit
def _columns_of_part(part, inputs, CUT: tl.constexpr, PARTS: tl.constexpr):
    """The columns begin .. end of a part, cut at multiples of CUT."""
    cuts = tl.cdiv(inputs, CUT)
    return part * cuts // PARTS * CUT, tl.minimum((part + 1) * cuts // PARTS * CUT, inputs)


@triton.jit
def _weight_rows(tile, outputs, half, PAIRED: tl.constexpr, BLOCK_O: tl.constexpr):
    """Rows of the weights in a tile [BLOCK_O]. PAIRED: row d of each 2 * half and row d + half alternate."""
    r = tl.arange(0, BLOCK_O)
    if PAIRED:
        pair = tile * (BLOCK_O // 2) + r // 2
        return tl.minimum(pair + (pair // half + r % 2) * half, outputs - 1)
    else:
        return tl.minimum(tile * BLOCK_O + r, outputs - 1)


@triton.jit
def fetch_first_tiles(weight, o, begin, end, prefetch, BLOCK_K: tl.constexpr):
    """Fetch at most `prefetch` of a program's first tiles to the L2 cache. o [BLOCK_O]: its rows of the weights."""
    SIZE: tl.constexpr = weight.data.dtype.element_ty.primitive_bitwidth
    BITS: tl.constexpr = 4 if SIZE == 32 else SIZE
    LINES: tl.constexpr = BLOCK_K * BITS // 1024  # of 128 bytes
    line = tl.arange(0, LINES if LINES > 1 else 1) * (1024 // SIZE)
    lines = weight.data + o.to(tl.int64)[:, None] * weight.stride + begin * BITS // SIZE + line[None, :]
    for step in range(0, tl.minimum(tl.cdiv(end - begin, BLOCK_K), prefetch)):
        prefetch_l2((lines + step * (BLOCK_K * BITS // SIZE)).to(tl.int64))


@triton.jit
def _multiply(
    weight, x, o, n, begin, end, rows, inputs, late, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The columns begin .. end -> sums [BLOCK_O, BLOCK_N], in one chain. EVEN: no tile reaches beyond the inputs."""
    k = tl.arange(0, BLOCK_K)
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    acc = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if PDL:
            let_next_kernel_begin((end - start + BLOCK_K - 1) // BLOCK_K, late)
        a, b = load_tile(w_at, x_at, start, k, n < rows, inputs, EVEN)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _multiply_parts(
    weight, x, o, n, part, rows, outputs, inputs, late, FORMAT: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr, EVEN: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """TURNS parts of the columns from `part` on, pair by pair -> their sum [BLOCK_O, BLOCK_N]."""
    if TURNS == 1:
        begin, end = _columns_of_part(part, inputs, CUT, PARTS)
        acc = multiply_quantised(
            weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, BLOCK_K, EVEN, UNROLL, PDL,
            PTX,
        )  # fmt: skip
    else:
        acc = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
        for first in tl.range(part, part + TURNS, 2):
            pair = tl.zeros([o.shape[0], n.shape[0]], tl.float32)
            for each in tl.range(first, first + 2):
                begin, end = _columns_of_part(each, inputs, CUT, PARTS)
                pair += multiply_quantised(
                    weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, BLOCK_K, EVEN,
                    UNROLL, PDL, PTX,
                )  # fmt: skip
            acc += pair
    return acc


@triton.jit
def _store_part(acc, shared, tile, number, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, PROGRAMS: tl.constexpr):
    """Store the sums of program `number` of a tile -> where the first one's are, the tile's counter, and whether all
    have arrived. partial [tiles, PROGRAMS, BLOCK_N, BLOCK_O]: as what an end adds, columns of out lie side by side;
    arrived [tiles]."""
    SIZE: tl.constexpr = BLOCK_O * BLOCK_N
    partial_ptr, arrived_ptr = shared
    place = tl.program_id(0) * (tl.num_programs(1) // PROGRAMS) + tile
    at = partial_ptr + place.to(tl.int64) * (PROGRAMS * SIZE)
    at += tl.arange(0, BLOCK_O)[:, None] + tl.arange(0, BLOCK_N)[None, :] * BLOCK_O
    tl.store(at + number * SIZE, acc)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    return at, arrived_ptr + place, tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == PROGRAMS - 1


@triton.jit
def _sum_of_parts(
    at, counter, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, PROGRAMS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The sum of what a tile's programs have stored [BLOCK_O, BLOCK_N], PAIRS: of pairs. counter: 0 again, as before
    the first one arrived."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    acc = 0.0
    for first in tl.static_range(0, PROGRAMS, STEP):
        part = tl.load(at + first * (BLOCK_O * BLOCK_N), cache_modifier=".cg")
        if PAIRS:
            part += tl.load(at + (first + 1) * (BLOCK_O * BLOCK_N), cache_modifier=".cg")
        acc = part if first == 0 else acc + part
    tl.store(counter, 0)
    return acc


@triton.jit(do_not_specialize=["rows", "late", "prefetch", "nodes", "rank"])
def skinny_gemm_kernel(
    x, weight, bias_ptr, out_ptr, shared, before, to_stream, heads, sent, rank, rows, outputs, inputs, stride_r, nodes,
    capacity, late, prefetch, RANKS: tl.constexpr, SHOTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr,
    TERMS: tl.constexpr, SQUARED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T, and what stands around it. Grid (tiles of x's rows, tiles of the weights' rows * PROGRAMS):
    programs that read the same weights begin together."""
    # This program's tile [BLOCK_O, BLOCK_N], and the first of its TURNS parts of the columns: begin .. end.
    PROGRAMS: tl.constexpr = PARTS // TURNS  # that share the columns
    tile, number = tl.program_id(1) // PROGRAMS, tl.program_id(1) % PROGRAMS
    begin, end = _columns_of_part(number * TURNS, inputs, CUT, PARTS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)

    # Rows of the weights in the tile, o [BLOCK_O]; HEIGHT columns of out come of them.
    APPENDS: tl.constexpr = HEADS > 0
    PAIRED: tl.constexpr = GATED or APPENDS  # of the gate and the up projection, or of the halves of a head
    HEIGHT: tl.constexpr = BLOCK_O // 2 if PAIRED else BLOCK_O
    height = outputs // 2 if PAIRED else outputs
    o = _weight_rows(tile, outputs, D // 2 if APPENDS else height, PAIRED, BLOCK_O)
    column = tile * HEIGHT + tl.arange(0, HEIGHT)

    # The product of those columns, acc [BLOCK_O, BLOCK_N]. Inputs of its end are loaded first if registers hold them.
    EAGER: tl.constexpr = BLOCK_N <= (64 if FORMAT is None else 16) and BLOCK_O <= 128  # see `ProductTile.registers`
    if PDL:
        fetch_first_tiles(weight, o, begin, end, prefetch, BLOCK_K)
        wait_for_kernel_before()
    if RANKS > 1:
        peers, state_ptr, words = sent
        slot = slot_of_turn(state_ptr, rank, words, RANKS)
    if EAGER and before is not None:
        squares = load_squares(before.squares, n, rows, TERMS)
    if EAGER and to_stream is not None:
        residual, norm = load_stream(to_stream, column, n, rows, height, stride_r)
    if EAGER and APPENDS:
        loaded = load_for_heads(heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, PAGE, D)
    if FORMAT is None:
        acc = _multiply(weight, x, o, n, begin, end, rows, inputs, late, BLOCK_K, EVEN, PDL)
    else:
        acc = _multiply_parts(
            weight, x, o, n, number * TURNS, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, BLOCK_K, CUT, PARTS,
            TURNS, EVEN, UNROLL, PDL, PTX,
        )  # fmt: skip

    done = True
    if PROGRAMS > 1:
        at, counter, done = _store_part(acc, shared, tile, number, BLOCK_N, BLOCK_O, PROGRAMS)
    # The steps after the product, with the sums in registers. Where programs share the columns, the last one does them.
    if done:
        if not EAGER and before is not None:
            squares = load_squares(before.squares, n, rows, TERMS)
        if not EAGER and to_stream is not None:
            residual, norm = load_stream(to_stream, column, n, rows, height, stride_r)
        if not EAGER and APPENDS:
            loaded = load_for_heads(heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, PAGE, D)
        if PROGRAMS > 1:
            is_packed: tl.constexpr = weight.data.dtype.element_ty == tl.int32  # words of 4 bits
            acc = _sum_of_parts(at, counter, BLOCK_N, BLOCK_O, PROGRAMS, is_packed and PARTS % 2 == 0 and TURNS == 1)
        if before is not None:
            acc = scale_rows(acc, inverse_rms(squares, inputs, before.eps), load_bias(bias_ptr, o))
        elif bias_ptr is not None:
            acc += load_bias(bias_ptr, o)[:, None]
        if PAIRED:
            first, second = acc.reshape(HEIGHT, 2, BLOCK_N).permute(0, 2, 1).split()
        if APPENDS:
            store_heads(
                first, second, loaded, out_ptr, heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, PAGE, D
            )
        elif to_stream is not None:
            store_stream(acc, residual, norm, out_ptr, to_stream, column, n, tile, rows, height, SQUARED)
        elif GATED:
            store(first / (1 + tl.exp(-first)) * second, out_ptr, column, n, n < rows, height)
        elif RANKS > 1:
            mask = (column < height)[:, None] & (n < rows)[None, :]
            at = n[None, :].to(tl.int64) * height + column[:, None]
            send(acc, peers, slot, at, mask, rank, RANKS, SHOTS, True)
        else:
            store(acc, out_ptr, column, n, n < rows, height)


# The steps after a product, with its sums in registers, in `skinny_gemm_kernel` and `wide_kernel`.
#
# Shapes: HEIGHT columns of out, BLOCK_N rows of x.


@triton.jit
def inverse_rms(squares, inputs, eps):
    """1 / the root mean square of each row of x [BLOCK_N], from `load_squares`. The product and the sum are an explicit
    fma, because a compiler could fuse them in one kernel and not in another."""
    total = sum_in_pairs(squares, squares.shape[0], squares.shape[1])
    return tl.rsqrt(tl.fma(total, tl.zeros_like(total) + 1.0 / inputs, tl.zeros_like(total) + eps))


@triton.jit
def scale_rows(acc, scale, bias):
    """acc [HEIGHT, BLOCK_N] times scale [BLOCK_N], plus bias [HEIGHT]."""
    return tl.fma(acc, scale[None, :] + tl.zeros_like(acc), bias[:, None] + tl.zeros_like(acc))


@triton.jit
def load_bias(bias_ptr, o):
    """Zeros where there is no bias."""
    bias = tl.zeros(o.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + o).to(tl.float32)
    return bias


@triton.jit
def load_squares(squares_ptr, n, rows, TERMS: tl.constexpr):
    """Sums of the squares of the stream [rows, TERMS] -> of a tile's rows [BLOCK_N, TERMS], rounded up."""
    term = tl.arange(0, triton.next_power_of_2(TERMS))
    mask = (n < rows)[:, None] & (term < TERMS)[None, :]
    return tl.load(squares_ptr + n[:, None] * TERMS + term[None, :], mask=mask, other=0.0)


@triton.jit
def load_stream(stream, column, n, rows, height, stride_r):
    """The residual stream before the product [HEIGHT, BLOCK_N], and the weight of the norm after it [HEIGHT]."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    before = tl.load(stream.residual + n[None, :].to(tl.int64) * stride_r + column[:, None], mask=mask, other=0.0)
    return before, tl.load(stream.weight + column, mask=column < height, other=0.0)


@triton.jit
def store_stream(acc, residual, norm, out_ptr, stream, column, n, tile, rows, height, SQUARED: tl.constexpr):
    """The residual stream with the sums [HEIGHT, BLOCK_N] added, to out [rows, height], and the first half of the next
    RMSNorm: times its weight to scaled [rows, height], and each SQUARED columns' sum of squares to squares."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = (acc.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
    at = n[None, :].to(tl.int64) * height + column[:, None]
    tl.store(out_ptr + at, total, mask=mask)
    wide = tl.where(mask, total.to(tl.float32), 0.0)
    factor = norm.to(tl.float32) + stream.offset
    tl.store(stream.scaled + at, (wide * factor[:, None]).to(dtype), mask=mask)
    groups: tl.constexpr = acc.shape[0] // SQUARED
    sums = sum_rows_in_pairs(wide * wide, groups, SQUARED, acc.shape[1])
    group = tile * groups + tl.arange(0, groups)
    mask = (group * SQUARED < height)[:, None] & (n < rows)[None, :]
    tl.store(stream.squares + n[None, :] * tl.cdiv(height, SQUARED) + group[:, None], sums, mask=mask)


@triton.jit
def store(value, out_ptr, column, n, valid, height):
    """value [HEIGHT, BLOCK_N] to the columns [HEIGHT] of the rows n [BLOCK_N] of out [rows, height] that are valid."""
    mask = (column < height)[:, None] & valid[None, :]
    at = n[None, :].to(tl.int64) * height + column[:, None]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


# The end of the product "skinny_gemm" whose outputs are queries, keys and values: norms, rotation, append to the cache.
#
# The rotation of x, y, outputs d and d + D / 2 of a head, is x * cos - y * sin, y * cos + x * sin. A tile has PAIRS
# such pairs of N rows; x and y are [PAIRS, N]. Pair p is d = p % (D / 2) of head p // (D / 2): with D = 64, pair 70 is
# outputs 6 and 38 of head 2. Query heads come first, then key heads, then value heads. Numbers are rounded where
# `tree_attention` rounds them if it appends for itself.


@triton.jit
def load_for_heads(
    heads, pair, n, rows, nodes, capacity, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The inputs of `store_heads` besides the product: cos of x and of y, sin of x and of y [PAIRS, N], weights of
    their norms [PAIRS, 1], which mean nothing without norms, and the rows' slots and their pages [N]."""
    half: tl.constexpr = D // 2
    head, d = pair // half, pair % half
    mask = (head < HEADS + KV_HEADS)[:, None] & (n < rows)[None, :]
    at = n[None, :].to(tl.int64) * D + d[:, None]
    cos, next_cos = tl.load(heads.cos + at, mask=mask, other=0.0), tl.load(heads.cos + at + half, mask=mask, other=0.0)
    sin, next_sin = tl.load(heads.sin + at, mask=mask, other=0.0), tl.load(heads.sin + at + half, mask=mask, other=0.0)
    weight, next_weight = d[:, None], d[:, None]
    if heads.q_norm is not None:
        is_query = (head < HEADS)[:, None]
        weight = tl.where(is_query, tl.load(heads.q_norm + d)[:, None], tl.load(heads.k_norm + d)[:, None])
        d += half
        next_weight = tl.where(is_query, tl.load(heads.q_norm + d)[:, None], tl.load(heads.k_norm + d)[:, None])
    slot = tl.load(heads.lengths + n // nodes, mask=n < rows, other=0) + n % nodes
    page = slot  # means nothing without a table
    if heads.table is not None:
        stored = (n < rows) & (slot < capacity)
        page = tl.load(heads.table + n // nodes * (capacity // PAGE) + slot // PAGE, mask=stored, other=0)
    return cos, next_cos, sin, next_sin, weight, next_weight, slot, page


@triton.jit
def _inverse_rms(first, second, eps, D: tl.constexpr):
    """1 / the root mean square of each head -> [PAIRS, N]. The tile has whole heads."""
    half: tl.constexpr = D // 2
    N: tl.constexpr = first.shape[1]
    heads: tl.constexpr = first.shape[0] // half
    squares = sum_rows_in_pairs(first * first, heads, half, N) + sum_rows_in_pairs(second * second, heads, half, N)
    scale = tl.rsqrt(squares / D + eps)
    return tl.reshape(tl.broadcast_to(scale[:, None, :], [heads, half, N]), first.shape)


@triton.jit
def store_heads(
    first, second, loaded, out_ptr, heads, pair, n, rows, nodes, capacity, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Queries into out [rows, HEADS * D]; keys and values into the caches, node i of row b of the batch at slot
    lengths[b] + i, of the row's `capacity`. loaded: by `load_for_heads`. The caches are [B, KV_HEADS, capacity, D], or
    with a table [P, KV_HEADS, PAGE, D]."""
    half: tl.constexpr = D // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    head, d = pair // half, pair % half
    is_query, is_turned = head < HEADS, head < HEADS + KV_HEADS

    # Norm and rotate.
    cos, next_cos, sin, next_sin, weight, next_weight, slot, page = loaded
    x, y = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    a, b = x, y
    if heads.q_norm is not None:
        scale = _inverse_rms(x, y, heads.eps, D)
        a = scaled(x * scale, weight, heads.offset, dtype, heads.offset is None)
        b = scaled(y * scale, next_weight, heads.offset, dtype, heads.offset is None)
    turned = tl.fma(a, cos.to(tl.float32), -b * sin.to(tl.float32))
    next_turned = tl.fma(b, next_cos.to(tl.float32), a * next_sin.to(tl.float32))
    x = tl.where(is_turned[:, None], turned, x).to(dtype)
    y = tl.where(is_turned[:, None], next_turned, y).to(dtype)

    # Queries.
    inside = n < rows
    at = n[None, :].to(tl.int64) * (HEADS * D) + (head * D + d)[:, None]
    mask = is_query[:, None] & inside[None, :]
    tl.store(out_ptr + at, x, mask=mask)
    tl.store(out_ptr + at + half, y, mask=mask)

    # Keys, and values, whose heads follow the keys' heads.
    is_key, kv_head = is_turned & (head >= HEADS), (head - HEADS) % KV_HEADS
    stored = (inside & (slot < capacity))[None, :]
    if heads.table is None:
        page = n // nodes
    else:
        capacity, slot = PAGE, slot % PAGE
    at = (page.to(tl.int64) * KV_HEADS * capacity + slot)[None, :] * D
    at += (kv_head.to(tl.int64) * capacity * D + d)[:, None]
    mask = is_key[:, None] & stored
    tl.store(heads.key_cache + at, as_stored(x, heads.key_cache), mask=mask)
    tl.store(heads.key_cache + at + half, as_stored(y, heads.key_cache), mask=mask)
    mask = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None] & stored
    tl.store(heads.value_cache + at, as_stored(x, heads.value_cache), mask=mask)
    tl.store(heads.value_cache + at + half, as_stored(y, heads.value_cache), mask=mask)


# The product "skinny_gemm" of many rows, such as a prompt's: as fast as the tensor cores multiply.
#
# A program reads its tiles with descriptors (TMA on Hopper) and adds up all parts of the columns by itself, one after
# the other. So each row goes through the same instructions, and each part is added in the same order, as in
# `skinny_gemm_kernel`, and **a row's result has the same bits as among few rows**. A product whose outputs come in
# pairs, a gate's or the halves of a head, is two products of the same rows x.
#
# Shapes of a tile: weights [HEIGHT, BLOCK_K], activations [BLOCK_N, BLOCK_K], sums [HEIGHT, BLOCK_N].


@triton.jit
def _multiply_many(
    x, weight, row, o, distance, inputs,
    HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The products [HEIGHT, BLOCK_N] of the rows of x from `row` on with the weights' rows from `o` on and, PAIRED,
    with those from o + distance on (else 0)."""
    first, second = 0.0, 0.0
    for part in tl.static_range(PARTS):
        acc, other = tl.zeros([HEIGHT, BLOCK_N], tl.float32), 0.0
        if PAIRED:
            other = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
        begin, end = _columns_of_part(part, inputs, CUT, PARTS)
        for start in tl.range(begin, end, BLOCK_K):
            b = x.load([row, start]).T
            acc = tl.dot(weight.load([o, start]), b, acc)
            if PAIRED:
                other = tl.dot(weight.load([o + distance, start]), b, other)
        first, second = (acc, other) if part == 0 else (first + acc, second + other)
    return first, second


@triton.jit(do_not_specialize=["rows", "nodes"])
def wide_kernel(
    x, weight,  # descriptors of [rows, inputs] in blocks [BLOCK_N, BLOCK_K], [outputs, inputs] in [HEIGHT, BLOCK_K]
    bias_ptr, out_ptr, before, to_stream, heads, rows, outputs, inputs, stride_r, nodes, capacity,
    BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr,
    TERMS: tl.constexpr, SQUARED: tl.constexpr, GATED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr,
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
    first, second = _multiply_many(x, weight, row, o, distance, inputs, HEIGHT, BLOCK_N, BLOCK_K, CUT, PARTS, PAIRED)

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
        loaded = load_for_heads(heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, PAGE, D)
        store_heads(first, second, loaded, out_ptr, heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, PAGE, D)
    elif to_stream is not None:
        residual, norm = load_stream(to_stream, column, n, rows, height, stride_r)
        store_stream(first, residual, norm, out_ptr, to_stream, column, n, tile, rows, height, SQUARED)
    elif GATED:
        store(first / (1 + tl.exp(-first)) * second, out_ptr, column, n, n < rows, height)
    else:
        store(first, out_ptr, column, n, n < rows, height)
