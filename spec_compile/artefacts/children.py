"""Child processes that compile parts. They hold no weights, yield to all other work, and end with their parent.

A folder is their queue: ``000007-KEY.job`` is a job that waits, ``000007-KEY.taken-PID`` one that a child compiles, and
``KEY.part`` or ``KEY.failed`` its result, which appears whole.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

log = logging.getLogger("spec_compile")

NICENESS = 15
LOOK_SECONDS = 0.1
"""Between two looks of a child for a job, and for its parent."""
IDLE_SECONDS = 20.0
"""After so long without a job a child ends; the next job starts another."""
MOST_DEATHS = 3
"""Children that may die at work; then every job that is left fails."""


class Children:
    """Up to `count` children, which are started when there are jobs. A forked process gets children of its own."""

    def __init__(self, count: int = 1):
        if count < 1:
            raise ValueError(f"count: expected 1 or more children, got {count}")
        self.count = count
        self._jobs: dict[str, str] = {}
        """The texts of jobs without a result, by key."""
        self._open()

    def submit(self, key: str, job: str) -> None:
        """Let a child compile a job, the text of a `PartJob`. key: names its result."""
        self._follow_fork()
        self._jobs[key] = job
        _write(self.folder / f"{self._number:06d}-{key}.job", job.encode())
        self._number += 1
        self._start()

    def collect(self) -> list[tuple[str, bytes | None]]:
        """Keys and compiled parts since the last call, without waiting; None for a job that failed, which is logged."""
        self._follow_fork()
        self._bury()
        found = list[tuple[str, bytes | None]]()
        for key in list(self._jobs):
            result, failure = self.folder / f"{key}.part", self.folder / f"{key}.failed"
            if result.exists():
                found.append((key, result.read_bytes()))
                result.unlink()
            elif failure.exists():
                found.append((key, None))
                log.warning("a part of the rounds stays uncompiled: %s", failure.read_text())
            else:
                continue
            del self._jobs[key]
        self._start()
        return found

    def close(self) -> None:
        """End the children, and forget their jobs."""
        self._jobs.clear()
        self._end()
        self._open()

    def _open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="spec_compile_"))
        self.processes: list[subprocess.Popen] = []
        self._owner, self._number, self._deaths = os.getpid(), 0, 0
        self._end = weakref.finalize(self, _end, self._owner, self.folder, self.processes)  # also when Python ends

    def _follow_fork(self) -> None:
        if os.getpid() != self._owner:
            self._end.detach()
            self._open()
            for key, job in list(self._jobs.items()):
                self.submit(key, job)

    def _bury(self) -> None:
        """Fail the jobs that dead children were compiling."""
        for process in [process for process in self.processes if process.poll() is not None]:
            self.processes.remove(process)
            self._deaths += process.returncode != 0
            for taken in self.folder.glob(f"*.taken-{process.pid}"):
                _write(self.folder / f"{_key(taken)}.failed", f"its child ended with {process.returncode}".encode())
                taken.unlink()
        if self._deaths >= MOST_DEATHS:
            for waiting in self.folder.glob("*.job"):
                _write(self.folder / f"{_key(waiting)}.failed", b"its children end at once")
                waiting.unlink()

    def _start(self) -> None:
        """Start children, no more than there are jobs."""
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        here = str(Path(__file__).parents[2])
        code = (
            f"import os, sys; os.nice({NICENESS}); sys.path[:0] = [{here!r}]; "
            f"from spec_compile.artefacts.children import work; work({str(self.folder)!r}, {self._owner})"
        )
        while len(self.processes) < min(self.count, len(self._jobs)):
            # A session of its own: Ctrl-C is for the parent, and the compilers that a child runs end with it.
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code], cwd=self.folder, env=environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip


def work(folder: str, parent: int) -> None:
    """Compile the jobs of a folder until there have been none for a while, or the parent is gone."""
    import torch

    from .parts import compile_part, read_job

    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    idle = 0.0
    while idle < IDLE_SECONDS:
        taken = _take(Path(folder))
        if taken is None:
            idle += LOOK_SECONDS
            time.sleep(LOOK_SECONDS)
            continue
        idle = 0.0
        try:
            job = read_job(taken.read_text())
            torch.set_num_threads(job.threads)
            _write(taken.with_name(f"{_key(taken)}.part"), compile_part(job))
        except Exception as error:
            _write(taken.with_name(f"{_key(taken)}.failed"), f"{type(error).__name__}: {error}".encode())
        taken.unlink(missing_ok=True)


def _take(folder: Path) -> Path | None:
    """Make the oldest job this process's own; None if there is none."""
    for job in sorted(folder.glob("*.job")):
        try:
            return job.rename(job.with_suffix(f".taken-{os.getpid()}"))
        except OSError:  # another child has taken it
            continue
    return None


def _key(file: Path) -> str:
    return file.stem.partition("-")[2]


def _write(file: Path, data: bytes) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_bytes(data)
    part.rename(file)


def _end_with(parent: int, folder: str) -> None:
    """End this child and the compilers that it runs when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def _end(owner: int, folder: Path, processes: list[subprocess.Popen]) -> None:
    if os.getpid() != owner:  # forked: they are the parent's
        return
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
