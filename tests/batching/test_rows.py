"""The rows of a batch whose contents another stream still reads."""

from types import SimpleNamespace

import models

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


class PlainRows(Rows):
    def used_slots(self, sequence):
        return 1

    def moved(self, row, to):
        pass


def rows(count):
    fast = speculate(models.ADMITTED["llama"](), compile=False, check=False)
    return PlainRows(fast.speculation.engine.runtime, count, 128)


def test_rounds_wait_before_a_row_that_is_read_is_written():
    place, end = rows(2), End()
    place.reads[1] = end
    place.copy_row(0, 1, 1)
    assert end.waits == 1 and not place.is_read(1)
    place.copy_row(0, 1, 1)
    assert end.waits == 1


def test_rows_move_to_the_front_once_it_is_not_read():
    place, end = rows(2), End()
    place.sequences[1] = sequence = SimpleNamespace(row=1)
    place.reads[0] = end
    place.compact()
    assert sequence.row == 1
    end.is_over = True
    place.compact()
    assert sequence.row == 0
