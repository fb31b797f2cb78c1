"""The number of threads of a CPU's steps, one for each core that the process has, and huge pages of weights."""

import logging
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spec_compile import speculate
from spec_compile.kernels import cpu as cores


def write(root, **texts):
    """Files of a system, by their path with "__" for "/"."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2),
        ("4:cpuset:/x\n3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "25000"}, 2),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, math.inf),
        # A container sees its own group at the place of the highest, under the path that the host has for it.
        ("3:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpuset:/", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_the_quota_of_control_groups(groups, files, expected, tmp_path):
    write(tmp_path, proc__self__cgroup=groups, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    assert cores.quota(tmp_path) == expected


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cores.quota(tmp_path) == math.inf


@pytest.mark.parametrize(
    "affinity, quota, physical, logical",
    [([0, 1, 4, 5], "max", 2, 4), ([0, 4], "max", 1, 2), ([1, 4, 6], "max", 3, 3), ([*range(8)], 250, 3, 3),
     ([*range(8)], 10, 1, 1), ([*range(8)], 600, 4, 6)],
)  # fmt: skip
def test_two_threads_of_one_core_count_once(affinity, quota, physical, logical, tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_affinity", lambda: affinity)
    siblings = {f"sys__devices__system__cpu__cpu{n}__topology__thread_siblings_list": f"{n % 4},{n % 4 + 4}"
                for n in range(8)}  # fmt: skip
    write(tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": f"{quota} 100"}, **siblings)
    assert (cores.cores(tmp_path), cores.processors(tmp_path)) == (physical, logical)


def test_processors_of_this_machine_are_those_of_its_affinity():
    assert 1 <= cores.cores() <= cores.processors() <= len(os.sched_getaffinity(0))


@pytest.fixture
def four_threads(monkeypatch):
    for name in cores.THREADS:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_speculate_takes_no_more_threads_than_cores(four_threads, monkeypatch, caplog):
    from models import ADMITTED

    monkeypatch.setattr(cores, "cores", lambda: 3)
    with caplog.at_level(logging.INFO, "spec_compile"):
        speculate(ADMITTED["llama"](), compile=False, check=False)
    assert torch.get_num_threads() == 3
    assert "3 threads in place of 4" in caplog.text


@pytest.mark.parametrize("chosen, available", [("OMP_NUM_THREADS", 1), ("MKL_NUM_THREADS", 1), (None, 4), (None, 8)])
def test_a_users_choice_and_a_number_that_fits_stay(four_threads, chosen, available, monkeypatch):
    monkeypatch.setattr(cores, "cores", lambda: available)
    if chosen is not None:
        monkeypatch.setenv(chosen, "4")
    cores.fit_threads()
    assert torch.get_num_threads() == 4


def owned(path):
    return torch.randn(NUMBERS)


def read_from_a_file(path):
    torch.randn(NUMBERS).numpy().tofile(path)
    return torch.from_file(str(path), shared=False, size=NUMBERS)


NUMBERS = 3 * cores.HUGE_PAGE // 4


@pytest.mark.parametrize("free", [1 << 40, 1 << 20])
@pytest.mark.parametrize("made", [owned, read_from_a_file])
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")
def test_weights_lie_in_huge_pages(made, free, tmp_path, monkeypatch):
    """A mapping's flags have "hg" where a huge page is asked for. Addresses and numbers stay. Memory of a file is
    replaced, if there is room, and not changed."""
    monkeypatch.setattr(cores.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    path = tmp_path / "weights"
    x = made(path)
    at, before = x.data_ptr(), x.clone()
    cores.use_huge_pages([x, torch.ones(3), torch.empty(0), torch.empty(4, device="meta")])
    assert x.data_ptr() == at and torch.equal(x, before)
    flags, begin, end, file, inside = None, 0, 0, "", -(-at // cores.HUGE_PAGE) * cores.HUGE_PAGE
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            file = str(path) if line.endswith(str(path)) else ""
        elif line.startswith("VmFlags:") and begin <= inside < end:
            flags, from_file = line.split()[1:], bool(file)
    assert "hg" in flags and from_file == (made is read_from_a_file and free == 1 << 20)
    x.zero_()
    if made is read_from_a_file:  # which nothing has changed
        assert torch.equal(torch.from_file(str(path), size=NUMBERS), before)


def test_a_process_without_addresses_keeps_its_files(tmp_path, monkeypatch):
    x = read_from_a_file(tmp_path / "weights")
    before, asked = x.clone(), []
    system = SimpleNamespace(mmap=lambda *_: cores.NONE, madvise=lambda at, *_: asked.append(at))
    monkeypatch.setattr(cores, "_libc", lambda: system)
    cores.use_huge_pages([x])
    assert torch.equal(x, before) and cores.NONE not in asked
