"""The tree and the memory of kept blocks against plain lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.batching import prefix_blocks
from spec_compile.batching.prefix_blocks import Block, BlockMemory, PrefixTree

TEXTS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6)


class PlainTree:
    """Prefixes, newest first: the first `device` of them lie on the device, the next `host` in host memory."""

    def __init__(self, device, host):
        self.room, self.device, self.prefixes, self.evicted = device + host, device, [], 0

    def keep(self, keys):
        new = [tuple(keys[: n + 1]) for n in range(len(keys))][: self.room]
        prefixes = [*new, *(prefix for prefix in self.prefixes if prefix not in new)]
        self.prefixes, dropped = prefixes[: self.room], prefixes[self.room :]
        self.evicted += len(dropped)

    def tier(self, prefix):
        return "device" if self.prefixes.index(prefix) < self.device else "host"


def prefixes(block, prefix=()):
    """All blocks below one, by their prefix."""
    for key, child in block.children.items():
        yield (*prefix, key), child
        yield from prefixes(child, (*prefix, key))


@given(st.integers(0, 5), st.integers(0, 5), st.lists(TEXTS | st.none(), max_size=25))
def test_the_tree_is_the_plain_list(device, host, operations):
    """None clears. `contents` has what the copies have brought to each place."""
    tree, plain = PrefixTree(device, host), PlainTree(device, host)
    contents: dict = {}
    for text in operations:
        if text is None:
            tree.clear()
            plain.prefixes = []
            continue
        copies = tree.keep(text)
        plain.keep(text)
        for source, target in copies.demoted:
            contents[target] = contents[source]
        for number, place in copies.written:
            contents[place] = tuple(text[: number + 1])
        kept = dict(prefixes(tree._root))
        assert kept.keys() == {*plain.prefixes} and tree.evicted == plain.evicted
        for prefix, block in kept.items():
            (place,) = block.places
            assert tree.tier(block) == plain.tier(prefix) and contents[place] == prefix
            assert 0 <= place < device + host and tree.match(list(prefix))[-1] is block
        assert len({block.places[0] for block in kept.values()}) == len(kept)
        assert tree.used["device"] + tree.used["host"] == len(kept)
        longest = next((n for n in range(len(text), 0, -1) if tuple(text[:n]) in kept), 0)
        assert len(tree.match(text)) == longest


ENDINGS = [b"", b"x", b"xy"]
ENDS = st.sampled_from(ENDINGS)


@given(st.integers(0, 6), st.integers(0, 9), st.integers(2, 5), st.lists(st.tuples(TEXTS, ENDS), max_size=25))
def test_ends_take_several_places(device, host, size, texts):
    """Places are never shared, contents are where the copies have brought them, and a text is kept whole or not."""
    tree, contents = PrefixTree(device, host), {}
    for text, end in texts:
        copies = tree.keep(text, end, size)
        for source, target in copies.demoted:
            contents[target] = contents[source]
        for number, place in copies.written:
            contents[place] = tuple(text[: number + 1]), 0
        for part, place in enumerate(copies.end):
            contents[place] = (*text, end), part
        kept = dict(prefixes(tree._root))
        for prefix, block in kept.items():
            assert [contents[place] for place in block.places] == [(prefix, part) for part in range(block.size)]
            assert block.size == (size if block.is_end else 1) and (block.parent is tree._root or block.parent.places)
        places = [place for block in kept.values() for place in block.places]
        assert len({*places}) == len(places) == tree.used["device"] + tree.used["host"]
        for tier, room in tree.room.items():
            assert tree.used[tier] == sum(block.size for block in kept.values() if tree.tier(block) == tier) <= room
        found = tree.match(text)
        ends = [each for each in ENDINGS if (*text, each) in kept and (end + b"z").startswith(each)]
        assert len(found) < len(text) or (tree.end(found, end + b"z") or Block()).key == max(ends, key=len, default=b"")


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 5), st.integers(0, 9), st.integers(1, 40), st.integers(1, 4), st.data())
def test_pieces_are_the_blocks(device, on_device, in_host, slab, most, data):
    """Slabs of a few blocks, as on a GPU; places in any order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before, prefix_blocks.SLAB = prefix_blocks.SLAB, slab
    try:
        memory = BlockMemory(on_device, in_host, 2, torch.int32, torch.device(device))
    finally:
        prefix_blocks.SLAB = before
    places = data.draw(st.permutations(range(on_device + in_host)))
    values = torch.arange(2 * len(places), dtype=torch.int32).view(-1, 2)
    for part, blocks in memory.pieces(places, most):
        assert len(blocks) <= most
        blocks.copy_(values[part])
    for place, value in zip(places, values):
        ((part, block),) = memory.pieces([place], most)
        assert part == slice(0, 1) and torch.equal(block[0].cpu(), value)
        assert block.is_cuda == (device == "cuda" and place < on_device)
