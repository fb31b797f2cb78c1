"""Functions inside kernels: instructions of Hopper, sums in pairs, rounding, loads of tiles. They need Triton."""

import triton
import triton.language as tl


@triton.jit
def wait_for_kernel_before():
    """Wait until the kernel before this one is done -> 0. A load that must come later adds this to its address."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def let_next_kernel_begin(left, late):
    """Let the next kernel begin if left <= late."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.le.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.u32 $0, 0;}",
        "=r,r,r",
        [left, late],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finished(sums):
    """sums, float32, once the tensor cores have finished them.

    A loop whose next step only adds to them does not wait. Where the tensor cores read one operand from registers,
    Triton 3.6 then writes the next step's numbers into registers that they may still read: sums change now and then.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch_l2(address):
    """Fetch the line of the L2 cache at each address, an int64."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def nanoseconds():
    """The GPU's clock, int64."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def trap():
    """End the kernel with an error, after the host can see what this thread has stored."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


# Sums in pairs, whose order of additions does not depend on how numbers are distributed over threads.
#
#     [a, b, c, d] -> [a + b, c + d] -> (a + b) + (c + d)
#
# Sizes are powers of two up to 4096. A sum of squares of 16-bit numbers is the same with and without fused
# multiply-adds, because such squares are exact in float32.


@triton.jit
def sum_in_pairs(x, R: tl.constexpr, SIZE: tl.constexpr):
    """x [R, SIZE] -> [R]."""
    for halving in tl.static_range(1, 13):
        if SIZE >> halving > 0:
            x = tl.sum(tl.reshape(x, [R, SIZE >> halving, 2]), 2)
    return tl.reshape(x, [R])


@triton.jit
def sum_rows_in_pairs(x, GROUPS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """x [GROUPS * SIZE, N] -> [GROUPS, N], sums of SIZE rows each."""
    for halving in tl.static_range(1, 13):
        if SIZE >> halving > 0:
            x = tl.sum(tl.reshape(x, [GROUPS * (SIZE >> halving), 2, N]), 1)
    return tl.reshape(x, [GROUPS, N])


# Rounding in kernels, as the ops round.


@triton.jit
def rounded(x):
    """The nearest integers, ties to even, of float32 from 0 to 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


LARGEST_FP8: tl.constexpr = tl.constexpr(448.0)
"""The largest number of float8_e4m3fn."""


@triton.jit
def nearest_fp8(x):
    """The nearest number of float8_e4m3fn to each x, as float32: ties to even, at most the largest.

    0.3 gives 0.3125, and 1000.0 gives 448.0. Triton's own conversion rounds otherwise in the interpreter.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (tl.abs(x) + 24576.0) - 24576.0  # steps of 2 ** -9 from here on
    value = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, normal), LARGEST_FP8)
    return (value.to(tl.int32, bitcast=True) | (bits ^ size)).to(tl.float32, bitcast=True)


@triton.jit
def over_scale(x):
    """`ops.over_scale` of x [R, D] -> float32 [R, D], scales [R, 1]."""
    wide = x.to(tl.float32)
    unit = tl.div_rn(tl.max(tl.abs(wide), 1), tl.full([x.shape[0]], LARGEST_FP8, tl.float32))
    unit = tl.where(unit > 0, unit, 1.0)[:, None]
    return tl.div_rn(wide, unit + tl.zeros_like(wide)), unit


@triton.jit
def as_stored(x, cache_ptr):
    """`ops.stored`: x in the dtype of the cache."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = nearest_fp8(x.to(tl.float32))
    return x.to(dtype)


# Slots in pages: slot s of a row is slot s % PAGE of page table[s // PAGE] of a pool [P, KV_HEADS, PAGE, D]. A place is
# the number of a slot of head 0 in the pool [P * KV_HEADS * PAGE, D].


@triton.jit
def page_of(table_ptr, slot, end, PAGE: tl.constexpr):
    """The page of a slot of the row with this table, or of the last slot below `end` if that comes first."""
    return tl.load(table_ptr + tl.maximum(tl.minimum(slot, end - 1), 0) // PAGE)


@triton.jit
def page_ahead(page, slot, KV_HEADS, PAGE):
    """The place of a slot of a row, which lies in `page`, less the slot; the same for all slots of the page.

    KV_HEADS = 2, PAGE = 64: slot 96 in page 5 has the place 5 * 128 + 32 = 672, which is 576 ahead.
    """
    return page.to(tl.int64) * (KV_HEADS * PAGE) - slot // PAGE * PAGE


@triton.jit
def place_of(table_ptr, slot, stored, KV_HEADS, PAGE):
    """The places of slots of the row with this table. stored: False for slots that the row lacks."""
    return slot + page_ahead(tl.load(table_ptr + slot // PAGE, mask=stored, other=0), slot, KV_HEADS, PAGE)


@triton.jit
def as_read(x, scales_ptr, slot, mask, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """`ops.as_read` of x [C, D] from the slots `slot` [C] of a KV head.

    scales_ptr: [S, 2] of that head, or None. mask [C, 1]: True for slots that exist; None: all. NUMBER: 0 for keys, 1
    for values.
    """
    if scales_ptr is not None:
        scale_at = scales_ptr + slot[:, None] * 2 + NUMBER
        if mask is None:
            unit = tl.load(scale_at)
        else:
            unit = tl.load(scale_at, mask=mask, other=0.0)
        return (x.to(tl.float32) * unit).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def scaled(x, weight, offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """The end of `rms_norm`: x, already divided by its root mean square, times the weight."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)


# Loads of the tiles that a step of a product multiplies.


@triton.jit
def addresses(pointer, row, stride, k):
    """The addresses [R, K] of the columns k [K] of rows [R] of a matrix."""
    return pointer + row.to(tl.int64)[:, None] * stride + k[None, :]


@triton.jit
def load_rows(x_at, start, k, valid, inputs, EVEN: tl.constexpr):
    """Activations [BLOCK_N, BLOCK_K] in the columns start + k of some rows, 0 after the last column.

    x_at: `addresses` of the first columns. valid [BLOCK_N]: False for rows that do not exist, which are 0. EVEN: no
    tile reaches beyond the inputs.
    """
    mask = valid[:, None]
    if not EVEN:
        mask = mask & (k < inputs - start)[None, :]
    return tl.load(x_at + start, mask=mask, other=0.0)


@triton.jit
def load_tile(w_at, x_at, start, k, valid, inputs, EVEN: tl.constexpr):
    """Weights [BLOCK_O, BLOCK_K], which are read once, and `load_rows` of the same columns."""
    if EVEN:
        a = tl.load(w_at + start, eviction_policy="evict_first")
    else:
        a = tl.load(w_at + start, mask=(k < inputs - start)[None, :], other=0.0, eviction_policy="evict_first")
    return a, load_rows(x_at, start, k, valid, inputs, EVEN)
