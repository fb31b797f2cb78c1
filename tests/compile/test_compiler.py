"""`PartCompiler`: what is stored is not compiled again, damaged files are, and parts are adopted between calls only."""

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


def test_a_recording_is_of_one_thread():
    source = Parts(None, Doing(), at_once=False)
    other = compiler(source)(lambda x: x + 1, "other")
    with recording() as calls:
        thread = threading.Thread(target=lambda: other(torch.ones(5)))
        thread.start()
        thread.join()
        assert not calls
        other(torch.ones(5))
        assert len(calls) == 1
    other(torch.ones(5))
    assert not source.waiting


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
    other = Parts(store, Doing(), at_once=False)
    other.identity = "a"
    with recording() as calls:
        use(other)
    ((part, given),) = calls.items()
    assert became(lambda: part.trace(given)) == dict(traced=0, compiled=0, loaded=1)
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
