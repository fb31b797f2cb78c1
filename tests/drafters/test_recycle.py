"""Recycled tokens: the table against slow references, who reads and writes it, and answers that do not change."""

import math
from itertools import cycle, pairwise
from types import SimpleNamespace

import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from batch_requests import collect, running
from hypothesis import given, settings
from hypothesis import strategies as st
from recycled import plain_trees

from spec_compile.compile.trace import trace
from spec_compile.drafters import recycle
from spec_compile.drafters.ngram import Ngram, NgramOptions
from spec_compile.drafters.recycle import LEVELS, LOW, UNIT, renew, unrolled
from spec_compile.drafters.union import Union
from spec_compile.runtime.draft_budget import WholeTreeBudget

INF, NAN = math.inf, math.nan
VOCAB = 11


def ids_of(row):
    """The tokens of a row of the table."""
    return [entry >> 8 for entry in row.tolist() if entry >= 0]


# --- the table


def entries_of(row, k, vocab):
    """The candidates of one row of logits, in Python's own floats: [(id, quantised)], or None for none."""
    row = [-INF if math.isnan(x) else min(x, 3.4028234663852886e38) for x in row]
    order = sorted(range(len(row)), key=lambda i: -row[i])[:k]
    if row[order[0]] == -INF:
        return [None] * k
    total = math.log(sum(math.exp(x - row[order[0]]) for x in row))
    found = [(i, min(LOW, UNIT * (row[order[0]] - row[i] + total))) for i in order]
    return [None if i >= vocab or row[i] == -INF else (i, bits) for i, bits in found]


numbers = st.one_of(st.integers(-64, 64).map(lambda x: x / 8), st.sampled_from([INF, -INF, NAN, 1e30, -1e30]))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 150), st.booleans())
def test_tables_are_renewed(data, k, width, half):
    """The vocabulary of the logits may be larger than the table."""
    k, vocab = min(k, width), min(VOCAB, width)
    nodes = data.draw(st.lists(st.tuples(st.integers(-1, vocab - 1), st.integers(0, 1000)), min_size=1, max_size=6))
    tokens = torch.tensor([token for token, _ in nodes])
    some = data.draw(st.lists(numbers, min_size=1, max_size=8))
    logits = torch.stack([
        torch.tensor(some)[torch.randint(len(some), (width,), generator=torch.Generator().manual_seed(seed))]
        for _, seed in nodes
    ]).to(torch.bfloat16 if half else torch.float32)  # fmt: skip
    table = torch.full((vocab, k), 77, dtype=torch.int32)
    renew(table, tokens, logits)
    last = {token: row for (token, _), row in zip(nodes, logits.float().tolist()) if token >= 0}
    for token, row in enumerate(table.tolist()):
        if token not in last:
            assert row == [77] * k
            continue
        for entry, right in zip(row, entries_of(last[token], k, vocab), strict=True):
            if right is None:
                assert entry == -1
            else:
                assert entry >> 8 == right[0] and abs((entry & LOW) - right[1]) <= 1


# --- the trees


def slow_tree(table, root, nodes):
    """[(token, parent, score)] of the best nodes, level by level. table: [[(token, log-probability)]]."""
    found = [(root, -1, np.float32(0))]
    level = range(1)
    for _ in range(LEVELS):
        first = len(found)
        found += [(token, n, found[n][2] + np.float32(logprob)) for n in level for token, logprob in table[found[n][0]]]
        # The best of a level go on: all that the tree may hold.
        level = sorted(range(first, len(found)), key=lambda n: -found[n][2])[:nodes]
    order = sorted(range(len(found)), key=lambda n: -found[n][2])[:nodes]
    return [(found[n][0], order.index(found[n][1]) if n else -1, found[n][2]) for n in order]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(2, 24))
def test_trees_are_the_best_of_the_table(data, k, nodes):
    table = torch.full((VOCAB, k), -1, dtype=torch.int32)
    known = []
    for token in range(VOCAB):
        ids = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=k, unique=True))
        bits = sorted(data.draw(st.lists(st.integers(1, 60), min_size=len(ids), max_size=len(ids))))
        known.append([(i, -b / UNIT) for i, b in zip(ids, bits)])
        table[token, : len(ids)] = torch.tensor([i << 8 | b for i, b in zip(ids, bits)], dtype=torch.int32)
    nodes = min(nodes, sum(k**level for level in range(LEVELS + 1)))
    roots = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2))
    tokens, parents, scores, used = plain_trees(table, torch.tensor(roots), torch.ones(2).bool(), nodes)
    for row in range(2):
        right = slow_tree(known, roots[row], nodes)
        count = int((scores[row] > -INF).sum())
        assert count == len(right) == used[row]
        np.testing.assert_allclose(scores[row, :count].numpy(), [score for *_, score in right], rtol=1e-5)
        made = [*zip(tokens[row, :count].tolist(), parents[row, :count].tolist())]
        assert len({*made}) == count and all(parent < node for node, (_, parent) in enumerate(made))
        exact = [score for *_, score in right]
        if all(abs(a - b) > 1e-3 for a, b in pairwise(exact)):  # else equal scores may change places
            assert made == [(token, parent) for token, parent, _ in right]


# --- who reads and writes it


def system(**options):
    options = dict(compile=False, check=False, adaptive=False) | options
    return models.speculate_captured(rounds.target("llama"), "ngram", **options)


def table_of(fast):
    return fast.speculation.engine.runtime.algorithm.head.table


def test_one_trace_serves_all_numbers_of_rows_and_nodes():
    """Rounds are traced with a number of rows and of nodes that no other size has."""

    def round_(table, tokens, logits, root):
        renew(table, tokens.flatten(), logits.flatten(0, 1))
        return unrolled(table, root, root == 0, 8)

    arguments = torch.full((64, 2), -1, dtype=torch.int32), torch.zeros(37, 4).long(), torch.randn(37, 4, 64)
    trace(round_, (*arguments, torch.zeros(37).long()), lambda size: size % 37 == 0, torch.device("cpu"))


def test_rejected_nodes_are_recycled():
    """Each token that is in the table has the candidates of the last logits after it, verified in vain or not."""
    fast = system(num_draft_tokens=8)
    answer = rounds.generated(fast, rounds.prompts(1))
    table = table_of(fast)
    known = {token for token in range(len(table)) if table[token, 0] >= 0}
    assert known >= {*answer[0, rounds.prompts(1).shape[1] : -2].tolist()}
    assert len(known) > len({*answer[0].tolist()})
    assert all(len({*ids_of(row)}) == table.shape[1] for row in table[[*known]])


def test_a_text_that_is_not_shared_leaves_no_trace():
    fast = system()
    rounds.generated(fast, rounds.prompts(2), share_text=False)
    assert (table_of(fast) == -1).all()
    rounds.generated(fast, rounds.prompts(2))
    assert (table_of(fast) >= 0).any()


@pytest.mark.parametrize("share_text", ["anna", False, True])
def test_requests_with_owners_neither_read_nor_write(share_text):
    fast = system()
    rounds.generated(fast, rounds.prompts(2))
    before = table_of(fast).clone()
    with running(fast, max_requests_per_batch=2) as manager:
        for prompt in rounds.prompts(4).tolist()[2:]:
            manager.add_request(prompt, max_new_tokens=rounds.NEW, eos_token_id=-1, share_text=share_text)
        outputs = collect(manager, 2)
    assert torch.equal(table_of(fast), before) == (share_text is not True)
    answers = {tuple(output.prompt_ids + output.generated_tokens) for output in outputs.values()}
    assert answers == {tuple(row) for row in rounds.plain("llama", 4).tolist()[2:]}


def test_texts_of_owners_do_not_read():
    fast = system()
    rounds.generated(fast, rounds.prompts(2))
    known = [token for token, row in enumerate(table_of(fast)) if row[0] >= 0][:1]
    drafter = fast.speculation.engine.runtime.algorithm.head.drafter(3, 64)
    for row, share_text in enumerate([True, "anna", False]):
        drafter.enter(row, share_text, [])
    counts = []
    state = SimpleNamespace(
        tokens=torch.tensor([known * 2] * 3), lengths=torch.ones(3, dtype=torch.int64),
        tree_tokens=torch.tensor([known] * 3), propose=lambda tokens, parents, count, *_: counts.extend(count.tolist()),
    )  # fmt: skip
    drafter.propose(state, 64)
    assert counts[0] == counts[2] > 1 and counts[1] == 1


def test_reset_and_refresh_forget_in_place():
    """Captured graphs read the table, so it stays where it is."""
    fast = system(num_draft_tokens=8)
    table, place = table_of(fast), table_of(fast).data_ptr()
    for forget in (fast.speculation.ngram.reset, fast.speculation.refresh):
        assert torch.equal(rounds.generated(fast, rounds.prompts(2)), rounds.plain("llama", 2))
        assert (table >= 0).any()
        forget()
        assert (table == -1).all() and table_of(fast).data_ptr() == place


@pytest.mark.slow
def test_compiled_rounds_keep_the_same_table():
    tables = []
    for compile in (False, True):
        fast = system(compile=compile, num_draft_tokens=4)
        for _ in range(2):
            assert torch.equal(rounds.generated(fast, rounds.prompts(1)), rounds.plain("llama", 1))
        tables.append(table_of(fast))
    eager, compiled = tables
    assert torch.equal(eager >> 8, compiled >> 8) and ((eager & LOW) - (compiled & LOW)).abs().max() <= 1


# --- answers and options


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("nodes", [2, 16, 64])
def test_answers_do_not_change(rows, nodes):
    fast = system(num_draft_tokens=nodes)
    for _ in range(2):  # the second time drafts are better
        assert torch.equal(rounds.generated(fast, rounds.prompts(rows)), rounds.plain("llama", rows))
    assert fast.speculation.stats.accept_length > 1


@pytest.mark.parametrize("rows", [1, 3])
def test_plain_steps_leave_the_table_alone(monkeypatch, rows):
    """As on a GPU, where rounds verify whole trees or nothing; and the text is drafted from again after plain steps."""
    monkeypatch.setattr(recycle, "WHOLE", "cpu")
    fast = system(adaptive=True, num_draft_tokens=8)
    assert fast.speculation.engine.runtime.algorithm.plan.is_whole
    choices = cycle([8])
    monkeypatch.setattr(WholeTreeBudget, "choose", lambda *how, **more: next(choices))
    for pattern, is_plain in (([8], False), ([1], True), ([8, 1, 1, 8, 1], False)):
        choices, before = cycle(pattern), table_of(fast).clone()
        for number in range(2):
            ids = rounds.prompts(2 * rows)[number * rows :][:rows]
            assert torch.equal(rounds.generated(fast, ids), rounds.plain("llama", 2 * rows)[number * rows :][:rows])
        assert torch.equal(table_of(fast), before) == is_plain


def test_requests_get_the_same_answers():
    rounds.check_requests(system(), 4, 3)


def test_drafts_are_accepted_more_often():
    """On random prompts, in which no n-gram occurs twice, and with a token that nearly decides the next."""
    lengths = {}
    for k in (0, 8):
        fast = system(recycle=k)
        for prompt in rounds.prompts(6)[:, None]:
            rounds.generated(fast, prompt)
        lengths[k] = fast.speculation.stats.accept_length
    assert lengths[8] > lengths[0]


def test_large_vocabularies_keep_fewer_candidates(monkeypatch):
    assert "recycles the 8 likeliest tokens" in system().speculation.explain()
    monkeypatch.setattr(recycle, "BUDGET", 3 * 4 * models.VOCAB + 1)
    fast = system()
    assert "recycles the 3 likeliest tokens" in fast.speculation.explain()
    assert torch.equal(rounds.generated(fast, rounds.prompts(1)), rounds.plain("llama", 1))


def test_options():
    with pytest.raises(ValueError, match=r"recycle must be .*from 0 to 16"):
        NgramOptions(recycle=17)
    with pytest.raises(TypeError, match="recycle: expected int"):
        NgramOptions(recycle=1.5)
    for options in (dict(recycle=0), dict(num_draft_tokens=1)):
        assert isinstance(system(**options).speculation.engine.runtime.algorithm, Ngram)
    assert isinstance(system().speculation.engine.runtime.algorithm, Union)
