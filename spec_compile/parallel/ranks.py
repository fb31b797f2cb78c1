"""`Ranks`: the processes that share one model, as one of them sees them.

All of them run the same code. Decisions by a clock, a measurement, a callback or the host are made by the first rank,
and the others take them over (`Ranks.lead`). Before, they check that all were asked for the same (`Ranks.agree`).
"""

import hashlib
import os
import select
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from .commands import CommandRing, RingTimeoutError
from .messages import from_json, to_json
from .slices import Slices

WIDTH = 4096
"""Bytes of the message that a rank sends when the ranks agree."""
DECISION, ABORT = 0, 1
"""The first number of a message of the first rank."""
GRACE = 2.0
"""Seconds until a process that is being killed is seen as dead, and within which all ranks that wait for another give
up."""
LOST = "onnection", "imed out", "imeout"
"""Parts of errors of torch.distributed about a rank that does not answer."""


@dataclass
class Hello:
    """A rank's description of itself. process: its id and when it was made. gpu: its name, "" on a CPU. ring: the path
    of the first rank's `CommandRing`, None from the others."""

    process: tuple[int, float]
    gpu: str
    ring: str | None


@dataclass
class RankTask:
    """The task of a rank. error: why it refuses, or None. parts: digests of the facts, by name. position: in the
    ring."""

    error: str | None
    parts: dict[str, str]
    position: int


class Alone:
    """A process that shares its model with no other, with the interface of `Ranks`."""

    rank, size, leads, name = 0, 1, True, ""
    notes: Sequence[str] = ()
    slices: Slices

    def lead(self, decide: Callable[[], Sequence[int]], check: int = 0, is_patient: bool = False) -> list[int]:
        """See `Ranks.lead`."""
        return [*decide()]

    def agree(self, what: str, parts: dict[str, Any], error: BaseException | None = None) -> None:
        """See `Ranks.agree`."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """See `Ranks.call`."""
        yield

    @contextmanager
    def together(self, what: str, parts: dict[str, Any]) -> Iterator[None]:
        """A context that ends with `agree` on `parts`, which may be filled inside. The other ranks learn of errors."""
        try:
            yield
        except Exception as error:
            self.agree(what, {}, error)
            raise
        self.agree(what, parts)

    def meet(self) -> None:
        """Wait until all ranks are here."""

    def check_peers(self) -> None:
        """See `Ranks.check_peers`."""


ALONE = Alone()


class Ranks(Alone):
    """The group of tensor parallelism, and this process's number in it.

    All ranks make one together. ValueError if two share a GPU.

    group: a group of torch.distributed, whose collectives carry sums.
    talk: a group of the same ranks on CPUs.
    gpu: the name of this process's GPU, "" on a CPU.
    seconds: that the first rank may take for a decision.

    Attributes: rank and size (this process's number, and the number of processes), leads (True for the first), name (of
    the group, for `kernels.all_reduce`), slices (this rank's parts of parameters).
    """

    def __init__(self, group: dist.ProcessGroup, talk: dist.ProcessGroup, gpu: str, seconds: float):
        self.rank, self.size, self.name = group.rank(), group.size(), group.group_name
        self.leads = self.rank == 0
        self.group, self._talk = group, talk
        self.slices = Slices(self.rank, self.size)
        self.failure = ""
        """The reason why no call can be served any more, or ""."""
        self.find_missing: Callable[[], int | None] = lambda: None
        """Returns, after an error of the GPU, the rank that it waited for in vain."""
        self.notes: list[str] = []
        """Lines about the exchange for ``explain()``."""
        self._processes: list[tuple[int, float]] = []
        self._ring = CommandRing(0, self.size, None, self.check_peers, seconds) if self.leads else None
        try:
            self._meet_first(gpu, seconds)
        finally:
            if self.leads:
                self._ring.unlink()

    def _meet_first(self, gpu: str, seconds: float) -> None:
        """Tell the other ranks of this one, and hear of them. ValueError if they cannot share a model."""
        me = psutil.Process()
        ring = self._ring.path if self._ring else None
        heard = self._exchange(Hello((me.pid, me.create_time()), gpu, ring), Hello)
        gpus = [each.gpu for each in heard if each.gpu]
        if len(set(gpus)) < len(gpus):
            raise ValueError(
                "tensor_parallel: two ranks have the model on one GPU; load it with "
                "device_map={'': int(os.environ['LOCAL_RANK'])} on each"
            )
        self._processes = [each.process for each in heard]
        if not self._ring:
            self._ring = CommandRing(self.rank, self.size, heard[0].ring or "", self.check_peers, seconds)
        self.meet()

    def lead(self, decide: Callable[[], Sequence[int]], check: int = 0, is_patient: bool = False) -> list[int]:
        """The integers that `decide` returns on the first rank. It is not called on the others.

        check: a number that must be the same on all ranks. is_patient: the decision may take any time.

        RuntimeError if the number is not the same, or if the first rank has given up the call, and after the deadline.
        """
        try:
            if self.leads:
                values = [*decide()]
                self._ring.write([DECISION, check, *values])
                return values
            kind, expected, *values = self._ring.read(is_patient) or [None, 0]
        except RingTimeoutError as error:
            raise self._of_the_lost(error) from error
        if kind not in (DECISION, ABORT):
            raise ValueError(f"a message of rank 0 is of an unknown kind, {kind}; restart all ranks")
        if kind == ABORT:
            raise RuntimeError("rank 0 ended this call: " + bytes(values).decode(errors="replace"))
        if expected != check:
            self.failure = f"rank {self.rank} has computed something else than rank 0; restart all ranks"
            raise RuntimeError(self.failure)
        return values

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context in which the ranks run the same rounds; they leave it together.

        An exception on the first rank ends it on all. RuntimeError, naming the rank, if one has died.
        """
        try:
            yield
            self.lead(list)
        except BaseException as error:
            if self.leads:
                text = f"{type(error).__name__}: {error}".encode()[:WIDTH]
                self._ring.write([ABORT, 0, *text])
            self._name_the_lost(error)
            raise

    def agree(self, what: str, parts: dict[str, Any], error: BaseException | None = None) -> None:
        """Make sure that all ranks were asked for the same. All of them call this.

        what: the call, for messages.
        parts: the facts to agree on, by name; each is bytes, or a value whose `repr` tells it from others.
        error: the reason why this rank cannot go on, or None. With one, nothing is raised here.

        ValueError on every other rank, with the part and the ranks, if one has an error or another value.
        """
        if self.failure:
            raise RuntimeError(self.failure)
        digests = {name: digest(value) for name, value in parts.items()} if error is None else {}
        # JSON takes up to six bytes for a character.
        reason = f"{type(error).__name__}: {error}"[: WIDTH // 8] if error is not None else None
        heard = self._exchange(RankTask(reason, digests, self._ring.position), RankTask)
        if error is not None:
            return
        # Compare what all have said.
        for rank, each in enumerate(heard):
            if each.error is not None:
                raise ValueError(f"{what}: rank {rank} refused it: {each.error}")
        if not self.leads:  # only now: after an error, rounds of requests may go on that read the ring
            self._ring.skip_to(heard[0].position)
        first = heard[0].parts
        for name in dict.fromkeys([*first, *(name for each in heard for name in each.parts)]):
            others = [rank for rank, each in enumerate(heard) if each.parts.get(name) != first.get(name)]
            if others:
                raise ValueError(
                    f"{what}: the ranks disagree on {name}: rank {', '.join(map(str, others))} differs from rank 0; "
                    "call it alike on all ranks"
                )

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._exchange(None, types.NoneType)

    def check_peers(self) -> None:
        """RuntimeError, naming the rank that caused it, if a rank's process is gone."""
        if any(self._is_dead(rank) for rank in range(self.size)):
            raise self._of_the_lost(RuntimeError("a process has died after it gave up"))

    def _is_dead(self, rank: int) -> bool:
        pid, made = self._processes[rank]
        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != made
        except psutil.NoSuchProcess:
            return True

    def _name_the_lost(self, error: BaseException) -> None:
        """Raise, in place of an error of torch.distributed or of the GPU, one that names the rank that caused it."""
        if self.failure or not isinstance(error, RuntimeError):
            return
        if (missing := self.find_missing()) is not None:
            self.failure = f"rank {missing} has stopped answering; restart all ranks"
            raise RuntimeError(self.failure) from error
        is_of_group = isinstance(error, dist.DistError) or "gloo" in str(error)  # and not a user's own
        if is_of_group and any(part in str(error) for part in LOST):  # guard: errors-of-a-rank
            raise self._of_the_lost(error) from error

    def _of_the_lost(self, error: Exception) -> Exception:
        """A RuntimeError that names the ranks that have died, or that do not answer; `error` if there is none.

        Each rank that waits for another in vain gives up and says so. One that does not say so is the other.
        """
        # Say that this rank waits in vain, and wait for the others to say so, or to die.
        self._ring.give_up()  # guard: giving-up
        deadline = time.monotonic() + GRACE
        while True:
            lost, left = self._ring.silent(), deadline - time.monotonic()
            dead = [rank for rank in lost if self._is_dead(rank)]
            if dead or not lost or left <= 0:
                break
            self._wait_for_any(lost, left)
        if dead:
            self.failure = f"rank {dead[0]} (process {self._processes[dead[0]][0]}) has died; restart all ranks"
        elif lost:
            self.failure = f"rank {', '.join(map(str, lost))} has stopped answering; restart all ranks"
        return RuntimeError(self.failure) if lost else error

    def _wait_for_any(self, ranks: list[int], seconds: float) -> None:
        """Sleep until one of the ranks gives up or dies, `seconds` at most."""
        with ExitStack() as opened:
            events = select.poll()
            for rank in ranks:
                events.register(self._ring.bells[rank], select.POLLIN)
                try:
                    with suppress(AttributeError):  # a Python built for Linux before 5.3 sees a death after the wait
                        death = os.pidfd_open(self._processes[rank][0])
                        opened.callback(os.close, death)
                        events.register(death, select.POLLIN)
                except ProcessLookupError:
                    return
            events.poll(seconds * 1000)

    def _exchange(self, message: Any, kind: type) -> list[Any]:
        """The messages of all ranks, by rank, each of this kind. ValueError on all ranks if one is of another."""
        text = to_json(message)
        if len(text) > WIDTH:
            raise ValueError(f"a message of {len(text)} bytes to the other ranks is longer than {WIDTH}")
        mine = torch.frombuffer(bytearray(text.ljust(WIDTH)), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(heard, mine, group=self._talk)
        except RuntimeError as error:
            if self._processes:
                self._name_the_lost(error)
            raise
        return [
            from_json(each.numpy().tobytes(), kind, f"tensor_parallel: the message of rank {rank}")
            for rank, each in enumerate(heard)
        ]


def digest(value: Any) -> str:
    """A short text that stands for a value."""
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=8).hexdigest()
