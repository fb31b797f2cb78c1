"""The rows of a batch: how they move with their pages, and that those wait whose states another stream still reads."""

import dataclasses

import models
import pytest
import torch

from spec_compile import speculate
from spec_compile.batching.rows import Rows


class End:
    """An event of a GPU, as far as rows use it."""

    def __init__(self):
        self.is_over, self.waits = False, 0

    def query(self):
        return self.is_over

    def wait(self):
        self.waits += 1


def rows(count, pool=20, name="llama"):
    model = (models.ADMITTED | models.HYBRIDS)[name]()
    fast = speculate(model, compile=False, check=False)
    return Rows(fast.speculation.engine.runtime, count, 128, pool)


def test_rounds_wait_before_a_row_that_is_read_is_written():
    place, end = rows(2), End()
    place.reads[1] = end
    place.move_row(0, 1)
    assert end.waits == 1 and not place.is_read(1)
    place.move_row(0, 1)
    assert end.waits == 1


def test_rows_move_to_the_front_once_it_is_not_read():
    place, end = rows(2), End()
    place.sequences[1] = first = SequenceOf(1, [])
    place.reads[0] = end
    place.compact()
    assert first.row == 1
    end.is_over = True
    place.compact()
    assert first.row == 0


class SequenceOf:
    """A sequence, as far as rows use it."""

    def __init__(self, row, pages):
        self.row, self.pages = row, pages


def test_rows_are_told_their_pages():
    place, one, other = rows(4), SequenceOf(3, [5, 2]), SequenceOf(0, [7])
    place.place({one: one.pages, other: other.pages})
    one.pages += [9, 1]
    place.place({one: [9, 1], other: []})
    table = place.state.kv.table
    assert table[3, :5].tolist() == [5, 2, 9, 1, 0] and table[0, :2].tolist() == [7, 0]
    assert not table[1:3].any()
    place.state.lengths[3], place.state.late[3] = 200, 9
    place.vacate(3)
    assert not table[3].any() and place.state.finished[3]
    assert not place.state.lengths[3] and not place.state.late[3]


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_row_moves_with_its_pages_and_states(name):
    """Between rows of the same pool, of which no page is copied."""
    place = rows(2, name=name)
    other = Rows(place.runtime, 3, 128, place)
    assert all(map(torch.Tensor.is_set_to, place.cache_tensors(), other.cache_tensors()))
    place.state.enter(1, [5, 6, 7], [3], lengths=2, max_lengths=20)
    place.place({SequenceOf(1, [4, 8]): [4, 8]})
    for state in place.state_tensors():
        state[1].normal_()
    states = [state[1].clone() for state in place.state_tensors()]
    place.move_row(1, 2, other)
    assert other.state.kv.table[2, :3].tolist() == [4, 8, 0] and not place.state.kv.table.any()
    assert other.state.tokens[2, :3].tolist() == [5, 6, 7] and other.state.lengths[2] == 2
    assert other.state.is_eos[2].nonzero().tolist() == [[3]] and place.state.finished[1]
    assert all(torch.equal(state, after[2]) for state, after in zip(states, other.state_tensors()))


def test_chunks_of_others_do_not_change_the_states_of_an_idle_row():
    """Another stream may copy them still."""
    place = rows(2, name="lfm2")
    place.state.enter(0, [5, 6, 7], [3], lengths=2)
    for state in place.state_tensors():
        state[0].normal_()
    states = [state[0].clone() for state in place.state_tensors()]
    place.vacate(0)
    place.all.prefill(32, 128)
    assert all(torch.equal(state, after[0]) for state, after in zip(states, place.state_tensors()))


def test_a_page_is_copied_in_every_cache():
    place = rows(1)
    for tensor in place.cache_tensors():
        tensor[3].normal_()
    place.copy_page(3, 7)
    assert all(torch.equal(tensor[3], tensor[7]) for tensor in place.cache_tensors())


def test_widths():
    """With many rows each width is twice the one before at most, because their arithmetic counts."""
    place = rows(2)
    place.runtime.options = dataclasses.replace(place.runtime.options, compile=True)
    assert Rows(place.runtime, 200, 128, place).widths[-3:] == [64, 128, 200]
