"""The process of one engine with one setting: loads, warms up, answers; started by compare.py.

    python benchmarks/peers/worker.py TASK.json RESULT.json

A task has "engine", one of `ENGINES`; "model"; "setting", which the engine's module explains; "dtype", "device",
"new_tokens", "max_len" (tokens of a prompt and its answer at most), "eos" (ids that end an answer), "repeats"; and
"sets": name -> "tuning" and "measured" prompts as token ids. Every engine gets the same ids, one prompt at a time,
greedily, and stops at the same tokens.
"""

import importlib
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

ENGINES = {"ours": "ours", "transformers": "hf", "vllm": "on_vllm", "sglang": "on_sglang"}
"""Engine -> its module here, which has `load(task)`."""


class Engine(Protocol):
    """An engine with one setting, ready to answer."""

    version: str

    def forget(self) -> None:
        """Drop what earlier answers have left."""

    def answer(self, ids: list[int]) -> list[int]:
        """The answer to a prompt, without the prompt; its end-of-sequence token, if there is one, is the last."""

    def rounds(self, answer: list[int]) -> tuple[int, int] | None:
        """Of the last answer: forwards of the target behind the prompt, and the tokens that they gave."""


def measure(engine: Engine, sets: dict, repeats: int) -> dict:
    """Figures by set. The first tuning prompt of every set is answered once before anything is timed."""
    for prompts in sets.values():
        engine.answer(prompts["tuning"][0])
    return {name: measure_set(engine, prompts, repeats) for name, prompts in sets.items()}


def measure_set(engine: Engine, prompts: dict, repeats: int) -> dict:
    """tokens_per_second (all seconds of an answer, its prompt's included; the median over the repeats), accept_length
    (tokens a forward behind the prompt; None if the engine does not say), answers, and the rate over the tuning
    prompts, by which a setting is chosen."""
    tokens, seconds, _, _ = run(engine, prompts["tuning"])
    result = {"tuning_tokens_per_second": tokens / seconds}
    runs = [run(engine, prompts["measured"]) for _ in range(repeats)]
    _, _, answers, counts = runs[0]
    rounds, given = (sum(column) for column in zip(*counts)) if counts else (0, 0)
    return result | {
        "tokens_per_second": statistics.median(tokens / seconds for tokens, seconds, _, _ in runs),
        "accept_length": given / rounds if rounds else None,
        "tokens": sum(map(len, answers)), "answers": answers,
    }  # fmt: skip


def run(engine: Engine, prompts: list[list[int]]) -> tuple[int, float, list[list[int]], list[tuple[int, int]]]:
    """Tokens, seconds, answers, and `Engine.rounds` of each, of prompts one after another."""
    seconds, answers, counts = 0.0, [], []
    for ids in prompts:
        engine.forget()
        begin = time.perf_counter()
        answers.append(engine.answer(ids))
        seconds += time.perf_counter() - begin
        counts.append(engine.rounds(answers[-1]))
    return sum(map(len, answers)), seconds, answers, [count for count in counts if count is not None]


def work(task: dict) -> dict:
    """The result: "version" and "sets", or "refused", why this engine does not serve the setting."""
    begin = time.perf_counter()
    try:
        engine = importlib.import_module(ENGINES[task["engine"]]).load(task)
    except Exception as error:  # of any kind: what an engine does not serve is a result
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
    ready = time.perf_counter() - begin
    return {"version": engine.version, "ready_seconds": ready, "sets": measure(engine, task["sets"], task["repeats"])}


if __name__ == "__main__":
    result = work(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
