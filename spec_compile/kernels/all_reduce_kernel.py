"""The kernel that sums the parts of all ranks of one host, and does what a decoder layer wants of the sum.

There is no signal, because the data are the signal (Lamport's form, as in TensorRT-LLM's all-reduce). Each rank has in
its memory a slot for every rank, in which each word is `MISSING` until that rank has sent it. A receiver polls its own
memory until no word is missing. Then it sets the words to `MISSING` again. `Exchange.shots` chooses one of two manners:

- **One shot.** A rank stores its part in its slot of every peer's memory, and each rank sums all parts.
- **Two shots**, which send fewer bytes and wait twice. A rank stores its part only in the memory of each number's
  owner. The owner sums the parts and stores the sum, in the dtype of the result, in one more slot of every rank's
  memory. Owners take turns: of 4 ranks, rank 1 owns the numbers 128 .. 255, 640 .. 767 and so on.

Both manners have these properties:

- **Two sets of slots take turns.** A peer may send for the next turn while this rank still reads. It sends for the turn
  after that only when its own kernel of the next turn is done. That one needs what this rank sends in the next turn,
  when the kernel that reads, and clears, is done. The turn is a number in device memory, because a captured graph does
  not know how often others ran.
- **All ranks have equal bits**, because float32 parts are added in the order of the ranks and rounded once. A number's
  sum depends neither on its place in a launch nor on the manner, so the same row has the same bits in all launches.
- **A product can send for itself.** Then this kernel begins while the product still runs, and has nothing to wait for
  but words. It reads what other kernels write from the L2 cache, and the product reads nothing that it writes.
- **No rank waits for ever.** When a part is missing for too long, the kernel writes whose, and traps. An owner waits
  for parts. The others wait longer for its sum, because it may itself wait for a part.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .card import card_of, launches_early
from .primitives import nanoseconds, sum_in_pairs, trap

if TYPE_CHECKING:
    from .all_reduce import Exchange

MAX_LAUNCHES = 8
"""A sum that takes more launches than this is one of a prompt, which a library sums faster."""
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 4096
"""Numbers of a row that a program takes at a time."""
MISSING = tl.constexpr(-1)
"""A word that nobody has sent. As a float32 it is a NaN that no arithmetic gives, because theirs is `NAN`."""
NAN = tl.constexpr(0x7FFFFFFF)
NAN_16 = tl.constexpr(0x7FFF)
"""The same of 16 bits, for float16 and bfloat16."""
SHARE = tl.constexpr(128)
"""Numbers side by side that have one owner."""
TURN, ARRIVED, LIMIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The numbers of `state`: the turn, the programs that have arrived, the nanoseconds that one waits."""


@triton.jit
def slot_of_turn(state_ptr, rank, words, RANKS: tl.constexpr):
    """How many words of slots come before this rank's in this turn."""
    return (tl.load(state_ptr + TURN, volatile=True) % 2 * (RANKS + 1) + rank) * words


@triton.jit
def owner(at, RANKS: tl.constexpr):
    """The rank that sums the numbers at `at` in two shots."""
    return at // SHARE % RANKS


@triton.jit
def send(part, peers, slot, at, mask, rank, RANKS: tl.constexpr, SHOTS: tl.constexpr, TO_ITSELF: tl.constexpr):
    """Store this rank's numbers `part`, of any shape, at `at` of its slot in the memory of each peer, or in two shots
    of their owners; `slot` words come before it. TO_ITSELF: and in its own memory."""
    # No number may look like a missing word.
    word = part.to(tl.float32).to(tl.int32, bitcast=True)
    word = tl.where(word == MISSING, NAN, word)
    for peer in tl.static_range(RANKS):
        if TO_ITSELF or peer != rank:
            slots = tl.multiple_of(peers[peer].to(tl.pointer_type(tl.int32)), 16)
            if SHOTS == 2:
                tl.store(slots + slot + at, word, mask=mask & (owner(at, RANKS) == peer))
            else:
                tl.store(slots + slot + at, word, mask=mask)


@triton.jit
def _send_sum(total, peers, slot, at, mask, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Store sums, rounded to `dtype`, at `at` of the slot of sums in the memory of all ranks."""
    # The sums as words of 4 or 2 bytes, none of which looks like a missing one.
    if dtype == tl.float32:
        word = total.to(tl.int32, bitcast=True)
        word = tl.where(word == MISSING, NAN, word)
    else:
        word = total.to(dtype).to(tl.int16, bitcast=True)
        word = tl.where(word == MISSING, NAN_16, word)
    for peer in tl.static_range(RANKS):
        slots = tl.multiple_of(peers[peer].to(tl.pointer_type(tl.int32)), 16)
        sums = (slots + slot).to(tl.pointer_type(word.dtype), bitcast=True)
        tl.store(sums + at, word, mask=mask)


@triton.jit
def _move_turn_on(state_ptr, turn):
    """The last program to arrive begins the next turn. Before, all of them have read this one."""
    tl.debug_barrier()  # every thread has used the turn
    arrived = tl.atomic_add(state_ptr + ARRIVED, 1, sem="relaxed")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state_ptr + ARRIVED, 0)
        tl.store(state_ptr + TURN, turn + 1)


@triton.jit
def _receive(at, mask, sender, limit, late_ptr, turn, ON_GPU: tl.constexpr):
    """Wait until no word at the addresses `at` [BLOCK] is missing -> them. They are missing again then.

    sender: the rank that sends them, one or [BLOCK]. limit: nanoseconds.
    """
    word = tl.load(at, mask=mask, other=0, volatile=True)
    if ON_GPU:
        begin = nanoseconds()
    while tl.max((word == MISSING).to(tl.int32), 0) != 0:
        if ON_GPU:
            if nanoseconds() - begin > limit:
                tl.store(late_ptr + 1, turn)
                tl.store(late_ptr, tl.max(tl.where(word == MISSING, sender + 1, 0), 0))
                trap()
        word = tl.load(at, mask=mask, other=0, volatile=True)
    tl.store(at, tl.full(word.shape, MISSING, word.dtype), mask=mask)  # guard: parts-are-read-once
    return word


@triton.jit
def _sum_of_ranks(
    part_ptr, slots_ptr, late_ptr, slots, at, mask, rank, turn, words, limit, RANKS: tl.constexpr,
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
                value = _receive(slot + at, mask, other, limit, late_ptr, turn, ON_GPU).to(tl.float32, bitcast=True)
        if other == 0:
            total = value
        else:
            total += value
    return total


@triton.jit(do_not_specialize=["rank", "rows"])
def all_reduce_kernel(
    part_ptr,  # [rows, size], or None: the product before this kernel sends it
    slots_ptr, peers, state_ptr, late_ptr,  # [2, RANKS + 1, words] int32, RANKS addresses, [3] and [2] int64
    residual_ptr, norm_ptr, out_ptr, scaled_ptr, squares_ptr,  # [rows, size] and [size] or None; written, as the stream
    rank, rows, size, stride_r, offset, words,
    RANKS: tl.constexpr, SHOTS: tl.constexpr, BLOCK: tl.constexpr, SQUARED: tl.constexpr, SEND: tl.constexpr,
    REDUCE: tl.constexpr, RECEIVE: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The sum of the ranks' parts [rows, size] to out; with a residual what `product_to_stream` gives of the sum.

    Grid (programs,), all of which must run at the same time: they take tiles [BLOCK] of rows in turn. Each rank runs
    SEND, REDUCE (of two shots) and RECEIVE. A product that sends its part need not be done when this kernel begins.
    """
    SENT: tl.constexpr = part_ptr is None
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        if not SENT:
            gdc_wait()  # peers may only be sent what the kernel before wrote, into slots that one before that cleared
    columns = tl.cdiv(size, BLOCK)
    turn, slots, limit = 0, 0, 0
    if RANKS > 1:
        turn = tl.load(state_ptr + TURN, volatile=True)
        limit = tl.load(state_ptr + LIMIT)
        slots = turn % 2 * (RANKS + 1) * words
    if SEND:
        for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
            column = tile % columns * BLOCK + tl.arange(0, BLOCK)
            at = tile // columns * size + column
            part = tl.load(part_ptr + at, mask=column < size, other=0.0)
            send(part, peers, slots + rank * words, at, column < size, rank, RANKS, SHOTS, False)
    if RECEIVE and RANKS > 1 and not SENT:
        _move_turn_on(state_ptr, turn)  # while the peers' parts are on their way
    if REDUCE:  # the numbers that this rank owns, whose sums go to all
        for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
            column = tile % columns * BLOCK + tl.arange(0, BLOCK)
            at = tile // columns * size + column
            mask = (column < size) & (owner(at, RANKS) == rank)
            total = _sum_of_ranks(
                part_ptr, slots_ptr, late_ptr, slots, at, mask, rank, turn, words, limit, RANKS, ON_GPU
            )
            _send_sum(total, peers, slots + RANKS * words, at, mask, dtype, RANKS)
    if RECEIVE:
        for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
            # A tile of a row, and of the residual stream and the norm's weight what it needs, before it waits.
            row, first = tile // columns, tile % columns * BLOCK
            column = first + tl.arange(0, BLOCK)
            mask = column < size
            at = row * size + column
            if residual_ptr is not None:
                at_r = residual_ptr + row.to(tl.int64) * stride_r + column
                before = tl.load(at_r, mask=mask, other=0.0, cache_modifier=".cg")
                factor = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
            # The sum: from its owner, or of the parts of all ranks.
            if SHOTS == 2:
                word_type: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
                sums = (slots_ptr + slots + RANKS * words).to(tl.pointer_type(word_type), bitcast=True)
                word = _receive(sums + at, mask, owner(at, RANKS), limit + limit // 4, late_ptr, turn, ON_GPU)
                total = word.to(dtype, bitcast=True).to(tl.float32)
            else:
                total = _sum_of_ranks(
                    part_ptr, slots_ptr, late_ptr, slots, at, mask, rank, turn, words, limit, RANKS, ON_GPU
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
    if SENT and RECEIVE:
        _move_turn_on(state_ptr, turn)  # what this rank's product read is here
        if PDL:
            gdc_wait()  # a kernel that is done means that all before it are


def supports(exchange: "Exchange", part: Tensor) -> bool:
    """True if the kernel sums parts of this size and dtype."""
    return 0 < part.numel() <= MAX_LAUNCHES * exchange.words and part.dtype.itemsize <= 4


def all_reduce(exchange: "Exchange", part: Tensor) -> Tensor:
    """The sum of the ranks' parts of any shape, added in float32 in the order of the ranks and rounded once."""
    flat = part.contiguous().view(1, -1)
    out = torch.empty_like(flat)
    for begin in range(0, part.numel(), exchange.words):
        columns = slice(begin, begin + exchange.words)
        launch(exchange, flat[:, columns], out[:, columns])
    return out.view(part.shape)


def all_reduce_add(exchange: "Exchange | None", part: Tensor | None, out: Tensor, stream, squared: int) -> None:
    """The residual stream after the sum of the ranks' parts [R, C] to out [R, C], and the first half of its next norm.

    stream: a `ResidualStream`. squared: columns whose squares are added up together. Without an exchange `part`
    is the sum already; without a part the product before this launch sends it.
    """
    step = len(out) if exchange is None or part is None else exchange.words // out.shape[1]
    for begin in range(0, len(out), max(step, 1)):
        rows = slice(begin, begin + step)
        residual, weight, offset, scaled, squares = stream
        behind = residual[rows], weight, offset, scaled[rows], squares[rows]
        launch(exchange, part if part is None else part[rows], out[rows], behind, squared)


def launch(
    exchange: "Exchange | None", part: Tensor | None, out: Tensor, stream=None, squared: int = 1, *, send: bool = True,
    reduce: bool = True, receive: bool = True, block: int | None = None,
) -> None:  # fmt: skip
    """Run the kernel on parts [R, C] of at most ``exchange.words`` numbers; arguments as of `all_reduce_add`.

    send, reduce, receive: each rank does all, but one process that plays all ranks first sends as each. block: a power
    of two, at least `squared`, which changes no bit.
    """
    (rows, size), early = out.shape, launches_early(out.device)
    processors = card_of(out.device).processors or 4  # these programs surely run at the same time
    block = max(block or block_for(rows, size, processors), squared)
    rank, ranks, slots, peers, state, late, words, shots = 0, 1, None, None, None, None, 0, 1
    if exchange is not None:
        rank, ranks, words = exchange.rank, exchange.ranks, exchange.words
        slots, peers, state, late = exchange.slots, exchange.peers, exchange.state, exchange.late
        shots = exchange.shots(out.numel())
    residual, norm, offset, scaled, squares = stream or (None, None, 0.0, None, None)
    all_reduce_kernel[(min(rows * -(-size // block), processors),)](
        part, slots, peers, state, late, residual, norm, out, scaled, squares,
        rank, rows, size, 0 if residual is None else residual.stride(0), offset, words,
        RANKS=ranks, SHOTS=shots, BLOCK=block, SQUARED=squared, SEND=send and ranks > 1 and part is not None,
        REDUCE=reduce and shots == 2, RECEIVE=receive, PDL=early, ON_GPU=out.is_cuda, launch_pdl=early,
        num_warps=min(max(block // 128, 1), 16),
    )  # fmt: skip


def block_for(rows: int, size: int, processors: int) -> int:
    """The smallest block for which each multiprocessor gets at most one, if there is one."""
    block = SMALLEST_BLOCK
    while block < LARGEST_BLOCK and rows * -(-size // block) > processors:
        block *= 2
    return block
