"""The CPU: its cores on which a step has threads, and the level of instructions that kernels take."""

import ctypes
import functools
import itertools
import logging
import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..compat import levels_of_cpu

log = logging.getLogger("spec_compile")
ROOT = Path("/")
THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
"""Environment variables by which a user chooses the number of threads."""


def fit_threads() -> None:
    """Lower torch's number of threads to `cores`, unless one of `THREADS` is set.

    A thread that has no core, or no time, keeps all others waiting at the end of every op. In a container that has the
    time of one core, plain steps of SmolLM2-135M give 44 to 50 tokens a second with two threads, and 64 to 66 with one.
    """
    present, most = torch.get_num_threads(), cores()
    if present > most and not any(name in os.environ for name in THREADS):
        log.info("steps take %d threads in place of %d, as many as there are cores for this process", most, present)
        torch.set_num_threads(most)


def cores(root: Path = ROOT) -> int:
    """Physical cores, at least 1: as many as the process's affinity has, and no more than `quota`, rounded up.

    Example: among four cores the first has processors 0 and 4. A process that may run on 0, 1, 4 and 5 has 2 cores.
    """
    # Processors with the same list of siblings share a core.
    topology = root / "sys/devices/system/cpu"
    siblings = (_text(topology / f"cpu{each}/topology/thread_siblings_list") or str(each) for each in _affinity())
    return _within_quota(len({*siblings}), root)


def processors(root: Path = ROOT) -> int:
    """The same of logical processors, of which a core may have two."""
    return _within_quota(len(_affinity()), root)


def quota(root: Path = ROOT) -> float:
    """Seconds of a processor's time that the process may take in a second; infinity if nothing limits them.

    Any control group between the process's own and the highest may have a limit. In version 2 a file ``cpu.max`` has
    "150000 100000" for 1.5 and "max 100000" for none; in version 1 two files have these numbers, and -1 for none.
    """
    limits = [math.inf]
    # "hierarchy:controllers:path" a line; in version 2 there is one line without controllers.
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / path.strip("/")
        for folder in [group, *group.parents][: len(Path(path).parts)]:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            numbers = " ".join(_text(folder / name) for name in names).split()
            if len(numbers) == 2 and numbers[0].isdecimal():
                limits.append(int(numbers[0]) / int(numbers[1]))
    return min(limits)


def _within_quota(count: int, root: Path) -> int:
    return max(1, math.ceil(min(count, quota(root))))


def _affinity() -> list[int]:
    """The numbers of the logical processors on which the process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def _text(path: Path) -> str:
    """The text of a file of the system; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""
LEAST_BYTES = 1 << 16
"""Smaller tensors stay in a processor's cache."""
NONE = ctypes.c_void_p(-1).value
"""The result of `mmap` if no addresses are left (MAP_FAILED)."""
HUGE, COLLAPSE, MAY_MOVE, FIXED = 14, 25, 1, 2
"""Numbers of Linux: use huge pages from now on (MADV_HUGEPAGE); collapse what is there (MADV_COLLAPSE, since 6.1); move
pages elsewhere (MREMAP_MAYMOVE), to an address that is in use (MREMAP_FIXED)."""


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move the memory of a CPU's tensors into huge pages, as far as Linux does that; addresses and numbers stay.

    A processor fetches nothing ahead from a page of 4 KB whose place it does not know. In huge pages the products of
    SmolLM2-135M's layers with one row take 0.53 of the time in bfloat16, 0.78 in int8 and 0.81 in int4 (AVX2, two cores
    of an Intel Xeon). A file's memory is copied if the copies take at most half of what is free.
    """
    if sys.platform == "linux":
        large = (x for x in tensors if x.device.type == "cpu" and x.nbytes >= LEAST_BYTES)
        spans = ((x.data_ptr(), x.data_ptr() + x.nbytes) for x in large)
        pages = sorted({page for begin, end in spans for page in range(begin // HUGE_PAGE, -(-end // HUGE_PAGE))})
        if pages:
            _copy_from_files(pages)
        for page, advice in itertools.product(pages, (HUGE, COLLAPSE)):
            _libc().madvise(page * HUGE_PAGE, HUGE_PAGE, advice)


def _copy_from_files(pages: Iterable[int]) -> None:
    """Put a copy into the place of each page that is a file's; page 3 begins at the address 3 * HUGE_PAGE.

    The place changes in one step, so that other threads may read meanwhile.
    """
    # A file whose changes stay in the process: "7f60a0000000-7f60b0000000 rw-p 00000000 08:01 1234 /a.safetensors".
    lines = map(str.split, _text(ROOT / "proc/self/maps").splitlines())
    spans = [span.split("-") for span, access, _, _, node, *_ in lines if access == "rw-p" and node != "0"]
    of_files = (range(-(-int(begin, 16) // HUGE_PAGE), int(end, 16) // HUGE_PAGE) for begin, end in spans)
    moved = sorted({*pages}.intersection(itertools.chain(*of_files)))
    room = (len(moved) + 1) * HUGE_PAGE
    if not moved or 2 * room > psutil.virtual_memory().available:
        return
    libc, access, kind = _libc(), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if (begin := libc.mmap(None, room, access, kind, -1, 0)) == NONE:  # the process may have no more addresses
        return
    libc.madvise(begin, room, HUGE)
    first = -(-begin // HUGE_PAGE)
    for copy, page in enumerate(moved, first):
        ctypes.memmove(copy * HUGE_PAGE, page * HUGE_PAGE, HUGE_PAGE)
        libc.mremap(copy * HUGE_PAGE, HUGE_PAGE, HUGE_PAGE, MAY_MOVE | FIXED, page * HUGE_PAGE)
    # The rest of the room goes. Places that copies have left may be another thread's by now.
    rest = first + len(moved)
    for start, end in ((begin, first * HUGE_PAGE), (rest * HUGE_PAGE, begin + room)):
        libc.munmap(start, end - start)


@functools.cache
def _libc() -> ctypes.CDLL:
    """The system's library, whose functions of memory take whole addresses."""
    libc, address, size, number = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes, libc.munmap.argtypes = (address, size, number), (address, size)
    libc.mmap.argtypes = address, size, number, number, number, ctypes.c_long
    libc.mremap.argtypes = address, size, size, number, address
    libc.mmap.restype = libc.mremap.restype = address
    return libc


# The level of instructions that kernels on a CPU take: the best that it has, or a lower one, as another CPU would.
#
# The environment variable SPEC_COMPILE_CPU_LEVEL names it before the package is imported.


VARIABLE = "SPEC_COMPILE_CPU_LEVEL"
LEVELS = "plain", "avx2", "avx512", "avx512_bf16", "amx"
"""From the lowest to the highest. A kernel that has no code for the chosen one takes the next lower."""
AMX = LEVELS.index("amx")


def chosen(present: Sequence[bool]) -> int:
    """The highest place in `LEVELS` that kernels may take: the one that `VARIABLE` names, without it the last.

    present: for each of `LEVELS`, if the CPU has it. ValueError if the variable names none, or one that it lacks.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return AMX
    here = [level for level, there in zip(LEVELS, present, strict=True) if there]
    if text not in LEVELS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(LEVELS)}, got {text!r}; unset it for the best")
    if text not in here:
        raise ValueError(f"{VARIABLE}: this CPU has {', '.join(here)}, not {text!r}; unset it for the best")
    return LEVELS.index(text)


PRESENT = levels_of_cpu()
HIGHEST = chosen(PRESENT)
"""See `chosen`."""
