"""FairLock: work that can wait goes between calls, is not starved by them, and does not starve them."""

import itertools
import threading
import time
from contextlib import contextmanager

import pytest

from spec_compile.runtime import turns as module
from spec_compile.runtime.turns import FairLock


@contextmanager
def thread(work):
    running = threading.Thread(target=work, daemon=True)
    running.start()
    yield running
    running.join(30)
    assert not running.is_alive()


def busy(turns, done, count, of=lambda turns: turns):
    """Calls one after the other, without a pause, until `done`."""
    while not done.is_set():
        with of(turns):
            count.append(time.perf_counter())
            time.sleep(0.002)


@pytest.mark.parametrize("of", [lambda turns: turns, FairLock.of_a_round], ids=["calls", "rounds"])
def test_a_busy_loop_does_not_starve_work_nor_work_the_loop(monkeypatch, of):
    monkeypatch.setattr(module, "EVERY", 0.1)
    turns, done, calls, pieces = FairLock(), threading.Event(), [], []
    with thread(lambda: busy(turns, done, calls, of)):
        while len(pieces) < 5:
            with turns.between(10) as is_mine:
                assert is_mine and turns.is_mine
                pieces.append(len(calls))
        done.set()
    between = [later - earlier for earlier, later in itertools.pairwise(pieces)]
    assert min(between) >= 5, "after a piece of work calls go first for a while"


def test_calls_keep_their_share_after_a_long_piece(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.01)
    turns, done, moments = FairLock(), threading.Event(), []
    with thread(lambda: busy(turns, done, [])):
        for _ in range(3):
            with turns.between(10) as is_mine:
                assert is_mine
                moments.append(time.perf_counter())
                time.sleep(0.1)
        done.set()
    assert min(b - a for a, b in itertools.pairwise(moments)) > 0.1 * (1 + module.SHARE)


def test_work_waits_for_a_call_and_for_a_pause_after_it(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 60.0)
    turns, inside, go_on = FairLock(), threading.Event(), threading.Event()
    ended = []

    def call():
        with turns:
            inside.set()
            go_on.wait(30)
            ended.append(time.perf_counter())

    with thread(call):
        inside.wait(30)
        with turns.between(0.2) as is_mine:
            assert not is_mine and not turns.is_mine
        with turns.between(0) as is_mine:
            assert not is_mine
        go_on.set()
        with turns.between(30) as is_mine:
            assert is_mine and time.perf_counter() > ended[0] + module.PAUSE
            with turns:
                pass
            assert turns.is_mine
    assert not turns.is_mine


def test_work_inside_a_call_of_the_same_thread_gets_no_turn():
    turns = FairLock()
    with turns, turns.between(0) as is_mine:
        assert not is_mine
    with turns.between(0) as is_mine:
        assert is_mine


def test_calls_go_on_after_work_lost_its_patience(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.0)
    turns, inside, go_on = FairLock(), threading.Event(), threading.Event()

    def call():
        with turns:
            inside.set()
            go_on.wait(30)

    def next_call():
        with turns:
            pass

    with thread(call):
        inside.wait(30)
        with turns.between(0.2) as is_mine:
            assert not is_mine
        with thread(next_call):
            go_on.set()


def test_an_error_in_work_gives_the_turn_back():
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns.between(5):
        raise ZeroDivisionError
    with turns:
        assert turns.is_mine
