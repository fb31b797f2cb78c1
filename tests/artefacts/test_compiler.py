"""`PartCompiler`: what is stored is not compiled again, damaged files are, and parts are adopted between calls only."""

import pytest
import torch
from torch import nn

from spec_compile.artefacts.compiler import PartCompiler, PartSource, counts
from spec_compile.artefacts.parts import compile_part, read_job


class Memory(dict):
    """A store."""

    read, write = dict.get, dict.__setitem__


class Doing:
    """Children that have done their jobs when `finish` is called; a job that `fails` gets no result."""

    def __init__(self):
        self.jobs, self.done, self.fails = {}, [], set()

    def submit(self, key, job):
        assert key not in self.jobs
        self.jobs[key] = job

    def finish(self):
        self.done = [
            (key, None if key in self.fails else compile_part(read_job(job))) for key, job in self.jobs.items()
        ]
        self.jobs = {}

    def collect(self):
        done, self.done = self.done, []
        return done


class Counter(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("total", torch.zeros(rows))

    def add(self, x):
        self.total.add_(x.sum(1))
        return self.total * 2


def compiler(source):
    return PartCompiler(torch.device("cpu"), "test", (5,), 5, 41, exact=False, source=source)


def became(work):
    """By how much each count grows."""
    before = counts.copy()
    work()
    return {name: counts[name] - before[name] for name in ("traced", "compiled", "loaded")}


def use(source, rows=(5, 2, 9)):
    """The first call has 5 rows; each owner has its own buffers."""
    make = compiler(source)
    for number in rows:
        owner = Counter(number)
        add = make(owner.add, "add")
        for _ in range(2):
            x, before = torch.randn(number, 7), owner.total.clone()
            assert torch.allclose(add(x), 2 * (before + x.sum(1)), atol=1e-5)
            assert torch.allclose(owner.total, before + x.sum(1), atol=1e-5)


def test_a_stored_part_is_not_compiled_again():
    source = PartSource(Memory())
    assert became(lambda: use(source)) == dict(traced=1, compiled=1, loaded=1)
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=1)
    assert became(lambda: use(PartSource())) == dict(traced=1, compiled=1, loaded=1)
    (key,) = source.store
    whole = source.store[key]
    for damaged in (b"", whole[: len(whole) // 2], b"\x80\x04N.", b"nothing"):
        source.store[key] = damaged
        assert became(lambda: use(source)) == dict(traced=1, compiled=1, loaded=1)
        assert len(source.store[key]) == len(whole)


def test_parts_are_eager_until_they_are_adopted():
    children = Doing()
    source = PartSource(Memory(), children)
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=0)
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=0) and len(children.jobs) == 1
    assert source.adopt() == 2
    owner = Counter(5)
    add = compiler(source)(owner.add, "add")
    add(torch.ones(5, 7))
    children.finish()
    assert became(lambda: add(torch.ones(5, 7)))["loaded"] == 0, "compiled, and not adopted"
    assert source.adopt() == 0 and len(source.store) == 1
    assert torch.equal(add(torch.ones(5, 7)), torch.full((5,), 42.0))
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=1)


def test_a_part_that_children_cannot_compile_stays_eager():
    children = Doing()
    source = PartSource(Memory(), children)
    use(source)
    children.fails = set(children.jobs)
    children.finish()
    assert became(lambda: source.adopt()) == dict(traced=0, compiled=0, loaded=0)
    assert not source.waiting and not source.store
    use(source)


def test_no_first_call_has_the_sizes_of_a_session():
    make = compiler(None)
    add = make(Counter(5).add, "add")
    make.is_open = False
    with pytest.raises(AssertionError, match="sizes of a session"):
        add(torch.randn(5, 7))


def test_a_function_that_fails_when_it_is_traced_can_be_tried_again():
    make = compiler(None)
    is_broken = True

    def fragile(x):
        if is_broken:
            raise RuntimeError("broken")
        return x + 1

    part = make(fragile, "fragile")
    with pytest.raises(RuntimeError, match="broken"):
        part(torch.ones(5))
    is_broken = False
    assert torch.equal(part(torch.ones(5)), torch.full((5,), 2.0))
