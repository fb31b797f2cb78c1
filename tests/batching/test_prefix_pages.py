"""Kept pages against plain lists: what is known of a text, in which bits, and who uses which page."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile.batching import prefix_copies
from spec_compile.batching.pages import Pages
from spec_compile.batching.prefix_cache import FEWEST, LEAST, PrefixCache
from spec_compile.batching.prefix_copies import HostMemory
from spec_compile.cache import PAGE

COUNT = 24
"""Pages of the pool."""
POOLS = (2, 3, torch.float32), (1, 8, torch.int8)
"""Heads, numbers of a slot and dtype of each pool."""


class FakeRows:
    """Rows with a pool, in which a slot has the bits of its text up to the tokens that it depends on."""

    def __init__(self, runtime, has_states):
        self.runtime, self.reads, self.sequences = runtime, {}, [None] * 2
        self.pools = [torch.zeros(COUNT, heads, PAGE, size, dtype=dtype) for heads, size, dtype in POOLS]
        self.states = [torch.zeros(2, 5, 7), torch.zeros(2, 3, dtype=torch.float64)] if has_states else []

    def cache_tensors(self):
        return self.pools

    def state_tensors(self):
        return self.states

    def bits(self, shape, dtype, text):
        generator = torch.Generator().manual_seed(hash(tuple(text)) % (1 << 31))
        return torch.randint(-99, 99, shape, generator=generator).to(dtype)

    def copy_page(self, page, to):
        for pool in self.pools:
            pool[to] = pool[page]

    def slot(self, text, slot, ahead):
        """What the pools have at a slot of a text."""
        return [self.bits((heads, size), dtype, text[: slot + ahead + 1]) for heads, size, dtype in POOLS]

    def write(self, pages, text, begin, end, ahead):
        """Compute slots of a text."""
        for slot in range(begin, end):
            for pool, bits in zip(self.pools, self.slot(text, slot, ahead)):
                pool[pages[slot // PAGE], :, slot % PAGE] = bits

    def holds(self, pages, text, end, ahead):
        """True if the first slots of these pages have the bits of a text."""
        return all(
            torch.equal(pool[pages[slot // PAGE], :, slot % PAGE], bits)
            for slot in range(end)
            for pool, bits in zip(self.pools, self.slot(text, slot, ahead))
        )

    def states_after(self, text, tokens):
        return [self.bits(state.shape[1:], state.dtype, text[:tokens]) for state in self.states]


class FakeSequence:
    """A text with its pages; `length` of its tokens have keys and values."""

    needs_scores = scores_prompt = False
    is_whole = True
    row, weights = 0, -1

    def __init__(self, text, scope=b"", client="", **fields):
        self.text = self.prompt = self.keys = text
        self.length, self.scope, self.pages = len(text) - 1, scope, []
        self.request = SimpleNamespace(client=client, process=None)
        vars(self).update(fields)


class FakeWeights:
    changed = False

    def have_changed(self, is_sure):
        changed, self.changed = self.changed, False
        return changed


def make(count=COUNT, device=None, host=0, ahead=0, has_states=False, fresh=1, saves=False, **runtime):
    """What is kept in a pool, its pages and its rows. host: pages of host memory. saves: as on a GPU."""
    page_bytes = sum(heads * PAGE * size * dtype.itemsize for heads, size, dtype in POOLS)
    options = SimpleNamespace(
        prefix_cache_bytes=device, prefix_cache_host_bytes=host * page_bytes, ranks=SimpleNamespace(size=1)
    )
    runtime = SimpleNamespace(
        **dict(device=torch.device("cpu"), on_gpu=False, has_fixed_chunks=False, options=options) | runtime,
        algorithm=SimpleNamespace(ahead=ahead, plan=SimpleNamespace(fresh_tokens=fresh)),
        verify=SimpleNamespace(recurrences=[0] * has_states, clamps_prompts=False),
    )
    rows, pages = FakeRows(runtime, has_states), Pages(count)
    cache = PrefixCache(runtime, rows, FakeWeights(), pages)
    cache._pages.keeps = device != 0
    runtime.on_gpu = saves
    return cache, pages, rows


def enter(cache, sequence):
    """Let a sequence in: what is known of it; None if too few pages are free."""
    return cache.admit(sequence, -(-len(sequence.text) // PAGE))


def leave(cache, pages, rows, sequence):
    cache.keep(sequence, sequence.length, rows)
    pages.release(sequence.pages)


def serve(cache, pages, rows, text, ahead=0, **fields):
    """Let a text in, compute it and let it go; the number of its tokens that were known."""
    sequence = FakeSequence(text, **fields)
    known = enter(cache, sequence)
    rows.write(sequence.pages, text, known.tokens, sequence.length, ahead)
    leave(cache, pages, rows, sequence)
    return known.tokens


def lose(pages, count):
    """Others have pages for a while: those that are given first."""
    pages.release(pages.take(count))


def check(cache, pages, living):
    """Users are rows, every block is somewhere, and no place or page is lost."""
    blocks = [*cache._blocks.values()]
    users = Counter(page for sequence in living for page in sequence.pages)
    assert pages._users == [users[page] for page in range(pages.count)]
    assert pages.free == pages.usable - len(users)
    assert {block.page for block in blocks if block.page} == pages.kept.keys()
    assert {*cache._far} == {block for block in blocks if block.place is not None or block.states}
    assert all(block.page or block.place is not None or (block.states and not block.tokens) for block in blocks)
    assert {block for after in cache._after.values() for block in after} == {*blocks}
    assert all(cache._after.values())
    places = [place for b in blocks for place in (*b.states, *([] if b.place is None else [b.place]))]
    assert len({*places}) == len(places) == cache._copies.memory.used


WORDS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2)
RESTS = st.sampled_from([0, 7, 40, 70])
TEXTS = st.builds(lambda words, rest: [w for w in words for _ in range(PAGE)] + [9] * rest + [8], WORDS, RESTS)
SCOPES, CLIENTS = st.sampled_from([b"", b"", b"a"]), st.sampled_from(["", "x"])
STEPS = st.lists(st.tuples(TEXTS, SCOPES, CLIENTS, st.booleans()), max_size=15)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(5, COUNT),
    st.integers(0, 8),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 1 << 25]),
    STEPS,
)
def test_what_is_known_are_the_bits_of_the_text(count, host, ahead, has_states, saves, most, steps):
    """Some texts stay in rows for a while. What is known of a text is the same as was computed for it."""
    ahead = min(ahead, 1) if has_states else ahead
    cache, pages, rows = make(count, None, host, ahead, has_states, saves=saves)
    cache._copies._most = most
    living = []
    for text, scope, client, stays in steps:
        sequence = FakeSequence(text, scope, client)
        other = [len(scope) + token for token in text]  # the same tokens have other bits in another scope
        known = enter(cache, sequence)
        if known is None:
            assert not sequence.pages
            for each in living:
                leave(cache, pages, rows, each)
            living = []
            check(cache, pages, living)
            continue
        assert known.tokens <= sequence.length and (known.tokens == 0 or known.tokens >= LEAST)
        assert rows.holds(sequence.pages, other, known.tokens, ahead)
        check(cache, pages, [*living, sequence])
        rows.write(sequence.pages, other, known.tokens, sequence.length, ahead)
        if has_states and known.tokens:
            known.states(rows, 0)
            got = [state[0] for state in rows.states]
            assert all(map(torch.equal, got, rows.states_after(other, known.tokens)))
        for tokens in (max(known.tokens, sequence.length - 20), sequence.length):  # its prompt and its end, say
            for state, bits in zip(rows.states, rows.states_after(other, tokens)):
                state[0] = bits
            cache.keep(sequence, tokens, rows)
            check(cache, pages, [*living, sequence])
        if stays and not has_states:
            living.append(sequence)
        else:
            leave(cache, pages, rows, sequence)
        check(cache, pages, living)
    cache.forget()
    check(cache, pages, living)
    assert not cache._blocks and not cache._after and not cache._copies.memory.used


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_with_room_all_is_known_that_was_computed(texts):
    cache, pages, rows = make(40)
    for number, text in enumerate(texts):
        begins = (
            next((n for n, (a, b) in enumerate(zip(old, text)) if a != b), min(len(old), len(text)))
            for old in texts[:number]
        )
        wanted = max((min(begin, len(text) - 1) for begin in begins), default=0)
        sequence = FakeSequence(text)
        known = enter(cache, sequence)
        least = wanted if wanted >= LEAST else 0
        lost = 1 if any(len(old) - 1 < wanted for old in texts[:number]) else 0  # the last token of a text has no slot
        assert least - lost <= known.tokens <= least
        leave(cache, pages, rows, sequence)


def test_ends_of_old_texts_are_lost_first():
    cache, pages, rows = make(7)
    first, second = [1] * 129, [1] * 64 + [2] * 65
    serve(cache, pages, rows, first)
    serve(cache, pages, rows, second)
    lose(pages, pages.free - 2)
    assert cache.counts["evicted"] == 1
    assert cache._find(first, b"", "").tokens == 64 and cache._find(second, b"", "").tokens == 128
    lose(pages, pages.free - 1)
    assert cache._find(second, b"", "").tokens == 64
    lose(pages, pages.free)
    assert not cache._blocks and cache.counts["evicted"] == 3


def test_what_two_texts_begin_with_comes_back_from_the_host():
    cache, pages, rows = make(host=3, saves=True)
    text = [*range(5 * PAGE + 1)]
    serve(cache, pages, rows, text)
    assert cache.bytes("device") == 5 * cache.page_bytes and cache.bytes("host") == 0
    assert serve(cache, pages, rows, text) == 5 * PAGE
    assert cache.counts == {"device": 5 * PAGE, "asked": 2 * len(text)}
    assert cache.bytes("host") == 3 * cache.page_bytes
    lose(pages, pages.free)
    assert cache.bytes("device") == 0 and cache.counts["evicted"] == 2
    sequence = FakeSequence(text)
    assert enter(cache, sequence).tokens == 3 * PAGE and rows.holds(sequence.pages, text, 3 * PAGE, 0)
    assert (cache.counts["device"], cache.counts["host"]) == (5 * PAGE, 3 * PAGE)
    check(cache, pages, [sequence])


def test_a_text_that_leaves_a_page_from_the_host_does_not_keep_it():
    cache, pages, rows = make(host=3, saves=True)
    text, other = [*range(2 * PAGE + 1)], [*range(90), *[7] * 60]
    serve(cache, pages, rows, text)
    serve(cache, pages, rows, text)
    lose(pages, pages.free)
    assert serve(cache, pages, rows, other) == 90
    sequence = FakeSequence(text)
    known = enter(cache, sequence)
    assert known.tokens == 2 * PAGE and rows.holds(sequence.pages, text, known.tokens, 0)


def test_without_memory_a_text_is_kept_as_long_as_its_row():
    cache, pages, rows = make(device=0)
    sequence = FakeSequence([*range(200)])
    enter(cache, sequence)
    cache.keep(sequence, 199, rows)
    assert serve(cache, pages, rows, sequence.text) == 199
    leave(cache, pages, rows, sequence)
    assert serve(cache, pages, rows, sequence.text) == 0 and not pages.kept and not cache._blocks


def test_a_row_that_lives_shares_its_pages():
    cache, pages, rows = make()
    text = [*range(150)]
    first, second = FakeSequence(text), FakeSequence([*text[:140], 5, 5])
    enter(cache, first)
    cache.keep(first, 149, rows)
    known = enter(cache, second)
    assert known.tokens == 140 and first.pages[:2] == second.pages[:2] and known.partial == first.pages[2]
    check(cache, pages, [first, second])


def test_without_room_for_a_copy_whole_pages_serve():
    cache, pages, rows = make(4)
    text = [*range(150)]
    serve(cache, pages, rows, text)
    sequence = FakeSequence(text)
    known = enter(cache, sequence)
    assert known.tokens == 2 * PAGE and known.partial is None and len(sequence.pages) == 3
    check(cache, pages, [sequence])
    assert enter(cache, FakeSequence(text)) is None
    check(cache, pages, [sequence])


@pytest.mark.parametrize("client, known", [("x", 100), ("y", 96)])
def test_other_clients_texts_are_known_in_multiples_of_16_tokens(client, known):
    cache, pages, rows = make()
    serve(cache, pages, rows, [*range(200)], client="x")
    assert serve(cache, pages, rows, [*range(100), 7, 7], client=client) == known
    cache, pages, rows = make()
    serve(cache, pages, rows, [*range(100), 5], client="x")
    assert serve(cache, pages, rows, [*range(100), 7, 7], client=client) == known


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_as_many_tokens_after_a_page_count_as_its_slots_depend_on(ahead):
    text = [*range(2 * PAGE + 10)]
    for end in (PAGE, 2 * PAGE):
        for other in range(5):
            cache, pages, rows = make(ahead=ahead)
            serve(cache, pages, rows, text)
            changed = [*text]
            changed[end + other] = 1
            assert serve(cache, pages, rows, changed) == end + other - ahead
    assert serve(cache, pages, rows, text) == len(text) - max(ahead, 1)


def test_scopes_and_other_weights_share_nothing():
    cache, pages, rows = make()
    text = [*range(200)]
    serve(cache, pages, rows, text, scope=b"a")
    assert serve(cache, pages, rows, text) == 0 and serve(cache, pages, rows, text, scope=b"a") == 199
    old = FakeSequence(text)
    enter(cache, old)
    cache._weights.changed = True
    assert serve(cache, pages, rows, text[::-1]) == 0 and cache.counts["evicted"] == 0
    assert serve(cache, pages, rows, text, scope=b"a") == 0
    leave(cache, pages, rows, old)
    assert serve(cache, pages, rows, text) == 0


def test_pictures_and_scores_need_all_tokens():
    cache, pages, rows = make()
    text = [*range(200)]
    serve(cache, pages, rows, text, keys=None)
    assert serve(cache, pages, rows, text) == 0
    assert serve(cache, pages, rows, text, keys=None) == 0
    assert serve(cache, pages, rows, text, needs_scores=True) == 0
    assert serve(cache, pages, rows, text) == 199


def test_fixed_chunks_serve_as_a_whole():
    cache, pages, rows = make(has_fixed_chunks=True)
    size = 512
    text = [*range(size + 100)]
    serve(cache, pages, rows, text, prompt=text[: size + 2])
    known = serve(cache, pages, rows, text)
    assert known % PAGE == 0 and known <= size and len(cache._find(text, b"", "").blocks) == known // PAGE


def test_short_texts_are_not_copied(monkeypatch):
    """Shorter ones than pay on a GPU."""
    monkeypatch.setitem(FEWEST, "cpu", 4 * PAGE)
    cache, pages, rows = make(host=8, saves=True)
    for length, places in ((256, 0), (300, 4)):
        for _ in range(2):
            serve(cache, pages, rows, [*range(length)])
        assert cache.bytes("host") == places * cache.page_bytes


@pytest.mark.parametrize("where", ["save", "fetch"])
def test_an_error_of_the_host_s_memory_loses_what_is_kept_only(where, monkeypatch):
    cache, pages, rows = make(host=8, saves=True)
    text = [*range(99)]
    serve(cache, pages, rows, text)
    if where == "fetch":
        serve(cache, pages, rows, text)
        lose(pages, pages.free)
        assert cache.bytes("host") > 0
    monkeypatch.setattr(cache._copies.memory, "pieces", lambda *_: 1 / 0)
    assert serve(cache, pages, rows, text) == 0
    check(cache, pages, [])
    monkeypatch.undo()
    assert cache.bytes("host") == 0
    serve(cache, pages, rows, text)
    assert serve(cache, pages, rows, text) == 98


def test_an_error_while_a_text_is_kept_leaves_no_half_of_it(monkeypatch):
    cache, pages, rows = make()
    serve(cache, pages, rows, [*range(99)])
    monkeypatch.setattr(PrefixCache, "_hold", lambda *_: 1 / 0)
    serve(cache, pages, rows, [*range(99, 0, -1)])
    check(cache, pages, [])
    monkeypatch.undo()
    assert serve(cache, pages, rows, [*range(99)]) == 0


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 4), st.data())
def test_pieces_are_the_blocks(device, count, slab, most, data):
    """Slabs of a few blocks, pinned on a GPU's host; places in any order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before, prefix_copies.SLAB = prefix_copies.SLAB, slab
    try:
        memory = HostMemory(count, 2, torch.int32, device == "cuda")
    finally:
        prefix_copies.SLAB = before
    assert memory.most == count
    places = []
    while memory.ready < count or memory.free:
        places += memory.take(memory.free)
    assert sorted(places) == [*range(count)]
    places = data.draw(st.permutations(places))
    values = torch.arange(2 * len(places), dtype=torch.int32).view(-1, 2)
    for part, blocks in memory.pieces(places, most):
        assert len(blocks) <= most
        blocks.copy_(values[part])
    for place, value in zip(places, values):
        ((part, block),) = memory.pieces([place], most)
        assert part == slice(0, 1) and torch.equal(block[0], value) and block.is_pinned() == (device == "cuda")
