"""A rank that dies, hangs or comes late is named by all others within their deadline, and nothing of them stays."""

import datetime
import glob
import multiprocessing
import os
import signal
import socket
import threading
import time

import models
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transformers import LogitsProcessor

from spec_compile import speculate
from spec_compile.parallel import ranks, start
from spec_compile.parallel.commands import CommandRing, RingTimeoutError

pytestmark = pytest.mark.xdist_group("tensor_parallel")
SECONDS = {2: 3, 4: 10, 8: 20}
"""The deadline, by the number of ranks, which share the cores of a small machine."""
GREEDY = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
PROMPT = torch.tensor([[5, 6, 7, 8]])


class Faulty(LogitsProcessor):
    """Dies, hangs or does nothing at its third call."""

    def __init__(self, fault):
        self.fault, self.calls = fault, 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.fault()
        return scores


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def shared_files():
    return glob.glob("/dev/shm/spec_compile_*")


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A function that runs a model on ranks of which one is faulty -> what the others have raised, and after how long.

    where: "load", "call" (before it) or "round". how: "dies" or "hangs".
    """

    def run(size, victim, where, how):
        limit = datetime.timedelta(seconds=SECONDS[size])
        monkeypatch.setattr(start, "TIMEOUT", limit)
        monkeypatch.setattr(ranks, "GRACE", 1.0)
        model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, num_attention_heads=8, head_dim=8))

        def fault():
            die() if how == "dies" else time.sleep(100)

        def on_a_rank(rank):
            group = dist.new_group(timeout=limit)
            options = dict(compile=False, max_cache_len=100, check=False, tensor_parallel=group)
            is_faulty, begin = rank == victim, time.monotonic()
            try:
                if is_faulty and where == "load":
                    fault()
                fast = speculate(model, "ngram", **options)
                begin = time.monotonic()
                if is_faulty and where == "call":
                    fault()
                processor = Faulty(fault if is_faulty and where == "round" else lambda: None)
                fast.generate(PROMPT, logits_processor=[processor], **GREEDY)
            except RuntimeError as error:
                again = None
                if where != "load":
                    with pytest.raises(RuntimeError) as further:
                        fast.generate(PROMPT, **GREEDY)
                    again = str(further.value)
                return str(error), again, time.monotonic() - begin
            return "no error", None, 0.0

        before = shared_files()
        children = psutil.Process().children(recursive=True)
        results = run_ranks(size, on_a_rank, rendezvous=tmp_path / "meeting", without=victim)
        assert shared_files() == before and psutil.Process().children(recursive=True) == children
        return [result for rank, result in enumerate(results) if rank != victim]

    return run


CASES = [(where, how) for where in ("load", "call", "round") for how in ("dies", "hangs")]
SIZES = [(2, 0), (2, 1), (4, 2), (8, 7)]


@pytest.mark.sweep("call-dies-2-1 round-dies-2-0")
@pytest.mark.parametrize("size, victim", SIZES)
@pytest.mark.parametrize("where, how", CASES)
def test_the_faulty_rank_is_named(faults, where, how, size, victim):
    for text, again, seconds in faults(size, victim, where, how):
        assert f"rank {victim} " in text, text
        if where == "load":
            assert "has ended, or not come within" in text
        else:
            assert ("has died" if how == "dies" else "has stopped answering") in text
            assert again == text
        assert seconds < SECONDS[size] + 6


@pytest.mark.sweep("2-last")
@pytest.mark.parametrize("missing", ["first", "last"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_that_torchrun_started_name_one_that_does_not_come(size, missing, monkeypatch):
    """`find_ranks` makes the group itself. The first rank keeps the store through which the others ask for it."""
    absent = 0 if missing == "first" else size - 1
    monkeypatch.setattr(start, "TIMEOUT", datetime.timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in dict(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, str(value))
    results = multiprocessing.get_context("fork").SimpleQueue()

    def on_a_rank(rank):
        os.environ["RANK"] = str(rank)
        try:
            start.find_ranks("auto", torch.nn.Identity())
        except RuntimeError as error:
            results.put(str(error))

    others = [rank for rank in range(size) if rank != absent]
    processes = [multiprocessing.get_context("fork").Process(target=on_a_rank, args=(rank,)) for rank in others]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    for _ in processes:
        assert f"rank {absent} has ended, or not come within 1 s; start the script by torchrun" in results.get()


def test_a_decision_that_does_not_come():
    """A reader gives up after the deadline unless it is patient; a writer if nobody reads."""
    looks = []
    first = CommandRing(0, 2, None, lambda: looks.append("first"), 0.3)
    second = CommandRing(1, 2, first.path, lambda: looks.append("second"), 0.3)
    first.unlink()
    with pytest.raises(RingTimeoutError, match="waited 0 s"):
        second.read()
    assert looks == ["second"] * len(looks) and looks
    first.write([1, 2])
    assert second.read() == [1, 2]
    timer = threading.Timer(0.6, first.write, ([3],))
    timer.start()
    assert second.read(is_patient=True) == [3]
    timer.join()
    first.write([0] * 200_000)
    with pytest.raises(RingTimeoutError):
        first.write([0] * 200_000)


@pytest.mark.parametrize("how", ["dies", "gives up", "hangs"])
def test_waiting_for_the_lost_takes_no_processor(how, tmp_path, monkeypatch):
    """A rank sleeps until the other one has died or given up, and hears of both at once."""
    monkeypatch.setattr(ranks, "GRACE", 0.5)

    def on_a_rank(rank):
        mine = ranks.Ranks(dist.group.WORLD, dist.group.WORLD, "", 5.0)
        if rank == 1:
            time.sleep(0.2)
            {"dies": die, "gives up": mine._ring.give_up, "hangs": lambda: None}[how]()
            return None
        begin, used, looks = time.monotonic(), time.process_time(), mine._ring.silent
        seen = []
        mine._ring.silent = lambda: seen.append(looks()) or seen[-1]
        error = mine._of_the_lost(RuntimeError("of gloo"))
        return str(error), time.monotonic() - begin, time.process_time() - used, seen

    (text, seconds, used, seen), _ = run_ranks(2, on_a_rank, rendezvous=tmp_path / "meeting", without=1)
    wanted = {"dies": "rank 1 (process", "gives up": "of gloo", "hangs": "rank 1 has stopped answering"}[how]
    assert text.startswith(wanted)
    assert (seconds >= 0.5) == (how == "hangs") and used < 0.1
    assert seen == [[0, 1], [1], [] if how == "gives up" else [1]]  # in give_up(), before and after the wait
