"""The process of one engine with one setting: it loads, warms up and answers; started by compare.py.

    python -m benchmarks.peers.worker TASK.json RESULT.json

A task has these fields; every engine gets the same:
engine: one of `ENGINES`
setting: a dict that the engine's module explains
model, dtype, device, new_tokens, repeats
weights: None, or to what the engine rounds them
max_len: most tokens of a prompt and its answer
eos: ids that end an answer
sets: name -> "tuning" and "measured" prompts, as token ids
"""

import importlib
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

ENGINES = {"ours": "ours", "transformers": "hf", "vllm": "on_vllm", "sglang": "on_sglang", "llama_cpp": "on_llama_cpp"}
"""Engine -> its module in this folder, which has `load(task)`."""


class Engine(Protocol):
    """An engine with one setting, ready to answer."""

    version: str

    def forget(self) -> None:
        """Drop everything that earlier answers have left in caches and tries."""

    def answer(self, ids: list[int]) -> list[int]:
        """The answer to a prompt, without the prompt, with its end-of-sequence token if there is one."""

    def rounds(self, answer: list[int]) -> tuple[int, int] | None:
        """The forwards of the target after the prompt in the last answer, and the tokens that they gave."""


def measure(engine: Engine, sets: dict, repeats: int) -> dict:
    """Figures by set. The first tuning prompt of every set is answered once before anything is timed."""
    for prompts in sets.values():
        engine.answer(prompts["tuning"][0])
    return {name: measure_set(engine, prompts, repeats) for name, prompts in sets.items()}


def measure_set(engine: Engine, prompts: dict, repeats: int) -> dict:
    """The figures of one set.

    tokens_per_second: the prompt's seconds included; the median over the repeats
    tuning_tokens_per_second: over the tuning prompts, to choose a setting
    accept_length: tokens a forward after the prompt; None if the engine does not say
    """
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
    """Tokens, seconds, answers, and the `Engine.rounds` of each answer, for prompts one after another."""
    seconds, answers, counts = 0.0, [], []
    for ids in prompts:
        engine.forget()
        begin = time.perf_counter()
        answers.append(engine.answer(ids))
        seconds += time.perf_counter() - begin
        counts.append(engine.rounds(answers[-1]))
    return sum(map(len, answers)), seconds, answers, [count for count in counts if count is not None]


def work(task: dict) -> dict:
    """The result: "version" and "sets"; or "refused", the reason why this engine does not serve the setting."""
    begin = time.perf_counter()
    try:
        engine = importlib.import_module(f"benchmarks.peers.{ENGINES[task['engine']]}").load(task)
    except Exception as error:  # any error: a setting that an engine does not serve is a result
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
    ready = time.perf_counter() - begin
    return {"version": engine.version, "ready_seconds": ready, "sets": measure(engine, task["sets"], task["repeats"])}


if __name__ == "__main__":
    result = work(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
