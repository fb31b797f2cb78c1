"""FairLock: work that can wait goes between calls, is not starved by them, and does not starve them."""

import itertools
import threading
import time
from contextlib import ExitStack, contextmanager

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


@contextmanager
def a_call(turns):
    """Another thread has the turn of a call until the event is set that this gives."""
    inside, go_on = threading.Event(), threading.Event()

    def call():
        with turns:
            inside.set()
            go_on.wait(30)

    with thread(call):
        inside.wait(30)
        yield go_on


def test_work_waits_for_a_call_and_for_a_pause_after_it(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 60.0)
    turns = FairLock()
    with a_call(turns) as go_on:
        for patience in (0.2, 0):
            with turns.between(patience) as is_mine:
                assert not is_mine and not turns.is_mine
        ended = time.perf_counter()
        go_on.set()
        with turns.between(30) as is_mine:
            assert is_mine and time.perf_counter() > ended + module.PAUSE
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
    turns = FairLock()
    with a_call(turns) as go_on:
        with turns.between(0.2) as is_mine:
            assert not is_mine
        with thread(lambda: turns.__enter__() or turns.__exit__()):
            go_on.set()


def test_an_error_in_work_gives_the_turn_back():
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns.between(5):
        raise ZeroDivisionError
    with turns:
        assert turns.is_mine


def test_calls_and_rounds_share_the_time():
    """Three threads that call in turn, and rounds: both go on, and each has about half."""
    turns, until = FairLock(), time.monotonic() + 1.5
    spent = {"calls": 0.0, "rounds": 0.0}

    def run(kind, turn, seconds):
        while time.monotonic() < until:
            with turn():
                time.sleep(seconds)
                spent[kind] += seconds

    with ExitStack() as calls, turns.rounds():
        for _ in range(3):
            calls.enter_context(thread(lambda: run("calls", lambda: turns, 0.01)))
        run("rounds", turns.of_a_round, 0.002)
    assert min(spent.values()) > 0.25 * sum(spent.values())
