"""A rank that dies, hangs or comes late is named by all others within their deadline, and nothing of them stays."""

import dataclasses
import datetime
import glob
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import nullcontext

import models
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transformers import LogitsProcessor
from transformers.generation.continuous_batching.requests import RequestStatus

from spec_compile import speculate
from spec_compile.batching.model import share
from spec_compile.batching.output import Output, TokenScore
from spec_compile.parallel import messages, ranks, start
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
    others = [rank for rank in range(size) if rank != absent]
    for text in find_ranks_in_processes(size, others, monkeypatch):
        assert f"rank {absent} has ended, or not come within 1 s; start the script by torchrun" in text


def find_ranks_in_processes(size, ranks, monkeypatch, **variables):
    """`find_ranks` in processes with the variables of torchrun -> their errors, or where they listen, in any order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = dict(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) | variables
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    context = multiprocessing.get_context("fork")
    results, met = context.SimpleQueue(), context.Barrier(len(ranks))

    def on_a_rank(rank):
        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        try:
            found = start.find_ranks("auto", torch.nn.Identity())
            dist.all_reduce(torch.ones(3), group=found.group)
            sockets = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
            results.put(sorted({each.laddr.ip for each in sockets}))
            met.wait(20)
        except (RuntimeError, ValueError) as error:
            results.put(str(error))

    processes = [context.Process(target=on_a_rank, args=(rank,)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    return [results.get() for _ in processes]


def test_no_other_host_reaches_ranks(tmp_path, monkeypatch):
    """torch's store listens on all addresses, and gloo on that of the host's name."""
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, on_loopback(getattr(dist, name)))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert find_ranks_in_processes(2, [0, 1], monkeypatch, MASTER_ADDR="0.0.0.0") == [["127.0.0.1"]] * 2
    assert find_ranks_in_processes(2, [0], monkeypatch, LOCAL_WORLD_SIZE=1) == [start.ONE_HOST]
    monkeypatch.setattr(dist, "TCPStore", None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    store = {start.STORE: tmp_path / "store"}
    assert find_ranks_in_processes(2, [0, 1], monkeypatch, **store) == [["127.0.0.1"]] * 2


def on_loopback(function):
    """The function, which has to be called while gloo's interface is that of loopback."""

    def called(*arguments, **options):
        assert os.environ["GLOO_SOCKET_IFNAME"] == start.INTERFACE
        return function(*arguments, **options)

    return called


def asked(**changes):
    return {"error": None, "parts": {"the model": "a"}, "position": 0} | changes


def without(name):
    return {key: value for key, value in asked().items() if key != name}


@pytest.mark.parametrize(
    "data, reason",
    [
        (asked(code="import os"), "code: an unknown name"),
        (asked(__reduce__=["os.system", "id"]), "__reduce__: an unknown name"),
        (without("position"), "position: missing"),
        (asked(position="0"), "position: expected int, got str"),
        (asked(position=True), "position: expected int, got bool"),
        (asked(position=1.5), "position: expected int, got float"),
        (asked(error=7), "error: expected str, got int"),
        (asked(parts={"the model": ["a"]}), "parts.the model: expected str, got list"),
        (asked(parts=None), "parts: expected dict"),
        ([asked()], "expected the fields of RankTask, got list"),
        (None, "expected the fields of RankTask, got NoneType"),
        (b"\x80\x04\x95 a pickle", "it is damaged"),
        (b"{" * 4000, "it is damaged"),
        (b"[" * 4000, "it is damaged"),
        (b"", "it is damaged"),
    ],
    ids=str,
)
def test_messages_of_another_kind_are_refused_by_name(data, reason):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(ValueError, match="message") as refusal:
        messages.from_json(data, ranks.RankTask, "message")
    assert reason in str(refusal.value)


def test_packed_messages():
    """Any word that has changed, is missing or is too many is noticed, and what is no plain data is never sent."""
    scores = [TokenScore(3, -0.1, ((3, -0.1), (4, float("-inf"))))]
    outputs = {"a": Output("a", [1, 2**40], [3], [-0.1], status=RequestStatus.FINISHED, scores=scores, error="\0é")}
    numbers = messages.pack(outputs)
    assert messages.unpack(numbers, dict[str, Output], "outputs") == outputs
    damaged = [[], [0], [-1, 0], numbers[:-1], [*numbers, 0], [2**62, *numbers[1:]], [numbers[0] - 1, *numbers[1:]]]
    damaged += [[*numbers[:at], numbers[at] ^ 1, *numbers[at + 1 :]] for at in range(len(numbers))]
    for each in damaged:
        with pytest.raises(ValueError, match="outputs: it is damaged"):
            messages.unpack(each, dict[str, Output], "outputs")
    with pytest.raises(ValueError, match=r"outputs\.a: expected the fields of Output, got int"):
        messages.unpack(messages.pack({"a": 7}), dict[str, Output], "outputs")
    for value in (object(), torch.ones(1), {"a": {1}}, print):
        with pytest.raises(TypeError, match="expected plain data, got"):
            messages.pack(value)


def test_all_ranks_refuse_a_message_by_name(tmp_path):
    """Whoever sent it, and whatever way it took: between all ranks, as a result of the first, or through the ring."""

    @dataclasses.dataclass
    class Newer(ranks.RankTask):
        more: int = 0

    def on_a_rank(rank):
        mine = ranks.Ranks(dist.group.WORLD, dist.group.WORLD, "", 5.0)
        texts = []
        for attempt in (
            lambda: mine._exchange((Newer if rank == 1 else ranks.RankTask)(None, {}, 0), ranks.RankTask),
            lambda: mine._exchange(None if rank == 1 else ranks.RankTask(None, {}, 0), ranks.RankTask),
            lambda: share(mine, {"a": Newer(None, {}, 0)}, dict[str, ranks.RankTask]),
        ):
            with pytest.raises(ValueError) as refusal:
                attempt()
            texts.append(str(refusal.value))
        with pytest.raises(ValueError, match="call: rank 1 refused it") if rank == 0 else nullcontext():
            mine.agree("call", {}, ValueError("\0" * 10_000) if rank == 1 else None)  # whose JSON is six times as long
        mine.meet()
        if rank == 0:
            mine._ring.write([7, 0])
            mine._ring.write([])
            mine.meet()
            return texts
        for reason in ("an unknown kind, 7", "an unknown kind, None"):
            with pytest.raises(ValueError, match=reason):
                mine.lead(list)
        mine.meet()
        mine._ring._ring[mine._ring.position] = 1 << 40
        mine._ring._counts[0] += 1
        with pytest.raises(ValueError, match="is damaged"):
            mine.lead(list)
        return texts

    first, second = run_ranks(2, on_a_rank, rendezvous=tmp_path / "meeting")
    assert first == second
    assert "the message of rank 1.more: an unknown name; restart all ranks" in first[0]
    assert "the message of rank 1: expected the fields of RankTask" in first[1]
    assert "what rank 0 shares.a.more: an unknown name" in first[2]


def test_shared_memory_of_others_is_refused(tmp_path):
    ring = CommandRing(0, 2, None, lambda: None, 0.1)
    link, short = tmp_path / "link", tmp_path / "short"
    link.symlink_to(ring.path)
    short.write_bytes(b"12")
    with pytest.raises(OSError, match="symbolic links"):
        CommandRing(1, 2, str(link), lambda: None, 0.1)
    with pytest.raises(ValueError, match="a file of the same user"):
        CommandRing(1, 2, str(short), lambda: None, 0.1)
    ring.unlink()


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
        begin, used = time.monotonic(), time.process_time()
        error = mine._of_the_lost(RuntimeError("of gloo"))
        return str(error), time.monotonic() - begin, time.process_time() - used

    (text, seconds, used), _ = run_ranks(2, on_a_rank, rendezvous=tmp_path / "meeting", without=1)
    wanted = {"dies": "rank 1 (process", "gives up": "of gloo", "hangs": "rank 1 has stopped answering"}[how]
    assert text.startswith(wanted)
    assert (seconds >= 0.5) == (how == "hangs") and used < 0.1
