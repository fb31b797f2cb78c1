"""What the benchmarks share: prompts, answers in turn, machine facts, pinned threads."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spec_compile.drafters import ALGORITHMS, parse_algorithm

HERE = Path(__file__).parent
DEMO_MODEL = HERE.parent / "examples" / "tiny_coder"
RESULTS = HERE / "results"
SOURCES = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)*.md")
"""What of the tree may change figures, as git names it."""
LOOKUP = "HF prompt lookup"
LOOKUPS = [
    dict(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=size) for tokens in (10, 16, 24) for size in (2, 3)
]
"""Settings of transformers' prompt lookup of which the best is taken."""


def pin(threads: int) -> None:
    """Run on `threads` cores and no others."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSON-lines file (fields `prompt`, or `turns` of which the first)."""
    with open(path) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(count))]
    return [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]


def refuse_trained(path: Path, count: int, trained_on: list[Path]) -> None:
    """ValueError if one of the first `count` prompts of a file is in a file that a head was trained on.

    trained_on: text, or JSON lines whose strings are looked at, whatever their fields; white space does not matter.
    """
    prompts = [words(text) for text in read_prompts(path, count)]
    for file in trained_on:
        lines = file.read_text().splitlines()
        known = words(
            " ".join(text for line in lines for text in (_strings(line) if file.suffix == ".jsonl" else [line]))
        )
        seen = [text for text in prompts if text in known]
        if seen:
            raise ValueError(
                f"--trained-on: {len(seen)} of {len(prompts)} prompts of {path.name} are in {file.name}, the first: "
                f"{seen[0][:60]!r}; measure with other prompts"
            )


def words(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


def _strings(line: str) -> list[str]:
    """All strings of a JSON value, in their order."""
    values, strings = [json.loads(line)], []
    while values:
        value = values.pop()
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, list | dict):
            values += value.values() if isinstance(value, dict) else value
    return strings


def lacking(system: tuple[str, str | None, dict], heads: Path) -> str:
    """Why a system cannot run, or "".

    system: its algorithm; its draft, a folder of `heads`, "model" or None; and its options.
    """
    algo, draft, settings = system
    if draft not in (None, "model") and not (heads / draft / "config.json").is_file():
        return f"no {draft} in {heads}"
    known = {field.name for field in fields(ALGORITHMS[parse_algorithm(algo)].options)}
    unknown = sorted(set(settings) - known)
    return f"no option {', '.join(unknown)} in this version" if unknown else ""


def prompts_of(
    workload: str, folder: Path, count: int, tokenizer, longest: int, as_chat: bool = False
) -> list[Tensor]:  # fmt: skip
    """The last `longest` tokens of the first prompts of a workload; of "random", random ids.

    as_chat: each prompt is a user's turn, in the form of the tokenizer's chat template.
    """
    if workload == "random":
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(1, len(tokenizer), (1, 200), generator=generator) for _ in range(count)]
    texts = read_prompts(folder / f"{workload}.jsonl", count)
    if as_chat:
        turns = [[dict(role="user", content=text)] for text in texts]
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, return_tensors="pt").input_ids[:, -longest:] for text in texts]


def read_bandwidth() -> float:
    """Bytes a second that this process reads from memory (the best of a few sums over 1 GiB)."""
    data = torch.ones(1 << 28)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.numel() * 4 / best


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(generate: Callable, ids: Tensor) -> tuple[Tensor, float]:
    """The answer without the prompt, and the seconds until it was there."""
    synchronize(ids.device)
    begin = time.perf_counter()
    output = generate(ids)
    synchronize(ids.device)
    return output[0, ids.shape[1] :], time.perf_counter() - begin


def answer_in_turn(
    systems: dict[str, Callable], ours: dict, prompts: list[Tensor], repeats: int
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Answers of every system to every prompt, and its tokens a second, the median of the repeats.

    ours: those of the systems that are wrapped models. Their counters are of these answers, their tries empty before
    each.
    """
    answers, seconds = {name: [] for name in systems}, {name: [0.0] * repeats for name in systems}
    for fast in ours.values():
        fast.speculation.stats.reset()
    for repeat in range(repeats):
        for ids in prompts:
            for name, generate in systems.items():
                if name in ours and hasattr(ours[name].speculation, "ngram"):
                    ours[name].speculation.ngram.reset()
                output, spent = timed(generate, ids)
                seconds[name][repeat] += spent
                if repeat == 0:
                    answers[name].append(output)
    tokens = {name: sum(map(len, outputs)) for name, outputs in answers.items()}
    return answers, {name: statistics.median(tokens[name] / s for s in seconds[name]) for name in systems}


def machine(device: torch.device | None = None) -> dict:
    """Names and versions that belong beside every figure; of a GPU, too, if that is the device."""
    import transformers

    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device is not None and device.type == "cuda" else {}
    return {
        **gpu,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str:
    """The commit of the tree, with "+dirty" if a tracked file other than results and their tables differs from it.

    Where the tree has no repository around it, the environment variable BENCHMARK_COMMIT says it.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()

    try:
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCHMARK_COMMIT", "unknown")
    return name + ("+dirty" if changed else "")


def stamp(device: torch.device | None = None) -> dict:
    """What belongs to every row of results: commit, date (UTC), command, machine and versions."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"commit": commit(), "date": date, "command": " ".join(sys.argv), **machine(device)}


def write_json(path: Path, report) -> None:
    """Write results, one row (a dict with a "stamp") a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(report, "") + "\n")


def _lines(value, indent: str) -> str:
    if isinstance(value, dict) and value and "stamp" not in value:
        items = [f"{json.dumps(str(key))}: {_lines(item, indent + ' ')}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [_lines(item, indent + " ") for item in value]
    else:
        return json.dumps(value)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(items) + f"\n{indent}{closing}"


def merge_rows(before: list[dict], rows: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """Rows of earlier runs, and those of this one in the place of what has the same values of `keys`."""
    by_key = {tuple(row.get(key) for key in keys): row for row in [*before, *rows]}
    return list(by_key.values())


def save_rows(path: Path, rows: list[dict], keys: tuple[str, ...], name: str = "rows") -> None:
    """Write `merge_rows` of the rows in a file, if it exists, and these. name: of the list in the file."""
    report = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, report | {name: merge_rows(report.get(name, []), rows, keys)})


def floors(count: float, speeds: dict[str, float], ms: float) -> dict[str, float]:
    """The time in which `count` bytes pass at each speed (bytes a second), and how many times that `ms` is."""
    out = {}
    for name, speed in speeds.items():
        floor = count / speed * 1e3
        out |= {f"floor_{name}_ms": floor, f"over_{name}": ms / floor}
    return out


def median_difference(pairs: list) -> dict:
    """Milliseconds a token from runs of two lengths, each run ((tokens, seconds), (tokens, seconds))."""
    runs = []
    for (few, short), (many, long) in pairs:
        if many <= few:
            raise ValueError(f"the longer run gave {many} tokens, the shorter {few}: nothing to divide by")
        runs.append((long - short) / (many - few) * 1e3)
    return {"ms": statistics.median(runs), "runs": runs}


def best_lookup(
    model, prompts: list[Tensor], fixed: dict, settings: list[dict] = LOOKUPS
) -> tuple[dict, list[dict]]:  # fmt: skip
    """The fastest of `settings` on `prompts`, and each with its tokens a second.

    The prompts are not those that are measured afterwards. fixed: options of generate().
    """
    tried = []
    for setting in settings:
        model.generate(prompts[0], **{**fixed, "max_new_tokens": 4}, **setting)
        answers = [timed(partial(model.generate, **fixed, **setting), ids) for ids in prompts]
        tokens, seconds = sum(len(answer) for answer, _ in answers), sum(spent for _, spent in answers)
        tried.append({**setting, "tokens_per_second": tokens / seconds})
    return fastest(tried), tried


def fastest(tried: list[dict]) -> dict:
    """The setting with the most tokens a second."""
    best = max(tried, key=lambda row: row["tokens_per_second"])
    return {name: value for name, value in best.items() if name != "tokens_per_second"}


def split_prompts(
    workload: str, folder: Path, count: int, tuning: int, tokenizer, longest: int, as_chat: bool = False
) -> tuple[list, list]:  # fmt: skip
    """The first `count` prompts of a workload, to be measured, and the next `tuning` ones, by which systems are set."""
    prompts = prompts_of(workload, folder, count + tuning, tokenizer, longest, as_chat)
    if len(prompts) < count + tuning:
        raise ValueError(f"{workload}: {len(prompts)} prompts; {count} are measured and {tuning} more are for tuning")
    return prompts[:count], prompts[count:]
