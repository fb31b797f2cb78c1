"""`PartCompiler`: what is stored is not compiled again, damaged files are, and parts are adopted between calls only."""

import gc
import json
import threading

import pytest
import torch
from fake_children import Doing
from torch import nn

from spec_compile.compile.part import PartCompiler, Parts, counts, recording


class Memory(dict):
    """A store."""

    read, write = dict.get, dict.__setitem__


class Counter(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("total", torch.zeros(rows))

    def add(self, x):
        self.total.add_(x.sum(1))
        return self.total * 2


def compiler(source):
    return PartCompiler(torch.device("cpu"), "test", (5,), 5, 41, exact=False, parts=source)


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
    source = Parts(Memory())
    assert became(lambda: use(source)) == dict(traced=1, compiled=1, loaded=1)
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=1)
    assert became(lambda: use(Parts())) == dict(traced=1, compiled=1, loaded=1)
    (key,) = source.store
    whole = source.store[key]
    for damaged in (b"", whole[: len(whole) // 2], b"\x80\x04N.", b"nothing"):
        source.store[key] = damaged
        assert became(lambda: use(source)) == dict(traced=1, compiled=1, loaded=1)
        assert len(source.store[key]) == len(whole)


def background(store=None):
    return Parts(store, Doing(), at_once=False)


def record(source):
    """Use parts inside a recording, and trace them after it."""
    with recording() as calls:
        use(source)
    for part, arguments in calls.items():
        part.trace(arguments)


def test_parts_are_eager_until_they_are_adopted():
    source = background(Memory())
    assert became(lambda: use(source)) == dict(traced=0, compiled=0, loaded=0), "only first calls in a recording count"
    assert became(lambda: record(source)) == dict(traced=1, compiled=0, loaded=0)
    make = compiler(source)
    owner, (first, second) = Counter(5), [Counter(rows) for rows in (5, 3)]
    with recording() as calls:
        adds = [make(owner.add, "add"), make(first.add, "add"), make(second.add, "add")]
        for add, rows in zip(adds, (5, 5, 3)):
            add(torch.ones(rows, 7))
    assert len(calls) == 1 and became(lambda: [part.trace(given) for part, given in calls.items()])["traced"] == 1
    assert [len(parts) for parts in source.waiting.values()] == [2], "equal parts are one job"
    source.load()
    assert not source.ready
    source.workers.finish()
    source.load()
    assert len(source.ready) == 2 and len(source.store) == 1 and not source.waiting
    (part,) = make._made.values()
    assert part.loaded is None, "compiled, and not adopted"
    assert torch.equal(adds[0](torch.ones(5, 7)), torch.full((5,), 28.0))
    source.adopt()
    assert part.loaded is not None and source.adopted == 2
    assert torch.equal(adds[0](torch.ones(5, 7)), torch.full((5,), 42.0))
    assert torch.equal(adds[2](torch.ones(3, 7)), torch.full((3,), 28.0))
    assert became(lambda: record(source)) == dict(traced=1, compiled=0, loaded=1), "from the store"


def test_what_was_traced_before_is_recalled_without_a_trace():
    source = background(Memory())
    source.identity = "code"
    with recording() as calls:
        use(source)
    ((part, given),) = calls.items()
    assert not part.recall(given), "nobody has traced it"
    part.trace(given)
    source.workers.finish()
    source.load()
    assert part.recall(given), "it is traced already"
    later = Parts(source.store, at_once=False)
    later.identity = "code"
    with recording() as calls:
        use(later)
    ((part, given),) = calls.items()
    assert became(lambda: part.recall(given)) == dict(traced=0, compiled=0, loaded=1) and len(later.ready) == 1


def test_a_recording_is_of_one_thread():
    source, make = background(), None
    make = compiler(source)
    other = make(lambda x: x + 1, "other")
    with recording() as calls:
        thread = threading.Thread(target=lambda: other(torch.ones(5)))
        thread.start()
        thread.join()
        assert not calls
        other(torch.ones(5))
        assert len(calls) == 1
    other(torch.ones(5))
    assert not source.waiting


@pytest.mark.parametrize("fault", ["compile", "load", "submit"])
def test_a_part_that_children_cannot_compile_stays_eager(fault, caplog):
    source = background(Memory())
    source.workers.is_broken = fault == "submit"
    if fault == "submit":
        with pytest.raises(OSError, match="no processes"):
            record(source)
        assert not source.waiting
        return
    record(source)
    source.workers.fails = set(source.workers.jobs) if fault == "compile" else set()
    source.workers.finish()
    if fault == "load":
        source.workers.done = dict.fromkeys(source.workers.done, (b"damaged", ""))
    source.load()
    assert not source.waiting and not source.ready and not source.store and len(source.failures) == 1
    source.fail("another")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"a part of the rounds stays uncompiled, so that they take longer: {source.failures[0]}"
    ]
    use(source)


def test_jobs_of_a_source_that_is_gone_are_forgotten():
    source = background()
    children = source.workers
    record(source)
    assert len(children.jobs) == 1
    del source
    gc.collect()
    assert not children.jobs


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


def test_a_part_that_was_traced_before_is_recalled():
    """By a source of the same identity, for calls of the same inputs."""
    store = Memory()
    source = Parts(store)
    source.identity = "a"
    assert became(lambda: use(source)) == dict(traced=1, compiled=1, loaded=1)
    assert became(lambda: use(source)) == dict(traced=0, compiled=0, loaded=1)
    assert became(lambda: use(source, rows=(10, 3))) == dict(traced=1, compiled=1, loaded=1), "other inputs"
    source.identity = "b"
    assert became(lambda: use(source)) == dict(traced=1, compiled=0, loaded=1)
    other = background(store)
    other.identity = "a"
    assert became(lambda: record(other)) == dict(traced=0, compiled=0, loaded=1)
    assert not other.waiting and len(other.ready) == 1


@pytest.mark.parametrize("damage", ["form", "kind", "key", "part", "gone"])
def test_a_damaged_form_is_made_anew(damage):
    source = Parts(Memory())
    source.identity = "a"
    use(source)
    store = source.store
    (form,) = (name for name in store if store[name].startswith(b"{"))
    (part,) = store.keys() - {form}
    content = json.loads(store[form])
    if damage in ("part", "gone"):
        store.pop(part) if damage == "gone" else store.update({part: b"damaged"})
    else:
        content = {"form": {**content, "sources": [[]]}, "kind": [content], "key": {**content, "part": "0" * 64}}[
            damage
        ]
        store[form] = json.dumps(content).encode()
    assert became(lambda: use(source))["traced"] == 1
    assert became(lambda: use(source))["traced"] == 0
