"""`CommandRing`: the decisions of the first rank, sent to the others through memory that they share."""

import itertools
import mmap
import os
import select
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORDS = 1 << 18
"""Numbers that the ring holds."""
SPINS, NAP = 2000, 50e-6
"""A reader looks SPINS times without a pause, and then after each pause of NAP seconds."""
LOOKS = 2000
"""Looks after which a reader makes sure that the others are alive, and asks how long it has waited."""


class RingTimeoutError(RuntimeError):
    """The first process has not written, or another one has not read."""


class CommandRing:
    """A ring of int64 that one process writes and the others of the same host read.

    Each message is its length and its numbers: [7, 8] is written as 2, 7, 8. The memory begins with `size` words that
    count the numbers which each process has written or read. Each process also has a bell, which it rings when it gives
    up: a FIFO with a byte that nobody takes, so that the others can wait for it.

    rank: number of this process; 0 writes.
    size: number of processes.
    path: the file that is shared; None makes one.
    check_peers: raises if a process has died; it is called while nothing arrives.
    seconds: after which a process gives up waiting.

    Attribute: bells (a file descriptor a process, which can be read once it has given up).
    """

    def __init__(self, rank: int, size: int, path: str | None, check_peers: Callable[[], None], seconds: float):
        self.rank, self.size, self.check_peers, self.seconds = rank, size, check_peers, seconds
        if path is None:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            descriptor, path = tempfile.mkstemp(prefix="spec_compile_", dir=folder)
            os.ftruncate(descriptor, 8 * (size + WORDS))
            for each in range(size):
                os.mkfifo(f"{path}.{each}", 0o600)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_size != 8 * (size + WORDS):
                os.close(descriptor)
                raise ValueError(f"{path}: expected the shared memory of rank 0, a file of the same user")
        self.path = path
        self._memory = mmap.mmap(descriptor, 8 * (size + WORDS))
        os.close(descriptor)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._counts, self._ring = words[:size], words[size:]
        self.bells = [os.open(f"{path}.{each}", os.O_RDWR) for each in range(size)]
        weakref.finalize(self, lambda bells: [os.close(bell) for bell in bells], self.bells)

    def unlink(self) -> None:
        """Remove the names of the files. Every process has opened them, or none will."""
        for path in (self.path, *(f"{self.path}.{each}" for each in range(self.size))):
            Path(path).unlink(missing_ok=True)

    def give_up(self) -> None:
        """Tell the other processes that this one has waited for one of them in vain."""
        if self.rank in self.silent():
            os.write(self.bells[self.rank], b"!")

    def silent(self) -> list[int]:
        """The processes that have not given up."""
        bells = select.poll()
        for bell in self.bells:
            bells.register(bell, select.POLLIN)
        rung = {bell for bell, _ in bells.poll(0)}
        return [each for each, bell in enumerate(self.bells) if bell not in rung]

    @property
    def position(self) -> int:
        """Numbers that this process has written or read."""
        return int(self._counts[self.rank])

    def skip_to(self, position: int) -> None:
        """Leave out messages, as a reader, up to a position of the writer. ValueError if it has never been there."""
        if not 0 <= position <= int(self._counts[0]):
            raise ValueError(f"a position of rank 0 is damaged: {position}; restart all ranks")
        self._counts[self.rank] = position

    def write(self, numbers: list[int]) -> None:
        """Send one message to every reader."""
        message = np.array([len(numbers), *numbers], dtype=np.int64)
        if len(message) > WORDS:
            raise ValueError(f"a decision of {len(message)} numbers does not fit into a ring of {WORDS}")
        begin = self.position
        self._wait(lambda: begin + len(message) - int(self._counts[1:].min()) <= WORDS)
        self._ring[np.arange(begin, begin + len(message)) % WORDS] = message
        self._counts[0] = begin + len(message)

    def read(self, is_patient: bool = False) -> list[int]:
        """The next message. is_patient: wait for it as long as all processes live. ValueError: it is damaged."""
        begin = self.position
        self._wait(lambda: int(self._counts[0]) > begin, is_patient)
        length = int(self._ring[begin % WORDS])
        if not 0 <= length <= int(self._counts[0]) - begin - 1 < WORDS:
            raise ValueError(f"a decision of rank 0 is damaged: it says that it has {length} numbers")
        numbers = self._ring[np.arange(begin + 1, begin + 1 + length) % WORDS].tolist()
        self._counts[self.rank] = begin + 1 + length
        return numbers

    def _wait(self, is_ready: Callable[[], bool], is_patient: bool = False) -> None:
        """RingTimeoutError if it takes longer than `seconds`."""
        begin = time.monotonic()
        for look in itertools.count():
            if is_ready():
                return
            if look > SPINS:
                time.sleep(NAP)
                if look % LOOKS == 0:
                    self.check_peers()
                    if time.monotonic() - begin > self.seconds and not is_patient:
                        raise RingTimeoutError(f"waited {self.seconds:.0f} s for a decision, or for room for one")
