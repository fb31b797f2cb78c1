"""Shared by all benchmarks: prompts, answers in turn, stamps, rows of results, tables.

It imports nothing of this package, so that tests can also import it by its path.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_compile.drafters import ALGORITHMS, parse_algorithm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DEMO_MODEL = ROOT / "examples" / "tiny_coder"
PROMPTS = HERE / "prompts"
RESULTS = HERE / "results"
SOURCES = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)*.md")
"""The files that may change figures, as git names them."""
LOOKUP = "HF prompt lookup"
LOOKUPS = [
    dict(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=size) for tokens in (10, 16, 24) for size in (2, 3)
]
"""Settings of transformers' prompt lookup; a comparison takes the fastest."""
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Processes that a benchmark starts would compile torch's and transformers' Python anew, which takes 20 seconds.
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "pycache"))
GREEDY, PLAIN = "HF greedy", "plain steps"
"""Systems that others are compared with: transformers' greedy decoding, and ours without drafts."""


def command_line(text: str, results: str | None = None, threads: int | None = None) -> argparse.ArgumentParser:
    """The options of a script.

    text: its docstring, which is the help.
    results: the name of the file in `RESULTS` that --json names by default; "": by default rows are not written.
    threads: the default of --threads.

    An option whose argument is None does not exist.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results is not None:
        path = RESULTS / results if results else None
        parser.add_argument("--json", type=Path, default=path, help="the file of the rows")
    if threads is not None:
        parser.add_argument("--threads", type=int, default=threads, help="threads of a CPU")
    return parser


def pin(threads: int) -> None:
    """Keep this process on `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def device_for(threads: int) -> str:
    """ "cuda" if there is a GPU. Otherwise "cpu", and this process keeps to `threads` cores."""
    if torch.cuda.is_available():
        return "cuda"
    pin(threads)
    return "cpu"


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSON-lines file (its field `prompt`, or the first of `turns`)."""
    with open(path) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(count))]
    return [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]


def refuse_trained(path: Path, count: int, trained_on: list[Path]) -> None:
    """ValueError if one of the first `count` prompts of a file is in a file that a head was trained on.

    trained_on: files of text, or of JSON lines, of which every string is searched; white space does not matter.
    """
    prompts = [words(text) for text in read_prompts(path, count)]
    for file in trained_on:
        lines = file.read_text().splitlines()
        texts = chain.from_iterable(map(_strings, lines)) if file.suffix == ".jsonl" else lines
        known = words(" ".join(texts))
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
    """The reason why a system cannot run, or "".

    system: the algorithm; the draft (a folder in `heads`, "model" or None); the options.
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
    """The last `longest` tokens of each of the first prompts of a workload; for "random", random ids.

    as_chat: put each prompt into the tokenizer's chat template, as a user's turn.
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
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(call: Callable, device: torch.device) -> tuple:
    """The result of a call, and the seconds until the device has finished it, the host included."""
    synchronize(device)
    begin = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - begin


def timed(generate: Callable, ids: Tensor) -> tuple[Tensor, float]:
    """The answer without the prompt, and the seconds that it took."""
    output, seconds = elapsed(partial(generate, ids), ids.device)
    return output[0, ids.shape[1] :], seconds


def answer_in_turn(
    systems: dict[str, Callable], ours: dict, prompts: list[Tensor], repeats: int
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """The answers of every system to every prompt, and its tokens a second, the median of the repeats.

    ours: the wrapped models among the systems. Their counters count these answers only; their tries are emptied before
    each answer.
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


def hindsight(rates: dict[str, float]) -> dict:
    """The fastest of all systems but "adaptive", and the rate of that over it.

    {"plain": 5.0, "adaptive": 6.0, "fixed": 8.0} gives {"best": "fixed", "over best": 0.75}.
    """
    best = max((name for name in rates if name != "adaptive"), key=rates.__getitem__)
    return {"best": best, "over best": rates["adaptive"] / rates[best]}


def load_model(path: str | Path, device: str) -> PreTrainedModel:
    """The model of a folder, in float32 on a CPU and for the demo model, else in its stored dtype."""
    in_float32 = device == "cpu" or Path(path) == DEMO_MODEL
    dtype = torch.float32 if in_float32 else "auto"
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def machine(device: torch.device | None = None) -> dict:
    """Names and versions of the machine and the libraries; the GPU's name, too, if `device` is one."""
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
    """The commit of the tree, with "+dirty" if a tracked file other than results and tables has changed.

    Outside a repository it is the value of the environment variable BENCHMARK_COMMIT.
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
    """The facts that every row of results carries: commit, date (UTC), command, machine and versions."""
    date, script = datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else sys.argv[0]
    return {"commit": commit(), "date": date, "command": " ".join([name, *sys.argv[1:]]), **machine(device)}


def write_json(path: Path, report) -> None:
    """Write results, a line for each row (a dict with a "stamp")."""
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
    """The rows of earlier runs, of which rows of this run replace those with the same values of `keys`."""
    by_key = {tuple(row.get(key) for key in keys): row for row in [*before, *rows]}
    return list(by_key.values())


def save_rows(path: Path, rows: list[dict], keys: tuple[str, ...], facts: dict, name: str = "rows") -> None:
    """Merge rows into the list `name` of a file (see `merge_rows`). facts: the stamp of each of them."""
    report = json.loads(path.read_text()) if path.exists() else {}
    stamped = [{**row, "stamp": facts} for row in rows]
    write_json(path, report | {name: merge_rows(report.get(name, []), stamped, keys)})


def draw(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str = "") -> Table:
    """A table for the terminal: the first column on the left, figures on the right."""
    table = Table(title=title or None, title_justify="left")
    for number, column in enumerate(columns):
        widest = max(map(len, column.split()), default=0)
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0, min_width=widest)
    for row in rows:
        table.add_row(*row)
    return table


def show(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str = "", width: int = 200) -> None:
    """Print `draw` of them."""
    Console(width=width).print(draw(columns, rows, title))


def show_rows(rows: list[dict], columns: list[str], title: str = "") -> None:
    """Print some fields of rows; a number with a fraction has two digits of it."""
    cells = ([row.get(column, "") for column in columns] for row in rows)
    show(columns, ([f"{one:.2f}" if isinstance(one, float) else str(one) for one in row] for row in cells), title)


def floors(count: float, speeds: dict[str, float], ms: float) -> dict[str, float]:
    """Milliseconds that `count` bytes take at each speed (bytes a second), and `ms` divided by them."""
    out = {}
    for name, speed in speeds.items():
        floor = count / speed * 1e3
        out |= {f"floor_{name}_ms": floor, f"over_{name}": ms / floor}
    return out


def median_difference(pairs: list) -> dict:
    """Milliseconds a token, from pairs of a short and a long run, each run (tokens, seconds)."""
    runs = []
    for (few, short), (many, long) in pairs:
        if many <= few:
            raise ValueError(f"the longer run gave {many} tokens, the shorter {few}: nothing to divide by")
        runs.append((long - short) / (many - few) * 1e3)
    return {"ms": statistics.median(runs), "runs": runs}


def best_lookup(
    model, prompts: list[Tensor], fixed: dict, settings: list[dict] = LOOKUPS
) -> tuple[dict, list[dict]]:  # fmt: skip
    """The fastest of `settings` on `prompts`, and all of them with their tokens a second.

    prompts: for tuning only; others are measured afterwards. fixed: options of generate().
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
    """The first `count` prompts of a workload, which are measured, and the next `tuning`, which choose settings."""
    prompts = prompts_of(workload, folder, count + tuning, tokenizer, longest, as_chat)
    if len(prompts) < count + tuning:
        raise ValueError(f"{workload}: {len(prompts)} prompts; {count} are measured and {tuning} more are for tuning")
    return prompts[:count], prompts[count:]
