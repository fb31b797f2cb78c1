"""Files of tries and of corpora, the stores of a GPU: saved, loaded, damaged, and read by each other."""

import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import grown, make, plain

from spec_compile.ngram.corpus import NgramCorpus


def test_a_loaded_trie_takes_the_place_of_what_was_there(tmp_path):
    """`test_against_the_model` saves and loads tries of all kinds, which grow and evict afterwards."""
    trie, again = make(), make()
    trie.add([5, 6, 7])
    trie.save(tmp_path / "trie")
    assert [p.name for p in tmp_path.iterdir()] == ["trie"]
    again.add([1, 2, 3])
    stale = grown(again, [1])
    again.load(str(tmp_path / "trie"))
    with pytest.raises(ValueError, match="not open"):
        again.extend(stale, [1])
    assert again.open() > stale and len(again) == len(trie)
    drafts = [plain(again.propose(grown(again, [token]), 4)) for token in (1, 5)]
    assert drafts == [([1, 0, 0, 0], [-1, 0, 0, 0], 1, 0), ([5, 6, 7, 0], [-1, 0, 1, 0], 3, 1)]


def test_touches_of_what_was_evicted_are_saved(tmp_path):
    """A stream that slept touches (5, 1) last; its occurrence then leaves, and 1 stays the most recent."""
    trie = make(D=3, window=(1, 2), capacity=20)
    sleeper = grown(trie, [5])
    trie.add([[2] * 8, [5, 1], [5, 2]])
    trie.extend(sleeper, [1])
    trie.close(sleeper)
    trie.add([2] * 7)
    assert trie.stats()["evicted"] == 1
    trie.save(tmp_path / "trie")
    again = make(D=3, window=(1, 2), capacity=20)
    again.load(tmp_path / "trie")
    for one in (trie, again):
        assert one.propose(grown(one, [5]), 3).tokens.tolist() == [5, 1, 2]


def corpus_of(*texts, capacity=1000, vocab_size=100):
    corpus = NgramCorpus(capacity, vocab_size, torch.device("cpu"))
    corpus.add([list(text) for text in texts])
    return corpus


def held(corpus):
    return corpus.text[: int(corpus.length)].tolist()


def interleaved(*texts):
    """A trie whose log has the texts token by token in turn."""
    trie = make(D=4)
    streams = [trie.open() for _ in texts]
    for place in range(max(map(len, texts))):
        for stream, text in zip(streams, texts):
            trie.extend(stream, text[place : place + 1])
    return trie


TEXTS = ([1, 2, 3, 4], [9], [5, 6, 7, 1, 2, 8])


def test_corpora_and_tries_read_each_others_files(tmp_path):
    ended = [token for text in TEXTS for token in (*text, -1)]
    stores = {"corpus": corpus_of(*TEXTS), "trie": make(D=4), "interleaved": interleaved(*TEXTS)}
    stores["trie"].add([list(text) for text in TEXTS])
    for name, store in stores.items():
        store.save(tmp_path / name)
        corpus = corpus_of([50, 51])
        corpus.load(tmp_path / name)
        assert held(corpus) == ended and len(corpus) == len(ended)
        corpus.add([60])
        assert held(corpus) == [*ended, 60, -1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stores)

    trie = make(D=4, vocab_size=100)
    trie.add([50, 51])
    trie.load(tmp_path / "corpus")
    for text in ([1, 2], [6, 7], [3]):
        ours, theirs = (plain(one.propose(grown(one, text), 9)) for one in (trie, stores["trie"]))
        assert ours == theirs
    assert trie.propose(grown(trie, [50]), 9).count == 1


def test_empty_stores_are_saved_and_loaded(tmp_path):
    for store in (corpus_of(), make(D=4)):
        store.save(tmp_path / "file")
        for other in (corpus_of([1, 2]), make(D=4)):
            other.load(tmp_path / "file")
            assert other.stats()["tokens"] == 0


@pytest.mark.parametrize("saved", ["trie", "corpus"])
def test_damaged_files(tmp_path, saved):
    """Cut anywhere, with any byte changed, or of another kind: both stores say so, and stay as they were."""
    path = tmp_path / "file"
    stores = {"trie": make(D=4, capacity=50), "corpus": corpus_of()}
    stores[saved].add([list(text) for text in TEXTS])
    stores[saved].save(path)
    good = path.read_bytes()
    damaged = {good[:n]: "" for n in range(len(good))} | {good + b"x": "announces", b"": "not written by"}
    damaged |= {good[:i] + bytes([good[i] ^ 0x41]) + good[i + 1 :]: "" for i in range(len(good))}
    damaged |= {b"PK\x03\x04" + good[4:]: "not written by", good[:8] + struct.pack("<I", 2) + good[12:]: "version is 2"}
    targets = make(D=4, capacity=50), corpus_of([1, 2])
    targets[0].add([5, 6, 7])
    before, draft = [store.stats() for store in targets], plain(targets[0].propose(grown(targets[0], [5]), 4))
    before[0] = targets[0].stats()
    for data, reason in damaged.items():
        path.write_bytes(data)
        for store, held in zip(targets, before):
            with pytest.raises(ValueError, match=f"{path}: cannot load this n-gram (corpus|trie): .*{reason}"):
                store.load(path)
            assert store.stats() == held
    assert plain(targets[0].propose(grown(targets[0], [5]), 4)) == draft
    with pytest.raises(FileNotFoundError):
        targets[0].load(tmp_path / "absent")
    path.write_bytes(good)
    targets[0].load(path)
    assert targets[0].stats()["tokens"] == sum(map(len, TEXTS))


def test_corpora_that_do_not_fit(tmp_path):
    path = tmp_path / "corpus"
    corpus_of(*TEXTS).save(path)
    with pytest.raises(ValueError, match=r"its texts take 14 tokens, this corpus holds 13: pass capacity=14 or more"):
        corpus_of(capacity=13).load(path)
    for store in (corpus_of(vocab_size=9), make(D=4, vocab_size=9)):
        with pytest.raises(ValueError, match="holds token id 9, outside the vocabulary"):
            store.load(path)
    with pytest.raises(ValueError, match="capacity must be from 2"):
        corpus_of(capacity=1)


def test_a_corpus_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "corpus"
    corpus_of([1, 2]).save(path)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        corpus_of(*TEXTS).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]
    corpus = corpus_of()
    corpus.load(path)
    assert held(corpus) == [1, 2, -1]


def test_old_texts_leave_a_corpus():
    """Those that half of the corpus has left with, too."""
    corpus = corpus_of([1, 2], [6], capacity=20)
    places = corpus.append(torch.tensor([7] * 4))
    corpus.add([8] * 6)  # the oldest half leaves
    corpus.add([9] * 3)
    before = held(corpus)
    corpus.remove(places)
    assert 7 in before and 7 not in held(corpus) and held(corpus)[-4:] == [9, 9, 9, -1]
    corpus.reset()
    corpus.add([1])
    corpus.remove(places)  # it has left long since
    assert held(corpus) == [1, -1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=9)), max_size=30))
def test_corpora_without_what_was_removed(steps):
    """As long as nothing has to leave, a corpus is one that never had the removed texts."""
    corpus, other = corpus_of(), corpus_of()
    for private, ids in steps:
        places = corpus.append(torch.tensor(ids, dtype=torch.int64))
        if private:
            corpus.remove(places)
        else:
            other.add(ids)
        assert held(corpus) == held(other) and len(corpus) == len(other)


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "trie"
    trie = make(D=4, capacity=500)
    trie.add(list(range(100)))
    trie.save(path)
    for other, reason in (
        (make(D=5, capacity=500), "branch_length is 4, this trie's 5"),
        (make(D=4, capacity=300), "more than this trie's capacity"),
        (make(D=4, capacity=500, vocab_size=99), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=reason):
            other.load(path)
        assert len(other) == 0
    with pytest.raises(OSError):
        trie.save(tmp_path / "no" / "such" / "folder")


def test_contradictory_snapshots_are_refused():
    """Behind the checksum: what a hand-made file could hold."""
    trie = make(D=3, window=(1, 2))
    trie.add([[1, 2], [1, 3], [1, 2, 3]])
    nodes, tokens, links, order = trie._core.snapshot()
    assert order == struct.pack("<2i", 2, 3)
    for change, reason in (
        ((nodes + 1, tokens, links, order), "number of nodes"),
        ((nodes, tokens, links[:-4], order), "one link for each"),
        ((nodes, tokens, links[:-4] + struct.pack("<I", 1), order), "links"),
        ((nodes, tokens, struct.pack("<7I", 2, 1, 1, 0, 1, 1, 0), order), "links|number"),
        ((nodes, tokens, links, order[:4]), "too short"),
        ((nodes, tokens, links, order + order), "too long"),
        ((nodes, tokens, links, order[:4] * 2), "sibling order"),
        ((nodes, tokens, links, struct.pack("<2i", 2, 9)), "sibling order"),
        ((nodes, struct.pack("<i", -1) + tokens[4:], links, order), "vocabulary"),
    ):
        with pytest.raises(ValueError, match=reason):
            trie._core.restore(*change)
        assert len(trie) == nodes
    trie._core.restore(nodes, tokens, links, order)
    assert len(trie) == nodes
