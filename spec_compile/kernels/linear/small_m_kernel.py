"""The kernel of the form "small_m": a product that takes about as long as reading the weights from memory.

What a plain kernel loses at its beginning and end is kept small:

- The work, tiles of the weights, is dealt to the programs in equal runs that may begin and end anywhere ("stream-K").
  A row of tiles of several programs is summed by the last of them to arrive, in a fixed order: results do not vary.
- Programs begin while the kernel before them still runs (see `dependent_launch`). The form for single rows, without
  tensor cores, fills its pipeline with weights before it waits for the activations; the other fetches a few of its
  first weights to the L2 cache (to fetch more, or in bulk, made whole rounds slower). A kernel launched the same way
  after this one begins no earlier than when all that came before this one is done.

Import this module only where Triton is installed. Shapes of a tile: weights [BLOCK_O, BLOCK_K], activations
[BLOCK_N, BLOCK_K], sums [BLOCK_O, BLOCK_N].
"""

import triton
import triton.language as tl

from ..ptx import let_next_kernel_begin, prefetch_l2, wait_for_kernel_before


@triton.jit
def _first_tile(program, share, more):
    """Where the run of a program begins in the list of all tiles."""
    return program * share + tl.minimum(program, more)


@triton.jit
def _program_of(tile, share, more):
    """Which program has a tile."""
    longer = more * (share + 1)  # tiles of the programs that have one more
    return tl.where(tile < longer, tile // (share + 1), more + (tile - longer) // share)


@triton.jit
def _fetch_first_tiles(
    weight_ptr, row, begin, end, steps, outputs, inputs, prefetch, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Fetch at most `prefetch` of a program's first tiles, all of one row of tiles, to the L2 cache."""
    o = tl.minimum(begin // steps * HEIGHT + row, outputs - 1)
    line = tl.arange(0, BLOCK_K // 64 if BLOCK_K > 64 else 1) * 64  # of 128 bytes
    lines = weight_ptr + o.to(tl.int64)[:, None] * inputs + begin % steps * BLOCK_K + line[None, :]
    for step in range(0, tl.minimum(tl.minimum(steps - begin % steps, end - begin), prefetch)):
        prefetch_l2((lines + step * BLOCK_K).to(tl.int64))


@triton.jit
def _multiply_on_tensor_cores(
    w_at, x_at, n, k, first_step, last_step, left, rows, inputs, late,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles first_step .. last_step of a row of tiles -> sums [BLOCK_O, BLOCK_N]. left: tiles the program has yet."""
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for step in tl.range(first_step, last_step):
        if PDL:
            let_next_kernel_begin(left - (step - first_step), late)
        inside = (k < inputs - step * BLOCK_K)[None, :]
        a = tl.load(w_at + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
        b = tl.load(x_at + step * BLOCK_K, mask=(n < rows)[:, None] & inside, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _multiply_on_cuda_cores(
    w_at, x_at, n, k, first_step, last_step, left, rows, inputs, late, dtype: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_multiply_on_tensor_cores` without them, for BLOCK_N <= 4.

    The pipeline's first loads are issued before the loop, and only those of the weights may come before the wait: x of
    the next step goes to registers. Step -1 loads no weights.
    """
    b = tl.zeros([BLOCK_N, BLOCK_K], dtype)
    if BLOCK_N == 1:
        sums = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_O, BLOCK_K], tl.float32)
    for step in tl.range(first_step - 1, last_step, num_stages=STAGES):
        ahead = (step + 1) * BLOCK_K
        if PDL:
            ahead += wait_for_kernel_before()
            let_next_kernel_begin(left - (step - first_step), late)
        ahead = tl.multiple_of(ahead, 16)
        b_rows = tl.where(step + 1 < last_step, rows, 0)
        inside = (k < inputs - ahead)[None, :]
        b_next = tl.load(x_at + ahead, mask=(n < b_rows)[:, None] & inside, other=0.0)
        inside = (k < tl.where(step >= first_step, inputs - step * BLOCK_K, 0))[None, :]
        a = tl.load(w_at + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
        if BLOCK_N == 1:
            sums += a.to(tl.float32) * b.to(tl.float32)
        else:
            sums += a.to(tl.float32)[None, :, :] * b.to(tl.float32)[:, None, :]
        b = b_next
    if BLOCK_N == 1:
        acc = tl.sum(sums, 1)[:, None]
    else:
        acc = tl.sum(sums, 2).T
    return acc


@triton.jit
def _sum_of_programs(
    acc, partial_ptr, arrived_ptr, program, tile, steps, share, more, r, n,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the program's part of a row of tiles -> the sum of all parts [BLOCK_O, BLOCK_N], and whether it is valid:
    only the last program to arrive has it."""
    start = tile * steps
    first, last = _program_of(start, share, more), _program_of(start + steps - 1, share, more)
    at = r[:, None] * BLOCK_N + n[None, :]
    slot = 2 * program + (_first_tile(program, share, more) < start)
    tl.store(partial_ptr + slot.to(tl.int64) * (BLOCK_O * BLOCK_N) + at, acc)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    done = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == last - first
    if done:
        acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
        for group in tl.static_range(0, PARTS, GROUP):
            p = first + group + tl.arange(0, GROUP)
            slots = (2 * p + (_first_tile(p, share, more) < start)).to(tl.int64)
            parts = tl.load(
                partial_ptr + slots[:, None, None] * (BLOCK_O * BLOCK_N) + at[None, :, :],
                mask=(p <= last)[:, None, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.sum(parts, 0)
        tl.store(arrived_ptr + tile, 0)
    return acc, done


@triton.jit
def _store_out(
    acc, bias_ptr, out_ptr, o, n, tile, rows, height,
    BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_O, BLOCK_N], with the bias, to out [rows, height]; gated: silu(gate) * up of rows that alternate."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o).to(tl.float32)[:, None]
    if GATED:
        gate, up = acc.reshape(HEIGHT, 2, BLOCK_N).permute(0, 2, 1).split()
        value = gate / (1 + tl.exp(-gate)) * up
    else:
        value = acc
    column = tile * HEIGHT + tl.arange(0, HEIGHT)
    tl.store(
        out_ptr + n[None, :].to(tl.int64) * height + column[:, None],
        value.to(out_ptr.dtype.element_ty),
        mask=(column < height)[:, None] & (n < rows)[None, :],
    )


@triton.jit(do_not_specialize=["rows", "share", "more", "late", "prefetch"])
def small_m_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, rows, outputs, inputs, stride_x,
    share, more, late, prefetch,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p takes `share` tiles, one more if p < `more`, of the list of all tiles, row by row.

    `partial` holds two tiles a program, fp32: its part of the row of tiles it begins in, and of the one it ends in.
    `arrived`, zeros, counts the programs done with a row of tiles; it is zeros again at the end.
    """
    # The run of this program: tiles begin .. end.
    program = tl.program_id(0)
    steps = tl.cdiv(inputs, BLOCK_K)
    begin = _first_tile(program, share, more)
    end = begin + share + (program < more)

    # Rows of the weights in a tile [BLOCK_O]; HEIGHT columns of out come of them.
    r = tl.arange(0, BLOCK_O)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if GATED:  # rows of the gate and of the up projection alternate
        row = r // 2 + (r % 2) * (outputs // 2)
        HEIGHT: tl.constexpr = BLOCK_O // 2
        height = outputs // 2
    else:
        row = r
        HEIGHT: tl.constexpr = BLOCK_O
        height = outputs

    if DOT and PDL:
        _fetch_first_tiles(weight_ptr, row, begin, end, steps, outputs, inputs, prefetch, HEIGHT, BLOCK_K)
        wait_for_kernel_before()
    while begin < end:
        # One row of tiles, as far as this program has it: acc [BLOCK_O, BLOCK_N].
        tile = begin // steps
        first_step = begin % steps
        last_step = tl.minimum(steps, first_step + end - begin)
        o = tl.minimum(tile * HEIGHT + row, outputs - 1)
        w_at = weight_ptr + o.to(tl.int64)[:, None] * inputs + k[None, :]
        x_at = x_ptr + n[:, None] * stride_x + k[None, :]
        if DOT:
            acc = _multiply_on_tensor_cores(
                w_at, x_at, n, k, first_step, last_step, end - begin, rows, inputs, late, BLOCK_N, BLOCK_O, BLOCK_K, PDL
            )
        else:
            acc = _multiply_on_cuda_cores(
                w_at, x_at, n, k, first_step, last_step, end - begin, rows, inputs, late, x_ptr.dtype.element_ty,
                BLOCK_N, BLOCK_O, BLOCK_K, STAGES, PDL,
            )  # fmt: skip

        # Where other programs have the rest of the row, the last to arrive adds all parts up.
        done = last_step - first_step == steps
        if PARTS > 1:
            if not done:
                acc, done = _sum_of_programs(
                    acc, partial_ptr, arrived_ptr, program, tile, steps, share, more, r, n,
                    BLOCK_N, BLOCK_O, PARTS, GROUP,
                )  # fmt: skip

        # The sums to out [rows, height].
        if done:
            _store_out(acc, bias_ptr, out_ptr, o, n, tile, rows, height, BLOCK_N, HEIGHT, GATED)
        begin += last_step - first_step
