"""`CommandRing`: the decisions of the first rank, sent to the others through memory that they share."""

import itertools
import mmap
import os
import tempfile
import time
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
    count the numbers which each process has written or read, and `size` that are 1 if it has given up.

    rank: number of this process; 0 writes.
    size: number of processes.
    path: of the file that is shared; None makes one.
    check_peers: raises if a process has died; it is called while nothing arrives.
    seconds: after which a process gives up waiting.

    Attribute: has_given_up [size] int64, which all processes read and write.
    """

    def __init__(self, rank: int, size: int, path: str | None, check_peers: Callable[[], None], seconds: float):
        self.rank, self.size, self.check_peers, self.seconds = rank, size, check_peers, seconds
        if path is None:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            descriptor, path = tempfile.mkstemp(prefix="spec_compile_", dir=folder)
            os.ftruncate(descriptor, 8 * (2 * size + WORDS))
        else:
            descriptor = os.open(path, os.O_RDWR)
        self.path = path
        self._memory = mmap.mmap(descriptor, 8 * (2 * size + WORDS))
        os.close(descriptor)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._counts, self.has_given_up, self._ring = words[:size], words[size : 2 * size], words[2 * size :]

    def unlink(self) -> None:
        """Remove the file's name. Every process has opened it, or none will."""
        Path(self.path).unlink(missing_ok=True)

    @property
    def position(self) -> int:
        """Numbers that this process has written or read."""
        return int(self._counts[self.rank])

    def skip_to(self, position: int) -> None:
        """Leave out messages, as a reader, up to a position of the writer."""
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
        """The next message. is_patient: wait for it as long as all processes live."""
        begin = self.position
        self._wait(lambda: int(self._counts[0]) > begin, is_patient)
        length = int(self._ring[begin % WORDS])
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
