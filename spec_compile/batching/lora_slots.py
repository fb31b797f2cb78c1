"""`LoraSlots`: which request is next, where requests choose LoRA adapters and slots for those are few."""

from collections.abc import Sequence

from ..capture.loras import BASE, NO_ADAPTER, Loras
from .job import Job


class LoraSlots:
    """Gives requests their adapters, from their admission to their end.

    A request waits until its adapter has a slot, and others go past it, but at most `most` that have an adapter
    themselves. After that only requests without an adapter do, so that a slot becomes free. With one slot and most = 2,
    requests for the adapters a b a a a are let in as a a a b a.
    """

    def __init__(self, loras: Loras | None, most: int):
        """loras: the adapters of the model; None: requests choose none."""
        self._loras, self._most = loras, most
        self._passed: list[Job] = []
        """Requests that the one that `next` has found goes past."""

    def next(self, waiting: Sequence[Job]) -> Job | None:
        """The first request that can be let in; None if there is none."""
        if self._loras is None:
            return waiting[0] if waiting else None
        has_room: dict[str | None, bool] = {BASE: True}
        self._passed = passed = []
        for job in waiting:
            if job.adapter not in has_room:
                has_room[job.adapter] = self._loras.has_room(job.adapter)
            is_due = any(other.passed >= self._most for other in passed)
            if has_room[job.adapter] and (job.adapter == BASE or not is_due):
                return job
            passed.append(job)
        return None

    def take(self, job: Job) -> None:
        """Give a request that `next` has found its adapter; see `Loras.take` for what is raised."""
        if self._loras is not None:
            for other in self._passed:
                other.passed += job.adapter != BASE
            job.loaded = self._loras.take(job.adapter)

    def release(self, job: Job) -> None:
        """A request needs its adapter no longer."""
        if self._loras is not None:
            self._loras.release(job.loaded)
            job.loaded = NO_ADAPTER
