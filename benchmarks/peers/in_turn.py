"""Engines of compare.py answer each prompt in turn: for a CPU, whose speed changes while a run lasts.

Every engine with its setting has a process, and all are loaded before the first answer. Only one of them works at a
time, on the same cores.
"""

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.common import pin
from benchmarks.peers.worker import ENGINES

PAUSE = 0.02
"""Seconds before each answer, in which threads of the engine before stop to spin."""


@dataclass
class Answers:
    """An engine's answers to the prompts of a set.

    seconds: of each prompt, once for each repeat.
    tokens: of each prompt's answer.
    counts: `Engine.rounds` of each.
    """

    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    counts: list[tuple[int, int] | None] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over all prompts, each by its fastest repeat: whatever else the machine does can only make it slower."""
        return sum(map(len, self.tokens)) / sum(map(min, self.seconds))


def work(task: dict, connection: Connection) -> None:
    """A process: it loads the engine, says that it is ready or why it refuses, and answers prompts until it gets
    None."""
    pin(task["threads"])
    begin = time.perf_counter()
    try:
        engine = importlib.import_module(f"benchmarks.peers.{ENGINES[task['engine']]}").load(task)
        for prompts in task["sets"].values():
            engine.answer(prompts["tuning"][0])
    except Exception as error:  # any error: a setting that an engine does not serve is a result
        traceback.print_exc()
        connection.send({"refused": f"{type(error).__name__}: {error}".splitlines()[0]})
        return
    connection.send({"version": engine.version, "ready_seconds": time.perf_counter() - begin})
    while (ids := connection.recv()) is not None:
        engine.forget()
        begin = time.perf_counter()
        answer = engine.answer(ids)
        connection.send((time.perf_counter() - begin, answer, engine.rounds(answer)))


@contextmanager
def started(tasks: list[dict]) -> Iterator[list[Connection]]:
    """A process for each task; they load at the same time, and end with the context."""
    context, processes, connections = multiprocessing.get_context("spawn"), [], []
    for task in tasks:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(task, there), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        connections.append(here)
    try:
        yield connections
    finally:
        for process in processes:
            process.kill()
            process.join()


def received(connection: Connection, seconds: float):
    """The next message of a process, or its refusal because it ended or did not answer in time."""
    try:
        if connection.poll(seconds):
            return connection.recv()
    except EOFError:
        return {"refused": "its process ended"}
    return {"refused": f"no result after {seconds:.0f} seconds"}


def measure(tasks: list[dict], timeout: float) -> list[dict]:
    """The results of tasks in the form of `worker.work`, whose prompts are answered in turn."""
    with started(tasks) as connections:
        results = [received(connection, timeout) for connection in connections]
        ready = [number for number, result in enumerate(results) if "version" in result]
        for number in ready:
            results[number]["sets"] = {}
        for name, prompts in tasks[0]["sets"].items():
            answers = {}
            for part, repeats in (("tuning", 1), ("measured", tasks[0]["repeats"])):
                answers[part] = _answered({number: connections[number] for number in ready}, prompts[part], repeats)
            for number in ready:
                results[number]["sets"][name] = _figures(answers["tuning"][number], answers["measured"][number])
    return results


def _answered(connections: dict[int, Connection], prompts: list[list[int]], repeats: int) -> dict[int, Answers]:
    """The answers to all prompts, each asked of every engine before the next."""
    answers = {number: Answers() for number in connections}
    for ids in prompts:
        for repeat in range(repeats):
            for number, connection in connections.items():
                time.sleep(PAUSE)
                connection.send(ids)
                seconds, tokens, count = connection.recv()
                if repeat:
                    answers[number].seconds[-1].append(seconds)
                    continue
                answers[number].seconds.append([seconds])
                answers[number].tokens.append(tokens)
                answers[number].counts.append(count)
    return answers


def _figures(tuning: Answers, measured: Answers) -> dict:
    """The figures of a set, as of `worker.measure_set`."""
    counts = [count for count in measured.counts if count is not None]
    rounds, given = (sum(column) for column in zip(*counts)) if counts else (0, 0)
    return {
        "tuning_tokens_per_second": tuning.tokens_per_second, "tokens_per_second": measured.tokens_per_second,
        "accept_length": given / rounds if rounds else None, "tokens": sum(map(len, measured.tokens)),
        "answers": measured.tokens,
    }  # fmt: skip
