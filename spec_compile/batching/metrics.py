"""`Metrics`: counters of the requests of a manager that are over, and gauges of those under way."""

import weakref
from collections import Counter
from typing import Any

from ..cache import PAGE
from .prefix_cache import TIERS, whole
from .scheduler import Scheduler
from .sequence import BatchSequence

REASONS = ("stop", "length", "cancelled", "error")
REJECTIONS = ("queue_full", "invalid", "stopping")
COUNTERS = (
    "drafts_total", "draft_tokens_total", "accepted_tokens_total", "prompt_tokens_total", "reused_prompt_tokens_total",
    "generation_tokens_total",
)  # fmt: skip


class Metrics:
    """Numbers about a manager: counters of finished requests, and gauges of the scheduler. Calling it gives a dict."""

    def __init__(self, scheduler: Scheduler, engine: Any):
        self._engine, self._rounds_before = engine, scheduler.decoder.rounds_by_nodes.copy()
        self._scheduler = weakref.proxy(scheduler)  # a destroyed manager whose pages were given back does not keep them
        self._prefixes_before, self._preemptions_before = scheduler.prefixes.counts.copy(), scheduler.preemptions
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._finished, self._rejected = dict.fromkeys(REASONS, 0), dict.fromkeys(REJECTIONS, 0)
        self._positions: Counter[int] = Counter()

    def reject(self, reason: str) -> None:
        """Count a request that was not taken, by one of `REJECTIONS`."""
        self._rejected[reason] += 1

    def finish(self, sequence: BatchSequence) -> None:
        speculation = sequence.speculation
        self._finished[str(sequence.finish_reason)] += 1
        self._counters.update(
            drafts_total=sum(drafted > 0 for drafted in speculation.per_step_drafted),
            draft_tokens_total=speculation.drafted, accepted_tokens_total=speculation.accepted,
            prompt_tokens_total=len(sequence.prompt), generation_tokens_total=len(sequence.tokens),
            reused_prompt_tokens_total=whole(speculation.reused_prompt_tokens),
        )  # fmt: skip
        self._positions.update(dict(enumerate(speculation.accepted_per_position)))

    def __call__(self) -> dict:
        """Gauges: requests, slots, and tokens of the pages that rows use now, besides kept prefixes, which can be given
        up for them. Counters, which end with ``_total``: since the start, of requests that are over; the counters of
        ``prefix_cache`` count requests that have begun, too."""
        scheduler, decoder, prefill = self._scheduler, self._scheduler.decoder, self._scheduler.prefill
        rounds = decoder.rounds_by_nodes - self._rounds_before
        prefixes = scheduler.prefixes.counts - self._prefixes_before
        hits = {tier: prefixes[tier] for tier in TIERS}
        caches = [cache for rows in (decoder, prefill) for cache in rows.all.caches]
        stored = [*decoder.cache_tensors(), *(state for cache in caches for state in cache.states.tensors)]
        pages, used = scheduler.pages.usable, len({page for each in scheduler.begun for page in each.pages})
        return {
            "requests_running": len(decoder.active),
            "requests_prefilling": len(prefill.begun),
            "requests_waiting": len(scheduler.waiting),
            "slots": scheduler.slots,
            "slot_tokens": scheduler.capacity,
            "cache_bytes": sum(tensor.nbytes for tensor in stored),
            "cache_tokens": pages * PAGE,
            "cache_tokens_used": used * PAGE,
            "cache_usage": used / pages,
            "preemptions_total": scheduler.preemptions - self._preemptions_before,
            "prefix_cache_bytes": {tier: scheduler.prefixes.bytes(tier) for tier in TIERS},
            "prefix_cache_queries_total": prefixes["asked"],
            "prefix_cache_hits_total": sum(hits.values()),
            "prefix_cache_hits_by_place_total": hits,
            "prefix_cache_evicted_blocks_total": prefixes["evicted"],
            "rounds_total": rounds.total(),
            "rounds_by_nodes_total": dict(rounds),
            **self._counters,
            "accepted_tokens_per_position_total": list(self._positions.values()),
            "requests_finished_total": dict(self._finished),
            "requests_rejected_total": dict(self._rejected),
            "online_training": {} if self._engine.online is None else self._engine.online.figures(),
        }  # fmt: skip
