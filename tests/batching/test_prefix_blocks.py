"""Kept pages against plain lists: what is known of a text, in which bits, and who uses which page."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile.batching import prefix_copies
from spec_compile.batching.pages import Pages
from spec_compile.batching.prefix_blocks import PrefixTree
from spec_compile.batching.prefix_cache import FEWEST, LEAST, PrefixIndex
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

    has_pictures = needs_scores = scores_prompt = False
    is_whole = True
    row, weights = 0, -1

    def __init__(self, text, scope=b"", client="", **fields):
        self.text = self.prompt = text
        self.length, self.scope, self.pages = len(text) - 1, scope, []
        self.request = SimpleNamespace(client=client)
        vars(self).update(fields)


class FakeWeights:
    changed = False

    def have_changed(self, is_sure):
        changed, self.changed = self.changed, False
        return changed


def make(device=0, host=0, ahead=0, has_states=False, fresh=1, **runtime):
    """An index with room for pages on the device and on the host, its pages and its rows."""
    page_bytes = sum(heads * PAGE * size * dtype.itemsize for heads, size, dtype in POOLS)
    options = SimpleNamespace(
        prefix_cache_bytes=device * page_bytes,
        prefix_cache_host_bytes=host * page_bytes,
        ranks=SimpleNamespace(size=1),
    )
    runtime = SimpleNamespace(
        **dict(device=torch.device("cpu"), on_gpu=False, has_fixed_chunks=False, options=options) | runtime,
        algorithm=SimpleNamespace(ahead=ahead, plan=SimpleNamespace(fresh_tokens=fresh)),
        verify=SimpleNamespace(recurrences=[0] * has_states, clamps_prompts=False),
    )
    rows, pages = FakeRows(runtime, has_states), Pages(COUNT)
    return PrefixIndex(runtime, rows, FakeWeights(), pages), pages, rows


def enter(index, pages, rows, sequence):
    """Let a sequence in: what is known of it, with pages of its own for the rest; None if too few are free."""
    known = index.find(sequence)
    missing = -(-len(sequence.text) // PAGE) - len(known.pages)
    index.evict(missing)
    shared = known.pages + ([] if known.partial is None else [known.partial])
    if pages.free < missing:
        pages.release(shared)
        return None
    sequence.pages = known.pages + pages.take(missing)
    if known.partial is not None:
        for pool in rows.pools:
            pool[sequence.pages[known.tokens // PAGE]] = pool[known.partial]
        pages.release([known.partial])
    index.begun(sequence, known)
    return known


def leave(index, pages, rows, sequence):
    index.keep(sequence, sequence.text, sequence.length, rows)
    pages.release(sequence.pages)
    index.trim()


def serve(index, pages, rows, text, ahead=0, **fields):
    """Let a text in, compute it and let it go; the number of its tokens that were known."""
    sequence = FakeSequence(text, **fields)
    known = enter(index, pages, rows, sequence)
    rows.write(sequence.pages, text, known.tokens, sequence.length, ahead)
    leave(index, pages, rows, sequence)
    return known.tokens


def nodes_of(tree):
    pending = [child for root in tree._roots.values() for child in root.children.values()]
    while pending:
        node = pending.pop()
        pending += node.children.values()
        yield node


def check(index, pages, living):
    """Users are rows and kept prefixes, nothing is free and kept, and nothing exceeds its room."""
    tree = index._tree
    nodes = [*nodes_of(tree)]
    kept = {node.page for node in nodes if node.page}
    users = Counter(kept) + Counter(page for sequence in living for page in sequence.pages)
    assert [pages.users(page) for page in range(COUNT)] == [users[page] for page in range(COUNT)]
    assert pages.free == COUNT - 1 - len(users) and 0 not in kept and not kept & {*pages._free}
    assert {*tree._near} == {node for node in nodes if node.is_near}
    assert {*tree._far} == {node for node in nodes if node.places}
    assert all(node.is_near or node.places for node in nodes)
    places = [place for node in nodes for place in node.places]
    assert len({*places}) == len(places) == tree.used <= tree.room
    assert len(tree._roots) == len({id(root) for root in tree._roots.values() if root.children})
    assert index.bytes("device") <= index._room * index.page_bytes


WORDS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2)
RESTS = st.sampled_from([0, 7, 40, 70])
TEXTS = st.builds(lambda words, rest: [w for w in words for _ in range(PAGE)] + [9] * rest + [8], WORDS, RESTS)
SCOPES, CLIENTS = st.sampled_from([b"", b"", b"a"]), st.sampled_from(["", "x"])
STEPS = st.lists(st.tuples(TEXTS, SCOPES, CLIENTS, st.booleans()), max_size=15)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 12),
    st.integers(0, 8),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.sampled_from([1, 1 << 25]),
    STEPS,
)
def test_what_is_known_are_the_bits_of_the_text(device, host, ahead, has_states, most, steps):
    """Some texts stay in rows for a while. What is known of a text is the same as was computed for it."""
    ahead = min(ahead, 1) if has_states else ahead
    index, pages, rows = make(device, host, ahead, has_states)
    index._copies._most = most
    living = []
    for text, scope, client, stays in steps:
        sequence = FakeSequence(text, scope, client)
        other = [len(scope) + token for token in text]  # the same tokens have other bits in another scope
        known = enter(index, pages, rows, sequence)
        if known is None:
            for each in living:
                leave(index, pages, rows, each)
            living = []
            check(index, pages, living)
            continue
        assert known.tokens <= sequence.length and (known.tokens == 0 or known.tokens >= LEAST)
        assert rows.holds(sequence.pages, other, known.tokens, ahead)
        rows.write(sequence.pages, other, known.tokens, sequence.length, ahead)
        if has_states:
            if known.tokens:
                known.states(rows, 0)
                got = [state[0] for state in rows.states]
                assert all(map(torch.equal, got, rows.states_after(other, known.tokens)))
        for tokens in (max(known.tokens, sequence.length - 20), sequence.length):  # its prompt and its end, say
            for state, bits in zip(rows.states, rows.states_after(other, tokens)):
                state[0] = bits
            index.keep(sequence, text, tokens, rows)
            check(index, pages, [*living, sequence])
        check(index, pages, [*living, sequence])
        if stays and not has_states:
            index.keep(sequence, text, sequence.length, rows)
            living.append(sequence)
        else:
            leave(index, pages, rows, sequence)
        check(index, pages, living)
    index.evict(COUNT)
    assert pages.free == COUNT - 1 - len({page for each in living for page in each.pages})
    index.forget()
    check(index, pages, living)


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_with_room_all_is_known_that_was_computed(texts):
    index, pages, rows = make(device=COUNT, host=200)
    for number, text in enumerate(texts):
        index.evict(4)
        begins = (
            next((n for n, (a, b) in enumerate(zip(old, text)) if a != b), min(len(old), len(text)))
            for old in texts[:number]
        )
        wanted = max((min(begin, len(text) - 1) for begin in begins), default=0)
        sequence = FakeSequence(text)
        known = enter(index, pages, rows, sequence)
        least = wanted if wanted >= LEAST else 0
        lost = 1 if any(len(old) - 1 < wanted for old in texts[:number]) else 0  # the last token of a text has no slot
        assert least - lost <= known.tokens <= least
        leave(index, pages, rows, sequence)


def test_the_oldest_leaves_are_given_up_first():
    index, pages, rows = make(device=4)
    first, second = [1] * 129, [1] * 64 + [2] * 65
    serve(index, pages, rows, first)
    serve(index, pages, rows, second)
    pages.take(pages.free)
    index.evict(1)
    chain = index._match(first, b"", "")[0]
    assert [node.page > 0 for node in chain] == [True] and index.evicted == 1
    assert len(index._match(second, b"", "")[0]) == 2
    index.evict(2)
    index.evict(3)
    assert not [*nodes_of(index._tree)] and index.evicted == 3


def test_pages_beyond_the_room_move_to_the_host_and_back():
    index, pages, rows = make(device=2, host=3)
    text = [*range(5 * PAGE + 1)]
    serve(index, pages, rows, text)
    assert index.bytes("device") == 2 * index.page_bytes and index.bytes("host") == 3 * index.page_bytes
    assert serve(index, pages, rows, text) == 5 * PAGE
    assert index.hits == {"device": 2 * PAGE, "host": 3 * PAGE} and index.asked == 2 * 5 * PAGE
    assert index.evicted == 0


def test_a_row_that_lives_shares_its_pages():
    index, pages, rows = make()
    text = [*range(150)]
    first, second = FakeSequence(text), FakeSequence([*text[:140], 5, 5])
    enter(index, pages, rows, first)
    index.keep(first, text, 149, rows)
    known = enter(index, pages, rows, second)
    assert known.tokens == 140 and known.pages == first.pages[:2] == second.pages[:2]
    assert pages.users(first.pages[0]) == 3 and first.pages[2] != second.pages[2]


@pytest.mark.parametrize("client, known", [("x", 100), ("y", 96)])
def test_other_clients_texts_are_known_in_multiples_of_16_tokens(client, known):
    index, pages, rows = make(device=COUNT)
    serve(index, pages, rows, [*range(200)], client="x")
    assert serve(index, pages, rows, [*range(100), 7, 7], client=client) == known
    index, pages, rows = make(device=COUNT)
    serve(index, pages, rows, [*range(100), 5], client="x")
    assert serve(index, pages, rows, [*range(100), 7, 7], client=client) == known


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_as_many_tokens_after_a_page_count_as_its_slots_depend_on(ahead):
    text = [*range(2 * PAGE + 10)]
    for end in (PAGE, 2 * PAGE):
        for other in range(5):
            index, pages, rows = make(device=COUNT, ahead=ahead)
            serve(index, pages, rows, text)
            changed = [*text]
            changed[end + other] = 1
            assert serve(index, pages, rows, changed) == end + other - ahead
    assert serve(index, pages, rows, text) == len(text) - max(ahead, 1)


def test_scopes_and_other_weights_share_nothing():
    index, pages, rows = make(device=COUNT)
    text = [*range(200)]
    serve(index, pages, rows, text, scope=b"a")
    assert serve(index, pages, rows, text) == 0 and serve(index, pages, rows, text, scope=b"a") == 199
    old = FakeSequence(text)
    enter(index, pages, rows, old)
    index._weights.changed = True
    assert serve(index, pages, rows, text[::-1]) == 0 and index.evicted == 0
    assert serve(index, pages, rows, text, scope=b"a") == 0
    leave(index, pages, rows, old)
    assert serve(index, pages, rows, text) == 0


def test_pictures_and_scores_need_all_tokens():
    index, pages, rows = make(device=COUNT)
    text = [*range(200)]
    serve(index, pages, rows, text, has_pictures=True)
    assert serve(index, pages, rows, text) == 0
    assert serve(index, pages, rows, text, has_pictures=True) == 0
    assert serve(index, pages, rows, text, needs_scores=True) == 0
    assert serve(index, pages, rows, text) == 199


def test_fixed_chunks_serve_as_a_whole():
    index, pages, rows = make(device=COUNT, has_fixed_chunks=True)
    size = 512
    text = [*range(size + 100)]
    serve(index, pages, rows, text, prompt=text[: size + 2])
    known = serve(index, pages, rows, text)
    assert known % PAGE == 0 and known <= size and len(index._match(text, b"", "")[0]) == known // PAGE


def test_short_texts_are_not_copied(monkeypatch):
    """Shorter ones than pay on a GPU."""
    monkeypatch.setitem(FEWEST, "cpu", 4)
    index, pages, rows = make(host=8)
    serve(index, pages, rows, [*range(256)])
    assert index.bytes("host") == 0 and pages.free == COUNT - 1
    serve(index, pages, rows, [*range(300)])
    assert serve(index, pages, rows, [*range(255), 0]) == 0 and serve(index, pages, rows, [*range(257), 0]) == 257


@pytest.mark.parametrize("where", ["find", "save"])
def test_an_error_of_the_host_s_memory_loses_what_is_kept_only(where, monkeypatch):
    index, pages, rows = make(host=8)
    text = [*range(99)]
    if where == "find":
        serve(index, pages, rows, text)
    monkeypatch.setattr(index._copies._memory, "pieces", lambda *_: 1 / 0)
    assert serve(index, pages, rows, text) == 0
    assert pages.free == COUNT - 1 and index.bytes("host") == 0
    monkeypatch.undo()
    serve(index, pages, rows, text)
    assert serve(index, pages, rows, text) == 98


def test_an_error_while_a_text_is_kept_leaves_no_half_of_it(monkeypatch):
    index, pages, rows = make(host=8)
    serve(index, pages, rows, [*range(99)])
    monkeypatch.setattr(PrefixTree, "add", lambda *_: 1 / 0)
    serve(index, pages, rows, [*range(99, 0, -1)])
    assert pages.free == COUNT - 1 and index.bytes("host") == 0
    monkeypatch.undo()
    assert serve(index, pages, rows, [*range(99)]) == 0


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
    places = data.draw(st.permutations(range(count)))
    values = torch.arange(2 * len(places), dtype=torch.int32).view(-1, 2)
    for part, blocks in memory.pieces(places, most):
        assert len(blocks) <= most
        blocks.copy_(values[part])
    for place, value in zip(places, values):
        ((part, block),) = memory.pieces([place], most)
        assert part == slice(0, 1) and torch.equal(block[0], value) and block.is_pinned() == (device == "cuda")
