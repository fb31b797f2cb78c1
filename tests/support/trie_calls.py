"""Calls at the door of the compiled trie that it has to refuse, and random ones among them. Needs no torch.

``python trie_calls.py MODULE SEED OPERATIONS`` loads a compiled module, which may be built with sanitizers, and prints
what was called.
"""

import importlib.util
import json
import random
import sys

import numpy as np

SIZES = 6, 1, 4, 1, 5, 60  # branch length, windows, breadths and capacity of the tries
NOT_OPEN = -1, 0, 77, 2**62, -(2**63), 2**63, "0", None, 1.5  # what is no open stream


def ids(*values):
    return np.array(values, dtype=np.int64)


def read_only(array):
    array.flags.writeable = False
    return array


def arrays(most=4):
    """Kinds of arrays of `most` numbers that are none of int64, or not in one piece."""
    raw = bytearray(8 * most + 1)
    return [
        None, 0, 2**40, -1, "ids", b"12345678" * most, [1] * most, object(), np.zeros(most, np.int32),
        np.zeros(most, np.uint64), np.zeros(most, np.float64), np.zeros(most, ">i8"), np.zeros(most, object),
        np.zeros(most, np.complex64), np.zeros((1, 1, most), np.int64), np.array(1), np.zeros(2 * most, np.int64)[::2],
        np.zeros(most, np.int64)[::-1], np.broadcast_to(ids(1), most), np.zeros(most, [("a", "i4"), ("b", "i4")]),
        np.frombuffer(raw, np.uint8)[1:].view(np.int64), np.zeros((2, most), np.int64).T, memoryview(raw),
    ]  # fmt: skip


def good(streams, width=4, nodes=3):
    """Arguments of ``advance`` for these streams, each with `width` tokens."""
    batch = len(streams)
    trees = [np.full((batch, nodes), -7), np.full((batch, nodes), -7)]
    return [
        ids(*streams), np.ones((batch, width), np.int64), np.full(batch, width), *trees, *np.full((2, batch), -7)
    ]  # fmt: skip


def with_one(arguments, place, value):
    return [*arguments[:place], value, *arguments[place + 1 :]]


def bad_calls(core_class):
    """(core, method, arguments) that raise TypeError or ValueError."""
    core = core_class(*SIZES, False, 50)
    stream = core.open()
    core.extend(stream, ids(1, 2))
    for name, rest in (("close", []), ("length", []), ("extend", [ids(1)]), ("propose", [ids(0, 0), ids(0, 0)])):
        for number in NOT_OPEN:
            if number != stream:
                yield core, name, [number, *rest]
    for array in arrays():
        yield core, "extend", [stream, array]
        yield core, "propose", [stream, array, ids(0, 0, 0, 0)]
        yield core, "propose", [stream, ids(0, 0, 0, 0), array]
    for tokens in (ids(50), ids(-1), ids(1, 2, 2**31), ids(2**32 + 1), ids(-(2**63)), ids(2**63 - 1)):
        yield core, "extend", [stream, tokens]
    for first, second in ((ids(), ids()), (ids(0), ids(0, 0)), (ids(*[0] * 65), ids(*[0] * 65))):
        yield core, "propose", [stream, first, second]
    for output in (read_only(ids(0, 0)), b"0" * 16):
        yield core, "propose", [stream, output, ids(0, 0)]
    empty = core.open()
    yield core, "propose", [empty, ids(0, 0), ids(0, 0)]
    for place in range(7):
        for array in arrays(1):
            if not isinstance(array, np.ndarray) or array.shape != (1,) or array.dtype != np.int64:
                yield core, "advance", with_one(good([stream]), place, array)
        shape = good([stream])[place].shape
        for other in ((0,), (2,), (0, 0), (2, shape[-1]), (1, 65), (1, 0), (1, 1, 1)):
            if other != shape and (place, other) != (1, (1, 65)):  # which is wider than committed says
                yield core, "advance", with_one(good([stream]), place, np.zeros(other, np.int64))
        if place > 2:
            yield core, "advance", with_one(good([stream]), place, read_only(np.zeros(shape, np.int64)))
    overlapping = np.broadcast_to(ids(1, 1, 1, 1), (2, 4))
    for place in (1, 3, 4):
        yield core, "advance", with_one(good([stream, empty]), place, overlapping[:, : 4 if place == 1 else 3])
    for ends in (0, 1, -1, 5, 2**31, 2**62, 2**63 - 1, -(2**63)):
        yield core, "advance", with_one(good([stream]), 2, ids(ends))
    for streams in ([stream, stream], [empty, -1, empty], [99], [2**63 - 1], [stream, 99]):
        yield core, "advance", good(streams)
    yield core, "advance", with_one(good([stream]), 1, np.full((1, 4), 2**31))
    core.extend(stream, ids(1, 3, 1, 2, 4))
    nodes, *parts = core.snapshot()
    for wrong in (-1, 2**62, nodes + 1, None, "1"):
        yield core, "restore", [wrong, *parts]
    for place in range(3):
        for part in (None, 0, "x", parts[place] + b"1", parts[place][:-1], parts[place] + bytes(4), np.zeros(2)):
            yield core, "restore", with_one([nodes, *parts], place + 1, part)
    yield core, "release", [False]
    yield core, "release", [True]
    yield core.overlay(), "overlay", []
    yield core_class.__new__(core_class), "open", []
    settings = [*SIZES, False, 50]
    for place, values in enumerate([(1, 257, -1, 2**31)] + [(0, -1, 2**31, 99)] * 2 + [(0, -1, 2**31)] * 2):
        for value in (*values, 2**70, None, "1", 1.5):
            yield core_class, "__call__", with_one(settings, place, value)
    for place, values in ((5, (0, -1, 11, 2**31, 2**63)), (7, (0, -1, 2**31 + 1, 2**63))):
        for value in values:
            yield core_class, "__call__", with_one(settings, place, value)


def refused(core, name, arguments):
    """Whether the call raises a TypeError or ValueError."""
    try:
        getattr(core, name)(*arguments)
    except (TypeError, ValueError):
        return True
    return False


def accepted_bad_calls(core_class):
    """(number of calls, those that were not refused)."""
    calls = [*bad_calls(core_class)]
    return len(calls), [(name, repr(given)) for core, name, given in calls if not refused(core, name, given)]


class Fuzz:
    """Random calls of one trie and its overlays, right and wrong ones."""

    def __init__(self, core_class, seed):
        self.random = random.Random(seed)
        self.counts = dict.fromkeys(("right", "refused", "snapshots"), 0)
        self.base = core_class(*SIZES, seed % 2 == 1, 50)
        self.cores = [self.base, self.base.overlay()]
        self.streams = [[], []]
        self.texts = {}

    def number(self):
        return self.random.choice([0, 1, -1, 49, 50, 2**31, 2**32, -(2**63), 2**63 - 1, self.random.randrange(50)])

    def step(self):
        at = self.random.randrange(2)
        core, streams = self.cores[at], self.streams[at]
        action = self.random.choice(["open", "extend", "extend", "propose", "advance", "close", "wrong", "snapshot"])
        stream = self.random.choice(streams) if streams else core.open()
        if not streams or action == "open":
            streams.append(stream if not streams else core.open())
        elif action == "close":
            streams.remove(stream)
            core.close(stream)
        elif action == "extend":
            core.extend(stream, ids(*(self.random.randrange(9) for _ in range(self.random.randrange(20)))))
        elif action == "snapshot":
            self.snapshot(at)
        else:
            self.call(core, streams, stream, action)
        self.counts["right"] += action not in ("wrong", "snapshot")

    def call(self, core, streams, stream, action):
        nodes = self.random.randrange(1, 65)
        if action == "propose" and core.length(stream):
            core.propose(stream, np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))
        if action == "advance":
            chosen = self.random.sample(streams, min(len(streams), 3))
            most = max(core.length(each) for each in chosen) + self.random.randrange(1, 5)
            arguments = good([*chosen, -1], most, nodes)
            arguments[1][:] = self.random.randrange(50)
            core.advance(*arguments)
        if action == "wrong":
            arguments = good([stream], self.random.randrange(9), nodes)
            place = self.random.randrange(7)
            shape = [self.random.randrange(3) for _ in range(self.random.randrange(3))]
            wrong = [self.random.choice(arrays(nodes)), np.full(shape, self.number())]
            calls = [("advance", with_one(arguments, place, each)) for each in wrong]
            calls += [("extend", [self.number(), wrong[0]]), ("extend", [stream, ids(self.number(), self.number())])]
            calls += [("propose", [stream, *self.random.sample([*wrong, arguments[3][0]], 2)])]
            self.counts["refused"] += sum(refused(core, *each) for each in calls)

    def snapshot(self, at):
        """Put back a snapshot of which bytes have changed: it is refused, or it is a trie."""
        nodes, *parts = self.cores[at].snapshot()
        place = self.random.randrange(3)
        part = bytearray(parts[place])
        if part:
            part[self.random.randrange(len(part))] ^= 1 << self.random.randrange(8)
        self.counts["snapshots"] += 1
        if not refused(self.cores[at], "restore", with_one([nodes, *parts], place + 1, bytes(part))):
            self.streams[at].clear()


def main():
    path, seed, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    spec = importlib.util.spec_from_file_location("_ngram_trie", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    number, accepted = accepted_bad_calls(module.Core)
    totals = {"bad calls": number, "right": 0, "refused": 0, "snapshots": 0}
    for part in range(10):
        fuzz = Fuzz(module.Core, seed + part)
        for _ in range(operations // 10):
            fuzz.step()
        totals |= {name: totals[name] + count for name, count in fuzz.counts.items()}
    print(json.dumps(totals | {"accepted": accepted}))


if __name__ == "__main__":
    main()
