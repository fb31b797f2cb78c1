"""The kernel that sums the parts of all ranks of one host, and does what a decoder layer wants of the sum.

There is one hop and no signal, because the data are the signal (Lamport's form, as in TensorRT-LLM's one-shot
all-reduce). Each rank has in its memory a slot for every rank, in which each word is `MISSING` until that rank has sent
it. A rank stores its part in its slot of every peer's memory, and polls its own memory until no word is missing. What
it has read it sets to `MISSING` again.

- **Two sets of slots take turns.** A peer may send for the next turn while this rank still reads. It sends for the turn
  after that only when it has this rank's part of the next turn, which this rank sends when the kernel that reads, and
  clears, is done. The turn is a number in device memory, because a captured graph does not know how often others ran.
- **All ranks have equal bits**, because each of them adds float32 parts in the order of the ranks and rounds once. What
  a number's sum is does not depend on where in a launch it stands, so the same row has the same bits in all launches.
- **A product can send for itself.** Then this kernel begins while the product still runs, and has nothing to wait for
  but words. What it reads that other kernels write, it reads from the L2 cache, and what it writes the product does not
  read.
- **No rank waits for ever.** When a part is missing for too long, the kernel writes whose, and traps.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .pairs import sum_in_pairs
from .ptx import nanoseconds, trap

MISSING = tl.constexpr(-1)
"""A word that nobody has sent. As a float32 it is a NaN that no arithmetic gives, because theirs is `NAN`."""
NAN = tl.constexpr(0x7FFFFFFF)
TURN, ARRIVED, LIMIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What the numbers of `state` are: the turn, the programs that have arrived, the nanoseconds that one waits."""


@triton.jit
def slot_of_turn(state_ptr, rank, words, RANKS: tl.constexpr):
    """How many words of slots come before this rank's in this turn."""
    return (tl.load(state_ptr + TURN, volatile=True) % 2 * RANKS + rank) * words


@triton.jit
def send(part, peers, slot, at, mask, rank, RANKS: tl.constexpr, TO_ITSELF: tl.constexpr):
    """Store this rank's numbers `part`, of any shape, at `at` of its slot in the memory of each peer; `slot` words come
    before it. TO_ITSELF: and in its own memory."""
    word = part.to(tl.float32).to(tl.int32, bitcast=True)
    word = tl.where(word == MISSING, NAN, word)
    for peer in tl.static_range(RANKS):
        if TO_ITSELF or peer != rank:
            slots = tl.multiple_of(peers[peer].to(tl.pointer_type(tl.int32)), 16)
            tl.store(slots + slot + at, word, mask=mask)


@triton.jit
def _move_turn_on(state_ptr, turn):
    """The last program to arrive begins the next turn. Before, all of them have read this one."""
    tl.debug_barrier()  # every thread has used the turn
    arrived = tl.atomic_add(state_ptr + ARRIVED, 1, sem="relaxed")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state_ptr + ARRIVED, 0)
        tl.store(state_ptr + TURN, turn + 1)


@triton.jit
def _receive(at, mask, state_ptr, late_ptr, peer, turn, ON_GPU: tl.constexpr):
    """Wait until no word at the addresses `at` [BLOCK] is missing -> them as float32. They are missing again then."""
    word = tl.load(at, mask=mask, other=0, volatile=True)
    if ON_GPU:
        begin = nanoseconds()
    while tl.max((word == MISSING).to(tl.int32), 0) != 0:
        if ON_GPU:
            if nanoseconds() - begin > tl.load(state_ptr + LIMIT):
                tl.store(late_ptr + 1, turn)
                tl.store(late_ptr, peer + 1)
                trap()
        word = tl.load(at, mask=mask, other=0, volatile=True)
    tl.store(at, tl.full(word.shape, MISSING, tl.int32), mask=mask)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_ranks(
    part_ptr, slots_ptr, state_ptr, late_ptr, slots, at, mask, rank, turn, words, RANKS: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """The parts of all ranks at `at` [BLOCK], added in their order -> float32. slots: the words before this turn's."""
    total = tl.zeros(at.shape, tl.float32)
    if part_ptr is not None:
        total = tl.load(part_ptr + at, mask=mask, other=0.0).to(tl.float32)
    part = total
    for other in tl.static_range(RANKS):
        value = part
        if RANKS > 1:
            if part_ptr is None or other != rank:
                slot = slots_ptr + slots + other * words
                value = _receive(slot + at, mask, state_ptr, late_ptr, other, turn, ON_GPU)
        if other == 0:
            total = value
        else:
            total += value
    return total


@triton.jit(do_not_specialize=["rank", "rows"])
def all_reduce_kernel(
    part_ptr, slots_ptr, peers, state_ptr, late_ptr, residual_ptr, norm_ptr, out_ptr, scaled_ptr, squares_ptr,
    rank, rows, size, stride_r, offset, words,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, SQUARED: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The sum of the ranks' parts [rows, size] to out; with a residual what `small_m_add` gives of the sum.

    Grid (programs,), all of which must run at the same time: they take tiles [BLOCK] of rows in turn. slots [2, RANKS,
    words] int32; peers: the addresses of all ranks' slots; state [3], late [2] int64. Each rank runs both SEND and
    RECEIVE. Without a part the kernel before this one, a product, sends it; it need not be done when this one begins.
    """
    SENT: tl.constexpr = part_ptr is None
    if PDL:
        gdc_launch_dependents()
        if not SENT:
            gdc_wait()  # peers may only be sent what the kernel before wrote, into slots that one before that cleared
    columns = tl.cdiv(size, BLOCK)
    turn, slots = 0, 0
    if RANKS > 1:
        turn = tl.load(state_ptr + TURN, volatile=True)
        slots = turn % 2 * RANKS * words
    if SEND:
        for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
            column = tile % columns * BLOCK + tl.arange(0, BLOCK)
            at = tile // columns * size + column
            part = tl.load(part_ptr + at, mask=column < size, other=0.0)
            send(part, peers, slots + rank * words, at, column < size, rank, RANKS, False)
    if RECEIVE:
        if RANKS > 1 and not SENT:
            _move_turn_on(state_ptr, turn)  # while the peers' parts are on their way
        for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
            # A tile of a row, and of the residual stream and the norm's weight what it needs, before it waits.
            row, first = tile // columns, tile % columns * BLOCK
            column = first + tl.arange(0, BLOCK)
            mask = column < size
            at = row * size + column
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            if residual_ptr is not None:
                at_r = residual_ptr + row.to(tl.int64) * stride_r + column
                before = tl.load(at_r, mask=mask, other=0.0, cache_modifier=".cg")
                factor = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
            total = _sum_of_ranks(
                part_ptr, slots_ptr, state_ptr, late_ptr, slots, at, mask, rank, turn, words, RANKS, ON_GPU
            )
            # The residual stream, and the first half of the next norm.
            if residual_ptr is not None:
                stream = (total.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype)
                tl.store(out_ptr + at, stream, mask=mask)
                wide = tl.where(mask, stream.to(tl.float32), 0.0)
                tl.store(scaled_ptr + at, (wide * factor).to(dtype), mask=mask)
                groups: tl.constexpr = BLOCK // SQUARED
                group = first // SQUARED + tl.arange(0, groups)
                sums = sum_in_pairs(tl.reshape(wide * wide, [groups, SQUARED]), groups, SQUARED)
                terms = tl.cdiv(size, SQUARED)
                tl.store(squares_ptr + row * terms + group, sums, mask=group < terms)
            else:
                tl.store(out_ptr + at, total.to(dtype), mask=mask)
    if SENT:
        _move_turn_on(state_ptr, turn)  # what this rank's product read is here
        if PDL:
            gdc_wait()  # a kernel that is done means that all before it are
