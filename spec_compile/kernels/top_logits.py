"""The likeliest tokens of each row of logits, with their log-probabilities: one pass over the logits, one launch.

A row is cut into parts, one a program. A program stores the best entry of each stretch of its part, and its part of the
softmax's sum; the last program of a row to arrive merges the parts in ascending order, so results never differ between
runs. The k best entries lie in the k stretches whose best entries come first, so it reads only these again.

An entry is one int64 that orders as (logit, lower id), so entries are distinct and ties need no care:

    entry = order(logit) << 32 | (2 ** 31 - 1 - id)        logits [1.0, 3.0, 3.0]: the entry of id 1 is the largest
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compat import argmax
from .card import launches_early
from .launching import one_launch, zero_counters

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait

    from .primitives import rounded
except ImportError:  # no GPU
    triton = None

MAX_K = 16
BLOCK = 4096
"""Logits of a part."""
LARGEST = torch.finfo(torch.float32).max
STRETCH = 64
"""Logits that a CPU looks at only if their largest is among the best."""
GPU_STRETCH = 128
"""The same on a GPU. Twice as many make fewer stretches to compare and more logits to read again."""
MASK = (1 << 31) - 1
"""The bits of an entry that hold MASK - id."""


def empty_results(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    _check(logits, k, temperature)
    logprobs = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    return logprobs, torch.empty_like(logprobs, dtype=torch.int64)


@one_launch("top_logits", empty_results, "launch_top_logits")
def top_logits(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """``log_softmax(logits / temperature)`` at the k largest logits of each row, largest first.

    logits: [R, V], any floating dtype and strides; computed in float32. NaN counts as -inf.
    k: 1 to min(16, V).
    temperature: positive and finite.
    -> logprobs [R, k] float32, at most 0, -inf for logits of -inf; ids [R, k] int64, distinct, the lower one first for
    equal logits. Raises ValueError or TypeError for other arguments.
    """
    _check(logits, k, temperature)
    logits = torch.where(logits == logits, logits.float().clamp(max=LARGEST), -math.inf)
    if k == 1:
        ids = argmax(logits)[:, None]
    else:  # they lie in the k stretches whose largest logits come first
        stretches = F.pad(logits, (0, -logits.shape[1] % STRETCH), value=-math.inf).unflatten(1, (-1, STRETCH))
        columns = torch.arange(stretches.shape[1] * STRETCH, device=logits.device).view(-1, STRETCH)
        best = _first(stretches.amax(dim=2), columns[:, 0], min(k, len(columns))) // STRETCH
        some = stretches.gather(1, best[:, :, None].expand(-1, -1, STRETCH))
        ids = _first(some.flatten(1), columns[best].flatten(1), k)
    picked = logits.gather(1, ids)
    below, total = picked - picked[:, :1], ((logits - picked[:, :1]) / temperature).exp().sum(dim=1, keepdim=True)
    return torch.where(picked.isneginf(), -math.inf, below / temperature - total.log()), ids


def _check(logits: Tensor, k: int, temperature: float) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise TypeError(f"logits must be floating point [R, V], not {logits.dtype} {list(logits.shape)}")
    if not 1 <= k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"k must be from 1 to {MAX_K} and at most the {logits.shape[1]} logits of a row, not {k}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")


def _first(logits: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids [R, k] of the first k entries of logits and ids [R, M]."""
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)  # -0.0 is 0.0
    order = (bits ^ ((bits >> 31) & MASK)).to(torch.int64)
    return MASK - ((order << 32 | (MASK - ids)).topk(k).values & MASK)


@one_launch(
    "likeliest", lambda logits, banned, applies: torch.empty_like(applies, dtype=torch.int64), "launch_likeliest"
)
def likeliest(logits: Tensor, banned: Tensor, applies: Tensor) -> Tensor:
    """The likeliest token after each node, the lower id of equal ones: logits [B, N, V] -> [B, N] int64.

    banned: [B, V] bool; tokens that count as -inf after the nodes of `applies` [B, N] bool.
    """
    return argmax(logits.masked_fill(applies[:, :, None] & banned[:, None, :], -math.inf))


def launch_likeliest(logits: Tensor, banned: Tensor, applies: Tensor, block: int = BLOCK // 2) -> Tensor:
    """`likeliest` by the kernel, which treats infinite and undefined logits as `top_logits` does."""
    rows, bans = logits.flatten(0, 1), (banned.contiguous(), applies.contiguous(), applies.shape[1])
    return launch(rows, 1, 1.0, block, bans=bans)[1].view_as(applies)


def launch(
    logits: Tensor, k: int, temperature: float, block: int = BLOCK, warps: int = 4, table: Tensor | None = None,
    tokens: Tensor | None = None, bans: tuple[Tensor | None, Tensor | None, int] = (None, None, 1),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`top_logits` by the kernel, in parts of `block` logits (a power of two).

    table, tokens: see `drafters.recycle.renew`. With these the table is renewed, and the results are undefined.
    bans: `banned` and `applies` of `likeliest`, and its number of nodes; only with k = 1.
    """
    rows, vocab = logits.shape
    parts, stretch = triton.cdiv(vocab, block), min(GPU_STRETCH, block)
    stretches = parts * (block // stretch)
    (logprobs, ids), early = empty_results(logits, k, temperature), launches_early(logits.device)
    if not rows:
        return logprobs, ids
    _top_logits[(rows * parts,)](
        logits, logprobs, ids, *bans, table, tokens, rows, 0 if table is None else len(table),
        logits.new_empty((rows, stretches), dtype=torch.int64), logits.new_empty((rows, parts, 2), dtype=torch.float32),
        zero_counters(logits.device, rows),
        *logits.stride(), vocab, parts, stretches, 1 / temperature, math.log2(math.e) / temperature,
        K=k, BLOCK=block, STRETCH=stretch, BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK_BEST=triton.next_power_of_2(stretches), BLOCK_K=triton.next_power_of_2(k), EARLY=early,
        launch_pdl=early, num_warps=warps,
    )  # fmt: skip
    return logprobs, ids


if triton is not None:

    @triton.jit
    def _entry(logit, column):
        """The entry of a logit, see the top of this file."""
        bits = logit.to(tl.int32, bitcast=True)
        return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)

    @triton.jit
    def _logit(entry):
        """The float32 that an entry was made of."""
        order = (entry >> 32).to(tl.int32)
        return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    @triton.jit
    def _powers(values, peak, scale):
        """2 ** ((values - peak) * scale); 0 where a value is -inf."""
        return tl.exp2((values - tl.where(peak == float("-inf"), 0.0, peak)) * scale)

    @triton.jit
    def _entries(logits, column, vocab, stride):
        """The logits at the columns, clean as `top_logits` has them, and entries; -inf and the least beyond the row."""
        inside = column < vocab
        x = tl.load(logits + column.to(tl.int64) * stride, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, tl.minimum(tl.where(x == 0, 0.0, x), 3.4028234663852886e38), float("-inf"))
        return x, tl.where(inside, _entry(x, column), -(1 << 63))

    @triton.jit(do_not_specialize=["parts", "stretches", "rows", "known", "nodes"])
    def _top_logits(
        logits,  # [R, vocab] by its strides
        logprobs, ids,  # [R, K], written, or None
        banned, applies, nodes,  # [R / nodes, vocab] and [R] bool, see `likeliest`; or None
        table, tokens, rows, known,  # [known, K] int32, whose rows `tokens` [R] are written, or None
        best, sums,  # [R, stretches]: entries; [R, parts, 2]: largest logit and sum of each part
        arrived,  # [R]: parts that are done; zero before and after
        stride_row, stride, vocab, parts, stretches, inverse, scale,
        K: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr, BLOCK_PARTS: tl.constexpr,
        BLOCK_BEST: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One part of one row a program. Grid (R * parts). inverse, scale: 1 and log2 e over the temperature."""
        LEAST: tl.constexpr = -(1 << 63)  # below every entry
        COUNT: tl.constexpr = BLOCK // STRETCH
        row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        logits += row.to(tl.int64) * stride_row
        best += row * stretches
        sums += row * parts * 2

        # Store the part's sum, and the best entry of each of its stretches.
        if EARLY:
            gdc_wait()
        column = part * BLOCK + tl.arange(0, BLOCK)
        x, entry = _entries(logits, column, vocab, stride)
        if banned is not None:
            if tl.load(applies + row) != 0:
                is_banned = tl.load(banned + row // nodes * vocab + column, mask=column < vocab, other=0) != 0
                entry = tl.where(is_banned, _entry(tl.full(x.shape, float("-inf"), tl.float32), column), entry)
        peak = tl.max(x, 0)
        tl.store(sums + part * 2, peak)
        tl.store(sums + part * 2 + 1, tl.sum(_powers(x, peak, scale), 0))
        tl.store(best + part * COUNT + tl.arange(0, COUNT), tl.max(tl.reshape(entry, [COUNT, STRETCH]), 1))

        # The last program of the row adds up the sums,
        tl.debug_barrier()  # every thread's stores come before the release by one of them
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row, 0)
            p = tl.arange(0, BLOCK_PARTS)
            peaks = tl.load(sums + p * 2, mask=p < parts, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(sums + p * 2 + 1, mask=p < parts, other=0.0, cache_modifier=".cg")
            peak = tl.max(peaks, 0)
            log_total = tl.log(tl.sum(totals * _powers(peaks, peak, scale), 0))

            # finds the stretches that come first, and reads them again,
            n, number = tl.arange(0, BLOCK_BEST), tl.arange(0, BLOCK_K)
            merged = tl.load(best + n, mask=n < stretches, other=LEAST, cache_modifier=".cg")
            if K > 1:
                chosen = tl.full([BLOCK_K], 0x7FFFFFFF // STRETCH, tl.int32)  # beyond the row
                for place in range(K):
                    largest = tl.max(merged, 0)
                    of_best = ((0x7FFFFFFF - (largest & 0x7FFFFFFF)) // STRETCH).to(tl.int32)
                    chosen = tl.where(number == place, of_best, chosen)
                    merged = tl.where(merged == largest, LEAST, merged)
                again = tl.reshape(chosen[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :], [BLOCK_K * STRETCH])
                _, merged = _entries(logits, again, vocab, stride)

            # and stores the best entries.
            if table is not None:  # the last row of a token counts
                token = tl.load(tokens + row)
                same = token < 0
                for start in range(row + 1, rows, 256):
                    later = start + tl.arange(0, 256)
                    same |= tl.max((tl.load(tokens + later, mask=later < rows, other=-1) == token).to(tl.int32), 0) > 0
            for place in range(K):
                largest = tl.max(merged, 0)
                logit, id = _logit(largest), 0x7FFFFFFF - (largest & 0x7FFFFFFF)
                logprob = tl.minimum((logit - peak) * inverse - log_total, 0.0)
                logprob = tl.where(logit == float("-inf"), logit, logprob)
                if table is None:
                    tl.store(logprobs + row * K + place, logprob)
                    tl.store(ids + row * K + place, id)
                else:
                    loss = rounded(tl.minimum(-16.0 * logprob, 255.0)).to(tl.int32)
                    is_one = (id < known) & (logprob > float("-inf"))
                    tl.store(table + token * K + place, tl.where(is_one, (id.to(tl.int32) << 8) | loss, -1), mask=~same)
                merged = tl.where(merged == largest, LEAST, merged)
