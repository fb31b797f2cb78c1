"""`DraftRecord`: gains by confidence, kept for later processes. `Hindsight`: trees that nobody verified."""

import json

import pytest
import torch
from rows import begin_rows

from spec_compile.graph import ModelGraph
from spec_compile.runtime.draft_record import (
    ALL,
    FADE,
    NEVER,
    NO_TREE,
    DraftRecord,
    DraftRecords,
    Group,
    Hindsight,
    TreeOutcome,
)
from spec_compile.runtime.state import State


class Memory(dict):
    """A store in memory."""

    recall = dict.get
    keep = dict.__setitem__


def drafting(record, rounds, gained):
    for _ in range(rounds):
        record.learn([4, 16], [TreeOutcome(16, Group(0, 0), [*range(1, gained + 1)])])
        record.watch(gained)


def test_a_path_tells_the_gain_of_every_size():
    record = DraftRecord()
    record.learn([2, 4, 16], [TreeOutcome(16, ALL, [1, 3, 9]), TreeOutcome(16, ALL, [])])
    assert [record.gain(nodes, []) for nodes in (2, 4, 16, 32)] == [0.5, 1.0, 1.5, 0.0]


def test_confidences_differ_as_far_as_they_are_known():
    record = DraftRecord()
    for _ in range(100):
        record.learn([4], [TreeOutcome(4, Group(0, 1), [])])
        record.learn([4], [TreeOutcome(4, Group(0, 3), [1, 2])])
    low, high, other = (record.gain(4, [Group(0, confidence)]) for confidence in (1, 3, 7))
    assert low < 0.1 and high > 1.9
    assert other == record.gain(4, []) == record.gain(4, [ALL]) and 0.7 < other < 1.3
    assert record.gain(4, [Group(0, 1), Group(0, 3)]) == pytest.approx((low + high) / 2)


def test_old_evidence_counts_less():
    record = DraftRecord()
    drafting(record, 10, 2)
    for _ in range(50):
        record.fade()
    assert record.gains[ALL, 4].rounds == pytest.approx(10 * FADE**50)
    record.learn([4, 16], [TreeOutcome(16, Group(0, 0), [])])
    assert record.gain(4, []) < 0.2


@pytest.mark.parametrize("gained", [0, 3])
def test_a_later_process_begins_with_what_is_known(caplog, gained):
    store, first, later = Memory(), DraftRecords(), DraftRecords()
    first.open(store, "record_16")
    record = first["round"]
    drafting(record, NEVER - 1, gained)
    first.keep()
    assert not store
    record.budget[0], record.has_paid = -0.5, bool(gained)
    drafting(record, 1, gained)
    first.keep()
    caplog.clear()
    later.open(store, "record_16")
    found = later["round"]
    assert (found.drafted, found.level, found.budget_of()) == (NEVER, gained, -0.5)
    assert found.gain(16, []) == gained and found.has_paid == bool(gained)
    assert ("earlier processes" in caplog.text) == (not gained)
    assert not later["look"].drafted


def test_records_are_kept_each_time_their_rounds_double():
    store, records, writes = Memory(), DraftRecords(), 0
    records.open(store, "a")
    for _ in range(1000):
        drafting(records["round"], 1, 1)
        records.keep()
        writes += bool(store)
        store.clear()
    assert writes == 5  # after 32, 64, 128, 256 and 512 rounds
    DraftRecords().keep()


@pytest.mark.parametrize(
    "data",
    [None, b"", b"{", b"[]", b"3", json.dumps({"format": 0, "round": {}}).encode(),
     json.dumps({"format": 1, "round": {"gains": 3}}).encode(), json.dumps({"format": 1, "round": None}).encode()],
)  # fmt: skip
def test_a_damaged_record_is_a_new_one(data):
    store, records = Memory(), DraftRecords()
    if data is not None:
        store["a"] = data
    records.open(store, "a")
    assert records["round"] == DraftRecord()


def test_trees_that_the_host_did_not_know_have_no_confidence():
    record = DraftRecord()
    groups = [Group(0, NO_TREE), ALL, Group(0, 2)]
    record.learn([4], [TreeOutcome(4, group, [1]) for group in groups])
    assert {*record.gains} == {(ALL, 4), (Group(0, 2), 4)} and record.gain(4, groups[:1]) == 1.0


# --- hindsight


VOCAB = 50


def texts(batch):
    graph = ModelGraph(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), (), VOCAB, 8, torch.float32, None, "")
    state = State(graph, batch, 128, torch.device("cpu"))
    begin_rows(state, [[1, 2, 3]] * batch, [100] * batch)
    state.lengths.fill_(2)
    return state, Hindsight(state)


def looks(batch, *rounds):
    """What hindsight tells before each round, and after the last one.

    rounds: for each row its tree, which is tokens, parents and confidence without the root, and the tokens that it
    gains.
    """
    state, hindsight = texts(batch)
    told = []
    for trees, gained in rounds:
        state.root()
        for row, (tokens, parents, confidence) in enumerate(trees):
            nodes = slice(1, 1 + len(tokens))
            state.tree_tokens[row, nodes] = torch.tensor(tokens, dtype=torch.int64)
            state.tree_parents[row, nodes] = torch.tensor(parents, dtype=torch.int64)
            state.tree_count[row], state.tree_confidence[row] = 1 + len(tokens), confidence
        told.append(hindsight.look())
        write(state, gained)
    state.root()
    return state, hindsight, [*told, hindsight.look()]


def write(state, gained):
    for row, tokens in enumerate(gained):
        end = int(state.lengths[row])
        state.tokens[row, end + 1 : end + 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        state.lengths[row] += len(tokens)


NOTHING = [], [], 0


@pytest.mark.parametrize(
    "rounds, told",
    [
        # root -> 4; root -> 5 -> 6 -> 7, which the text leaves behind 6
        (
            [([([4, 5, 6, 7], [0, 0, 2, 3], 9)], [[5]]), ([NOTHING], [[6]]), ([NOTHING], [[8]]), ([NOTHING], [[]])],
            [[], [], [], [(9, [2, 3])], []],
        ),
        # The end of a branch ends a tree at once, and a round may gain several tokens.
        ([([([4, 5], [0, 0], 1)], [[5]]), ([([7], [0], 2)], [[8, 9, 10]])], [[], [(1, [2])], [(2, [])]]),
        # Several trees are followed at once.
        (
            [([([4, 5, 6], [0, 1, 2], 1)], [[4]]), ([([5, 7], [0, 1], 2)], [[5, 6]])],
            [[], [], [(1, [1, 2, 3]), (2, [1])]],
        ),
    ],
    ids=["left", "at its end", "several"],
)
def test_a_tree_is_told_of_when_the_text_leaves_it(rounds, told):
    assert looks(1, *rounds)[2] == told


def test_rows_are_apart_and_a_new_text_forgets_the_trees():
    trees = [([4], [0], 1), ([4, 5], [0, 1], 2)]
    state, hindsight, told = looks(2, (trees, [[9], [4]]))
    assert told == [[], [(1, [])]]
    begin_rows(state, [[1]] * 2, [100] * 2)
    for gained in ([], [[], [5, 5, 5, 5, 5]]):
        write(state, gained)
        assert hindsight.look() == []
