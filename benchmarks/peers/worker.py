"""The process of one engine with one setting: it loads, warms up, and answers prompts that compare.py sends.

A task has these fields; every engine gets the same:
engine: one of `ENGINES`
setting: a dict that the engine's module explains
model, dtype, device, threads, new_tokens, repeats
weights: None, or to what the engine rounds them
max_len: most tokens of a prompt and its answer
eos: ids that end an answer
sets: name -> "tuning" and "measured" prompts, as token ids

On a CPU, whose speed changes while a run lasts, all engines are loaded before the first answer, and answer each prompt
in turn on the same cores. On a GPU one comes after another.
"""

import importlib
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from typing import Protocol

from benchmarks.common import pin

ENGINES = {"ours": "ours", "transformers": "hf", "vllm": "on_vllm", "sglang": "on_sglang", "llama_cpp": "on_llama_cpp"}
"""Engine -> its module in this folder, which has `load(task)`."""
PAUSE = 0.02
"""Seconds before each answer, in which threads of the engine before stop to spin."""


class Engine(Protocol):
    """An engine with one setting, ready to answer."""

    version: str

    def forget(self) -> None:
        """Drop everything that earlier answers have left in caches and tries."""

    def answer(self, ids: list[int]) -> list[int]:
        """The answer to a prompt, without the prompt, with its end-of-sequence token if there is one."""

    def rounds(self, answer: list[int]) -> tuple[int, int] | None:
        """The forwards of the target after the prompt in the last answer, and the tokens that they gave."""


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

    def add(self, seconds: float, tokens: list[int], count: tuple[int, int] | None, is_first: bool) -> None:
        """An answer to the next prompt, or to the same one again."""
        if is_first:
            self.seconds.append([])
            self.tokens.append(tokens)
            self.counts.append(count)
        self.seconds[-1].append(seconds)

    def tokens_per_second(self, by_fastest: bool) -> float:
        """Over all prompts, the median of the repeats.

        by_fastest: by the fastest repeat of each prompt, where whatever else the machine does makes it slower.
        """
        count = sum(map(len, self.tokens))
        if by_fastest:
            return count / sum(map(min, self.seconds))
        return statistics.median(count / sum(repeat) for repeat in zip(*self.seconds))


def work(task: dict, connection: Connection) -> None:
    """A process: it loads the engine, says that it is ready or why it refuses, and answers prompts until it gets
    None."""
    if task["device"] == "cpu":
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


def _own_group(task: dict, connection: Connection) -> None:
    os.setsid()
    work(task, connection)


@contextmanager
def started(tasks: list[dict]) -> Iterator[list[Connection]]:
    """A process for each task; they load at the same time, and end with the context."""
    context, processes, connections = multiprocessing.get_context("spawn"), [], []
    for task in tasks:
        here, there = context.Pipe()
        process = context.Process(target=_own_group, args=(task, there))
        process.start()
        there.close()
        processes.append(process)
        connections.append(here)
    try:
        yield connections
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engines start further processes, which hold GPU memory
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
    """A result for each task, whose prompts are answered in turn: "version" and "sets" of figures; or "refused", the
    reason why the engine does not serve the setting."""
    with started(tasks) as connections:
        results = [received(connection, timeout) for connection in connections]
        ready = {number: connections[number] for number, result in enumerate(results) if "version" in result}

        def answers(prompts: list[list[int]], repeats: int) -> dict[int, Answers]:
            """Each prompt is asked of every engine before the next. An engine that ends or hangs is asked no more."""
            found = {number: Answers() for number in ready}
            for ids, repeat, number in product(prompts, range(repeats), [*ready]):
                if number in ready:
                    time.sleep(PAUSE)
                    ready[number].send(ids)
                    told = received(ready[number], timeout)
                    if isinstance(told, dict):
                        results[number] = told
                        del ready[number]
                    else:
                        found[number].add(*told, is_first=not repeat)
            return found

        for name, prompts in tasks[0]["sets"].items():
            tuning, measured = answers(prompts["tuning"], 1), answers(prompts["measured"], tasks[0]["repeats"])
            for number in ready:
                by_fastest = tasks[number]["device"] == "cpu"
                results[number].setdefault("sets", {})[name] = _figures(tuning[number], measured[number], by_fastest)
    return results


def _figures(tuning: Answers, measured: Answers, by_fastest: bool) -> dict:
    """The figures of a set.

    tokens_per_second: the prompt's seconds included; of the tuning prompts to choose a setting.
    accept_length: tokens a forward after the prompt; None if the engine does not say.
    """
    counts = [count for count in measured.counts if count is not None]
    rounds, given = (sum(column) for column in zip(*counts)) if counts else (0, 0)
    return {
        "tuning_tokens_per_second": tuning.tokens_per_second(by_fastest),
        "tokens_per_second": measured.tokens_per_second(by_fastest),
        "accept_length": given / rounds if rounds else None, "tokens": sum(map(len, measured.tokens)),
        "answers": measured.tokens,
    }  # fmt: skip
