"""Child processes that compile parts. They hold no weights, yield to all other work, and end with their parent.

Inductor's own compile workers compile kernels of a graph, and leave the graph to the process that has it, which takes
most of the time. These take whole graphs.

A folder is their queue: ``000007-KEY.job`` is a job that waits, ``000007-KEY.taken-PID`` one that a child compiles, and
``KEY.part`` or ``KEY.failed`` its result, which appears whole.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..folders import own_folder, temporary_folder
from ..kernels.cpu import processors

NICENESS = 15
LOOK_SECONDS = 0.1
"""Between two looks of a child for a job, and for its parent."""
IDLE_SECONDS = 20.0
"""After so long without a job a child ends; the next job starts another."""
MOST_DEATHS = 3
"""Children that may die at work; then every job that is left fails."""


def number_of_workers() -> int:
    """Processes that compile: the environment variable SPEC_COMPILE_CHILDREN, or half of the processors, 8 at most, and
    one if there are up to 4. ValueError if the variable is no number of 0 or more."""
    text = os.environ.get("SPEC_COMPILE_CHILDREN", "")
    if text and not text.isdecimal():
        raise ValueError(f"SPEC_COMPILE_CHILDREN: expected a number of 0 or more, got {text!r}")
    count = processors()
    return int(text) if text else 1 if count <= 4 else min(8, count // 2)


@cache
def workers() -> "CompileWorkers":
    """The child processes of this process. OSError if there is no folder for temporary files."""
    return CompileWorkers(number_of_workers())


class CompileWorkers:
    """Up to `count` child processes, which are started when there are jobs. A forked process gets its own."""

    def __init__(self, count: int = 1):
        if count < 1:
            raise ValueError(f"count: expected 1 or more children, got {count}")
        self.count = count
        self._jobs: dict[str, str] = {}
        """The texts of jobs without a result, by key."""
        self._wanted: Counter[str] = Counter()
        """By key, how many wait for it or have its result."""
        self._open()

    def submit(self, key: str, job: str) -> None:
        """Let a child compile a job for `compile_part`, unless that was asked for before. key: names its result.

        OSError if the folder cannot be written to, or no process be started."""
        self._follow_fork()
        with self._lock:
            self._wanted[key] += 1
            if key not in self._jobs and not self.is_over(key):
                self._write_job(key, job)
            self._start()

    def forget(self, key: str) -> None:
        """Undo a `submit`, whose result nobody needs. A job that a child has begun with goes on."""
        self._wanted[key] -= 1
        if not self._wanted[key] and os.getpid() == self._owner:
            for waiting in self.folder.glob(f"*-{key}.job"):
                waiting.unlink(missing_ok=True)
                self._jobs.pop(key, None)

    def is_over(self, key: str) -> bool:
        """True if a job has its result."""
        return any((self.folder / f"{key}.{kind}").exists() for kind in ("part", "failed"))

    def collect(self, keys: Iterable[str]) -> list[tuple[str, bytes | None, str]]:
        """(key, compiled part, "") for each of these jobs that is done, and (key, None, reason) for each that failed.
        Results stay for others that submit the same job. OSError if the folder is gone, or no process can be started.
        """
        self._follow_fork()
        if not self.folder.is_dir():
            raise FileNotFoundError(f"the folder of the processes that compile is gone: {self.folder}")
        with self._lock:
            self._bury()
            for key in filter(self.is_over, list(self._jobs)):
                del self._jobs[key]
            self._start()
        found = list[tuple[str, bytes | None, str]]()
        for key in filter(self.is_over, keys):
            result = self.folder / f"{key}.part"
            if result.exists():
                found.append((key, result.read_bytes(), ""))
            else:
                found.append((key, None, result.with_suffix(".failed").read_text()))
        return found

    def help(self) -> bool:
        """Compile a job in this process. False if none waits."""
        self._follow_fork()
        return _work_once(self.folder)

    def close(self) -> None:
        """End the children, and forget their jobs."""
        self._jobs.clear()
        self._wanted.clear()
        self._end()
        self._open()

    def _open(self) -> None:
        self.folder = temporary_folder()
        self.processes: list[subprocess.Popen] = []
        self._owner, self._number, self._deaths = os.getpid(), 0, 0
        self._lock = threading.RLock()
        self._end = weakref.finalize(self, _end, self._owner, self.folder, self.processes)  # also when Python ends

    def _follow_fork(self) -> None:
        if os.getpid() != self._owner:
            self._end.detach()
            self._open()
            for key, job in list(self._jobs.items()):
                self._write_job(key, job)
            self._start()

    def _write_job(self, key: str, job: str) -> None:
        self._jobs[key] = job
        _write(self.folder / f"{self._number:06d}-{key}.job", job.encode())
        self._number += 1

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
        if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
            # Otherwise each child compiles torch's Python anew, which takes 20 seconds. Packages stay as they are.
            environment["PYTHONPYCACHEPREFIX"] = str(own_folder("pycache", environment.get("PYTHONPYCACHEPREFIX")))
        here = str(Path(__file__).parents[2])
        code = (
            f"import os, sys; os.nice({NICENESS}); sys.path[:0] = [{here!r}]; "
            f"from spec_compile.compile.workers import work; work({str(self.folder)!r}, {self._owner})"
        )
        while len(self.processes) < min(self.count, len(self._jobs)):
            # A new session: Ctrl-C is for the parent, and the compilers that a child runs end with it.
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code], cwd=self.folder, env=environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip


def work(folder: str, parent: int) -> None:
    """Compile the jobs of a folder until there have been none for a while, or the parent is gone."""
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    idle = 0.0
    while idle < IDLE_SECONDS:
        if _work_once(Path(folder)):
            idle = 0.0
        else:
            idle += LOOK_SECONDS
            time.sleep(LOOK_SECONDS)


def _work_once(folder: Path) -> bool:
    """Compile the oldest job that waits. False if there is none."""
    import torch

    from .part import compile_part

    taken, threads = None, torch.get_num_threads()
    for waiting in sorted(folder.glob("*.job")):
        with suppress(OSError):  # another child has taken it
            taken = waiting.rename(waiting.with_suffix(f".taken-{os.getpid()}"))
            break
    if taken is None:
        return False
    try:
        job = taken.read_text()
        torch.set_num_threads(json.loads(job)["threads"])  # OpenMP threads that Inductor bakes into its loops
        _write(taken.with_name(f"{_key(taken)}.part"), compile_part(job))
    except Exception as error:
        _write(taken.with_name(f"{_key(taken)}.failed"), f"{type(error).__name__}: {error}".encode())
    finally:
        torch.set_num_threads(threads)
    taken.unlink(missing_ok=True)
    return True


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
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
