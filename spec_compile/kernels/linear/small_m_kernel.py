"""The kernel of the form "small_m": a product that takes about as long as reading the weights from memory.

    out[n, o] = sum over k of x[n, k] * weight[o, k]

**A row's result has the same bits however many rows there are.** Every row goes through the same instructions of the
tensor cores, which add its products up in one chain along the columns of the weights (`quantised_kernel` has others).
If several programs share that chain, the shape of the weights decides at which columns it is cut, and the parts are
added in ascending order: 1000 columns in 2 parts are cut at 512, because cuts are multiples of 256.

The kernel loses little time at its beginning and end:

- Programs begin while the kernel before them still runs (see `dependent_launch`), and fetch a few of their first
  weights to the L2 cache before they wait for it (to fetch more, or in bulk, made whole rounds slower). A kernel
  launched the same way after this one begins no earlier than when all that came before this one is done.
- The steps around a product in a decoder layer are done while its sums are in registers: the RMSNorm of x before it
  (`before`), the gate of an MLP, the addition to the residual stream with the first half of the next norm (`stream`),
  or the norms, the rotation and the append of queries, keys and values (`heads`). A part of a sum over ranks is sent to
  all of them (`sent`).

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..all_reduce_kernel import send, slot_of_turn
from ..ptx import let_next_kernel_begin, prefetch_l2, wait_for_kernel_before
from .append_kernel import load_for_heads, store_heads
from .load_tile import addresses, load_tile
from .product_end import inverse_rms, load_bias, load_squares, load_stream, scale_rows, store, store_stream
from .quantised_kernel import multiply_quantised


@triton.jit
def _share_of_program(inputs, CUT: tl.constexpr, PARTS: tl.constexpr):
    """The number of the program's tile, its part of the columns, and these columns begin .. end, cut at multiples of
    CUT."""
    tile, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    cuts = tl.cdiv(inputs, CUT)
    return tile, part, part * cuts // PARTS * CUT, tl.minimum((part + 1) * cuts // PARTS * CUT, inputs)


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
def _fetch_first_tiles(weight, o, begin, end, prefetch, BLOCK_K: tl.constexpr):
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
    weight, x, o, n, begin, end, rows, inputs, late,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The columns begin .. end -> sums [BLOCK_O, BLOCK_N], in one chain. EVEN: no tile reaches beyond the inputs."""
    k = tl.arange(0, BLOCK_K)
    w_at, x_at = addresses(weight.data, o, weight.stride, k), addresses(x.data, n, x.stride, k)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if PDL:
            let_next_kernel_begin((end - start + BLOCK_K - 1) // BLOCK_K, late)
        a, b = load_tile(w_at, x_at, start, k, n, rows, inputs, EVEN)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _store_part(acc, shared, tile, part, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, PARTS: tl.constexpr):
    """Store the program's part of a tile -> where the first part is, the tile's counter, and whether all have arrived.
    partial [tiles, PARTS, BLOCK_N, BLOCK_O]: as what an end adds, columns of out lie side by side; arrived [tiles]."""
    SIZE: tl.constexpr = BLOCK_O * BLOCK_N
    partial_ptr, arrived_ptr = shared
    number = tl.program_id(0) * (tl.num_programs(1) // PARTS) + tile
    at = partial_ptr + number.to(tl.int64) * (PARTS * SIZE)
    at += tl.arange(0, BLOCK_O)[:, None] + tl.arange(0, BLOCK_N)[None, :] * BLOCK_O
    tl.store(at + part * SIZE, acc)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    return at, arrived_ptr + number, tl.atomic_add(arrived_ptr + number, 1, sem="acq_rel") == PARTS - 1


@triton.jit
def _sum_of_parts(at, counter, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, PARTS: tl.constexpr):
    """The sum of all parts of a tile [BLOCK_O, BLOCK_N]. counter: 0 again, as before the first one arrived."""
    acc = tl.load(at, cache_modifier=".cg")
    for other in tl.static_range(1, PARTS):
        acc += tl.load(at + other * (BLOCK_O * BLOCK_N), cache_modifier=".cg")
    tl.store(counter, 0)
    return acc


@triton.jit
def _send(value, peers, slot, column, n, rows, height, rank, RANKS: tl.constexpr, SHOTS: tl.constexpr):
    """value [HEIGHT, BLOCK_N] to the ranks that sum it, as a part [rows, height] of their sum."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    send(value, peers, slot, n[None, :].to(tl.int64) * height + column[:, None], mask, rank, RANKS, SHOTS, True)


@triton.jit(do_not_specialize=["rows", "late", "prefetch", "nodes", "rank"])
def small_m_kernel(
    x, weight, bias_ptr, out_ptr, shared, before, stream, heads, sent, rank, rows, outputs, inputs, stride_r, nodes,
    capacity, late, prefetch, RANKS: tl.constexpr, SHOTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr, TERMS: tl.constexpr,
    SQUARED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T, and what stands around it. Grid (tiles of x's rows, tiles of the weights' rows * PARTS):
    programs that read the same weights begin together."""
    # This program's tile [BLOCK_O, BLOCK_N], and its part of the columns: begin .. end.
    tile, part, begin, end = _share_of_program(inputs, CUT, PARTS)
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
        _fetch_first_tiles(weight, o, begin, end, prefetch, BLOCK_K)
        wait_for_kernel_before()
    if RANKS > 1:
        peers, state_ptr, words = sent
        slot = slot_of_turn(state_ptr, rank, words, RANKS)
    if EAGER and before is not None:
        squares = load_squares(before.squares, n, rows, TERMS)
    if EAGER and stream is not None:
        residual, norm = load_stream(stream, column, n, rows, height, stride_r)
    if EAGER and APPENDS:
        loaded = load_for_heads(heads, column, n, rows, nodes, HEADS, KV_HEADS, D)
    if FORMAT is None:
        acc = _multiply(weight, x, o, n, begin, end, rows, inputs, late, BLOCK_N, BLOCK_O, BLOCK_K, EVEN, PDL)
    else:
        acc = multiply_quantised(
            weight, x, o, n, begin, end, rows, outputs, inputs, late, FORMAT, GROUP, TABLE, BLOCK_N, BLOCK_O, BLOCK_K,
            EVEN, UNROLL, PDL, PTX,
        )  # fmt: skip

    done = True
    if PARTS > 1:
        at, counter, done = _store_part(acc, shared, tile, part, BLOCK_N, BLOCK_O, PARTS)
    # The steps after the product, with the sums in registers. Where programs share the columns, the last one does them.
    if done:
        if not EAGER and before is not None:
            squares = load_squares(before.squares, n, rows, TERMS)
        if not EAGER and stream is not None:
            residual, norm = load_stream(stream, column, n, rows, height, stride_r)
        if not EAGER and APPENDS:
            loaded = load_for_heads(heads, column, n, rows, nodes, HEADS, KV_HEADS, D)
        if PARTS > 1:
            acc = _sum_of_parts(at, counter, BLOCK_N, BLOCK_O, PARTS)
        if before is not None:
            acc = scale_rows(acc, inverse_rms(squares, inputs, before.eps), load_bias(bias_ptr, o))
        elif bias_ptr is not None:
            acc += load_bias(bias_ptr, o)[:, None]
        if PAIRED:
            first, second = acc.reshape(HEIGHT, 2, BLOCK_N).permute(0, 2, 1).split()
        if APPENDS:
            store_heads(
                first, second, loaded, out_ptr, heads, column, n, rows, nodes, capacity, HEADS, KV_HEADS, D, HEIGHT,
                BLOCK_N,
            )  # fmt: skip
        elif stream is not None:
            store_stream(acc, residual, norm, out_ptr, stream, column, n, tile, rows, height, BLOCK_N, HEIGHT, SQUARED)
        elif GATED:
            store(first / (1 + tl.exp(-first)) * second, out_ptr, column, n, rows, height)
        elif RANKS > 1:
            _send(acc, peers, slot, column, n, rows, height, rank, RANKS, SHOTS)
        else:
            store(acc, out_ptr, column, n, rows, height)
