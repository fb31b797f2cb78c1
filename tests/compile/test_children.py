"""CompileWorkers: they compile, they fail by name, and no way in which a process ends leaves any behind."""

import os
import shutil
import signal
import time

import pytest
import torch

from spec_compile.compile import part as parts
from spec_compile.compile import workers as module
from spec_compile.compile.part import digest_of, job_of, load_part
from spec_compile.compile.workers import CompileWorkers

JOB = job_of(
    [["", [], {}], ["aten.mul.Tensor", [{"row": 0}, 3], {}], ["output", [[{"row": 1}]], {}]],
    [[[5, 8], [8, 1], [0], "float32", "cpu"]], {}, 1,
)  # fmt: skip
LONG = 60


@pytest.fixture
def children():
    made = CompileWorkers(1)
    yield made
    made.close()


def results(children, count):
    found, begin = {}, time.monotonic()
    while len(found) < count and time.monotonic() < begin + 3 * LONG:
        found |= {key: data for key, data, _ in children.collect(list(children._wanted))}
        time.sleep(0.05)
    return found


def wait_until(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + LONG
        time.sleep(0.05)


def reason(children, key):
    return children.collect([key])[0][2]


@pytest.mark.slow
def test_jobs_are_compiled_or_fail_by_name(children):
    children.submit("bad", JOB.replace("aten.mul.Tensor", "os.system"))
    children.submit("worse", "{")
    children.submit(digest_of(JOB), JOB)
    found = results(children, 3)
    assert found.keys() == {"bad", "worse", digest_of(JOB)} and found["bad"] is found["worse"] is None
    assert "os.system" in reason(children, "bad") and len(children.processes) == 1
    x = torch.randn(3, 8)
    assert torch.equal(load_part(found[digest_of(JOB)])(x)[0], x * 3)
    children.submit(digest_of(JOB), JOB)
    assert not children._jobs and children.is_over(digest_of(JOB)), "its result is still there"


def test_this_process_helps_and_forgets(children, monkeypatch):
    """Its children never begin, and what it compiles is told by the threads that it has meanwhile."""
    monkeypatch.setattr(module.sys, "executable", "/bin/true")
    monkeypatch.setattr(parts, "compile_part", lambda job: f"{job} {torch.get_num_threads()}".encode())
    torch.set_num_threads(threads := 2)
    children.submit("first", JOB)
    children.submit("second", JOB)
    children.submit("second", JOB)
    children.forget("second")
    assert "second" in children._jobs, "another waits for it"
    children.forget("second")
    assert list(children._jobs) == ["first"] and not list(children.folder.glob("*second*"))
    while children.help():
        pass
    assert results(children, 1)["first"] == f"{JOB} 1".encode()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert not children.help()


def test_a_folder_that_is_gone_is_an_error(children):
    children.submit("lost", JOB)
    shutil.rmtree(children.folder)
    with pytest.raises(FileNotFoundError, match="folder"):
        children.collect(["lost"])
    with pytest.raises(FileNotFoundError):
        children.submit("next", JOB)


@pytest.mark.parametrize(("value", "count"), [("0", 0), ("3", 3), ("", None)])
def test_the_number_of_workers(value, count, monkeypatch):
    monkeypatch.setenv("SPEC_COMPILE_CHILDREN", value)
    assert module.number_of_workers() == count or (count is None and 1 <= module.number_of_workers() <= 8)


def test_wrong_numbers_of_workers_are_refused(monkeypatch):
    monkeypatch.setenv("SPEC_COMPILE_CHILDREN", "-1")
    with pytest.raises(ValueError, match="SPEC_COMPILE_CHILDREN: expected"):
        module.number_of_workers()
    with pytest.raises(ValueError, match="count: expected 1 or more"):
        CompileWorkers(0)


@pytest.mark.slow
def test_a_child_that_is_killed_at_work_fails_its_job_and_another_does_the_next(children):
    children.submit("killed", JOB)
    wait_until(lambda: list(children.folder.glob("*.taken-*")))
    (process,) = children.processes
    os.killpg(process.pid, signal.SIGKILL)
    children.submit("next", JOB)
    found = results(children, 2)
    assert found["killed"] is None and found["next"] and "its child ended with -9" in reason(children, "killed")


def test_children_that_end_at_once_are_not_started_for_ever(children, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    for key in "abc":
        children.submit(key, JOB)
    assert results(children, 3) == dict.fromkeys("abc")
    assert not children.processes


def test_the_end_of_a_forked_process_is_not_that_of_its_parents_children(children):
    children.submit(digest_of(JOB), JOB)
    (process,) = children.processes
    child = os.fork()
    if not child:
        children._end()  # as Python does when it ends
        os._exit(0)
    os.waitpid(child, 0)
    assert process.poll() is None and children.folder.exists()
