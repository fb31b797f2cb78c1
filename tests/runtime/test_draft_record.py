"""`DraftRecord`: gains by confidence, and records that later processes begin with."""

import json

import pytest

from spec_compile.runtime.draft_record import ALL, FADE, NEVER, NO_TREE, DraftRecord, DraftRecords, Group, TreeOutcome


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
