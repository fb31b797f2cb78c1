"""Rows in pages of one pool: rounds, keys and values have the bits of rows that lie in one piece."""

import assistants
import bigrams
import dflash_drafts as dflash
import draft_rounds as rounds
import models
import pytest
import torch
from mtp_rounds import with_further
from rows import begin_rows

from spec_compile.cache import PAGE
from spec_compile.kernels import ops
from spec_compile.runtime.session import Piece, Session, StepKind

ENDS = dict(draft_window_size=6, draft_sink_size=2)
CAPACITY = 200
PAGES = 40
LENGTHS = 90, 75, 3, 64
EMPTY = 7.0  # what lies in pages that no row has


def of_head(algorithm, schedule, **options):
    draft = rounds.draft_of(algorithm, "llama")
    return "llama", algorithm, dict(draft=draft, **rounds.SCHEDULES[schedule], **options)


DRAFTS = {
    "eagle3": lambda: of_head("eagle3", "tree"),
    "eagle3 union": lambda: of_head("eagle3", "union"),
    "eagle3 window": lambda: of_head("eagle3", "tree", **ENDS),
    "draft_model": lambda: of_head("draft_model", "tree"),
    "mtp": lambda: ("llama", "mtp", dict(draft=with_further(rounds.head("mtp", "llama")), num_steps=3, topk=2)),
    "dflash": lambda: ("llama", "dflash", dict(draft=dflash.trained("llama"), topk=3, num_draft_tokens=9)),
    "dflash window": lambda: (bigrams.target(), "dflash", dict(draft=bigrams.table(), **ENDS)),
    "pard": lambda: (bigrams.target(), "pard", dict(draft=bigrams.pard(), num_steps=4)),
    "assistant": lambda: (assistants.target("31B"), "assistant", dict(draft=assistants.assistant("31B"), num_steps=3)),
}


def runtime_of(kind, **options):
    model, algorithm, more = DRAFTS[kind]()
    model = rounds.target(model) if isinstance(model, str) else model
    options = dict(compile=False, adaptive=False, check=False) | options
    runtime = models.speculate_captured(model, algorithm, **more, **options).speculation.engine.runtime
    runtime.cold_start = None  # compile steps when they are made
    return runtime


def prompts_of():
    """Prompts, the first two of which have the same first page."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    texts[1][:PAGE] = texts[0][:PAGE]
    return texts


def in_pages(session, generator):
    """Give the rows of a session pages in any order; what no row has is filled."""
    for cache in session.caches:
        for tensor in cache.tensors:
            tensor.fill_(EMPTY)
            tensor[0].zero_()
    rows = session.state.batch
    pages = (1 + torch.randperm(PAGES - 1, generator=generator)).tolist()
    session.state.set_pages([(row, column, pages.pop()) for row in range(rows) for column in range(4)])
    for cache in session.caches:
        for tensor in cache.tensors:
            tensor[session.state.kv.table.long().flatten()] = 0


def begun(session, prompts):
    state = session.state
    begin_rows(state, prompts, [CAPACITY] * len(prompts))
    session.drafter.start(state, prompts, [])
    for done in range(0, max(map(len, prompts)) - 1, 32):
        session.prefill(32, session.max_kv_len(done + 32))
    session.propose(session.max_kv_len(max(map(len, prompts))))
    return session


def round_of(session):
    nodes = session.runtime.algorithm.plan.nodes
    slots = session.max_kv_len(int(session.state.lengths.max()) + nodes)
    return session.get(StepKind.ROUND, nodes)(slots).clone()


def slots_of(session):
    """The committed slots of each row in every cache of the target, and nearly all of them in the draft's."""
    found, lengths = [], session.state.lengths.tolist()
    for cache in session.caches:
        behind = 0 if cache is session.state.kv else 8  # a draft writes its newest slots late
        for tensor in cache.tensors:
            rows = ops.first_slots(tensor, max(lengths), cache.table)
            found += [rows[row, :, : max(length - behind, 0)] for row, length in enumerate(lengths)]
    return found


def share_first_page(plain, paged):
    """Let row 1 have the first page of row 0, whose tokens are the same."""
    for cache in plain.caches:
        for tensor in cache.tensors:
            tensor[1, :, :PAGE] = tensor[0, :, :PAGE]
    table = paged.state.kv.table
    paged.state.set_pages([(1, 0, int(table[0, 0]))])


def assert_same(plain, paged):
    for one, other in zip(slots_of(plain), slots_of(paged), strict=True):
        assert torch.equal(one, other)
    for name, buffer in plain.state.named_buffers(recurse=False):
        theirs = getattr(paged.state, name)
        assert torch.equal(buffer, theirs), name


def compare(first, second, count=5):
    """Runtimes for rows in one piece and in pages; they are two where drafts come from earlier texts."""
    prompts, plain, paged = prompts_of(), Session(first, 4, CAPACITY), Session(second, 4, CAPACITY, pool=PAGES)
    in_pages(paged, torch.Generator().manual_seed(0))
    unused = sorted({*range(1, PAGES)} - {*paged.state.kv.table.flatten().tolist()})
    for session in (plain, paged):
        begun(session, prompts)
    assert_same(plain, paged)
    share_first_page(plain, paged)
    for _ in range(count):
        assert torch.equal(round_of(plain), round_of(paged))
        assert_same(plain, paged)
    assert all(bool((tensor[unused] == EMPTY).all()) for cache in paged.caches for tensor in cache.tensors)
    assert (paged.state.lengths > torch.tensor(LENGTHS) - 1).all()


@pytest.mark.parametrize("kind", DRAFTS)
@torch.no_grad()
def test_rows_in_pages_have_the_bits_of_rows_in_one_piece(kind):
    compare(runtime_of(kind), runtime_of(kind))


@torch.no_grad()
def test_attention_by_pytorch():
    compare(*(runtime_of("eagle3 window", attention_backend="sdpa") for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "draft_model", "dflash", "mtp"])
@torch.no_grad()
def test_compiled_rounds_in_pages(kind):
    """One compilation serves pools and rows of any size."""
    runtime = runtime_of(kind, compile=True)
    compare(runtime, runtime, 2)
    shapes = {shape for shape, _ in runtime.parts.complete if shape.paged}
    paged = Session(runtime, 3, 500, pool=60)
    in_pages(paged, torch.Generator().manual_seed(3))
    plain = Session(runtime, 3, 500)
    for session in (plain, paged):
        begun(session, prompts_of()[:3])
    assert torch.equal(round_of(plain), round_of(paged))
    assert_same(plain, paged)
    assert {shape for shape, _ in runtime.parts.complete if shape.paged} == shapes


@torch.no_grad()
def test_a_row_goes_on_in_another_session_of_its_pool():
    """A prompt is processed by a session of one row, and its rounds are those of one of four, then of two."""
    runtime = runtime_of("eagle3")
    prompts = prompts_of()
    alone = begun(Session(runtime, 1, CAPACITY), prompts[:1])
    lane = Session(runtime, 1, 100, pool=PAGES)
    in_pages(lane, torch.Generator().manual_seed(5))
    wide = Session(runtime, 4, CAPACITY, pool=lane)
    narrow = Session(runtime, 2, CAPACITY, larger=wide)
    assert all(
        one.data_ptr() == other.data_ptr()
        for theirs in (wide, narrow)
        for mine, cache in zip(lane.caches, theirs.caches)
        for one, other in zip(mine.tensors, cache.tensors)
    )
    begun(lane, prompts[:1])
    assert not narrow.state.kv.table.any()
    wide.state.finished.fill_(True)
    places = [[*session.state.small_buffers(), *session.drafter.row_buffers()] for session in (lane, wide)]
    for source, target in zip(*places):
        source, target = source[0].view(-1), target[1].view(-1)
        count = min(len(source), len(target))
        target[:count] = source[:count]
    lane.state.kv.table.zero_()
    for session in (wide, narrow, wide):
        round_of(alone)
        round_of(session)
        assert torch.equal(alone.state.lengths[0], wide.state.lengths[1])
    length = int(alone.state.lengths[0])
    assert torch.equal(alone.state.tokens[0, : length + 1], wide.state.tokens[1, : length + 1])
    for cache, theirs in zip(alone.caches[:1], wide.caches[:1]):
        for one, other in zip(cache.tensors, theirs.tensors):
            rows = ops.first_slots(other, length, theirs.table)
            torch.testing.assert_close(one[0, :, :length], rows[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nodes, compiled", [(1, False), (4, False), pytest.param(4, True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_prompts_ride_along_with_rounds(nodes, compiled):
    """A round that takes pieces of two prompts with it leaves all as a round and a prefill do."""
    generator, prompts = torch.Generator().manual_seed(2), prompts_of()
    others = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in (49, 21)]
    found = []
    for rides in (False, True):
        runtime = runtime_of("eagle3", compile=compiled)
        rows, lanes = Session(runtime, 4, CAPACITY, pool=PAGES), None
        in_pages(rows, torch.Generator().manual_seed(0))
        begun(rows, prompts)
        lanes = Session(runtime, 2, CAPACITY, pool=rows)
        free = sorted({*range(1, PAGES)} - {*rows.state.kv.table.flatten().tolist()})
        lanes.state.set_pages([(row, column, free.pop()) for row in range(2) for column in range(2)])
        begin_rows(lanes.state, others, [CAPACITY] * 2)
        lanes.drafter.start(lanes.state, others, [])
        outcomes, slots = [], rows.max_kv_len(128)
        for number in range(3):
            if rides:
                lanes.slices[:, :2] = torch.tensor([[0, 1], [16 * number, 16 * number]])
                outcomes.append(rows.launch(None, nodes, slots, piece=Piece(lanes, 2, 16))())
            else:
                outcomes.append(rows.launch(None, nodes, slots)())
                lanes.prefill(16, slots)
        assert lanes.state.lengths.tolist() == [48, 20]
        lanes.propose(slots)
        found.append((outcomes, lanes.state.tree_tokens.tolist(), slots_of(rows), slots_of(lanes)))
    assert found[0][:2] == found[1][:2]
    for apart, together in zip(found[0][2] + found[0][3], found[1][2] + found[1][3], strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
