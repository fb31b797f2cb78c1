"""Results read from their files, and cells of tables."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common import RESULTS

NONE = "not measured"
SHAPES = {
    "llama-8b": "Llama-3.1-8B",
    "qwen3-8b": "Qwen3-8B",
    "llama-1b": "Llama-3.2-1B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-70b": "Llama-3.1-70B",
    "llama-70b-fp8": "Llama-3.1-70B, FP8",
    "smollm2-135m": "SmolLM2-135M",
    "llama-8b-fp8": "Llama-3.1-8B, FP8",
    "llama-8b-int4": "Llama-3.1-8B, 4 bits",
    "llama-8b-nf4": "Llama-3.1-8B, NF4",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-30b-a3b-fp8": "Qwen3-30B-A3B, FP8",
    "gpt-oss-20b-mxfp4": "gpt-oss-20b, MXFP4",
    "gpt-oss-120b-mxfp4": "gpt-oss-120b, MXFP4",
    "mixtral-8x7b": "Mixtral-8x7B",
    "nemotron-h-8b": "Nemotron-H-8B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3-next-80b": "Qwen3-Next-80B-A3B, 32 of 48 layers",
    "falcon-h1-7b": "Falcon-H1-7B",
    "lfm2-1.2b": "LFM2-1.2B",
}
"""Shape -> its name in tables."""
MODELS = {"smollm2": "SmolLM2-135M", "gemma": "Gemma-3-270M"}
"""How the folder of a real model begins, in small letters -> its name in tables."""
SETS = {
    "code_editing": "code editing", "editeval": "code editing", "code_completion": "code completion",
    "humaneval": "code completion", "maths": "maths", "gsm8k_test": "maths", "chat": "chat", "mt_bench": "chat",
}  # fmt: skip
"""Set of prompts -> its name in tables."""


class Results:
    """Rows of the results, and the stamps of those that were looked up."""

    def __init__(self, folder: Path = RESULTS):
        self.folder, self.stamps = folder, []

    def get(self, file: str, *keys: str) -> dict | list:
        """The value under these keys ({} if it was never measured)."""
        path = self.folder / f"{file}.json"
        value = json.loads(path.read_text()) if path.exists() else {}
        for key in keys:
            value = value.get(key, {})
        return self.seen(value)

    def row(self, file: str, *keys: str, **values) -> dict:
        """The first row of a list that has these values ({} if none has)."""
        rows = [row for row in self.all(file, *keys) if all(row.get(key) == value for key, value in values.items())]
        return self.seen(rows[0]) if rows else {}

    def all(self, file: str, *keys: str) -> list[dict]:
        """The rows of a list; their stamps are not noted."""
        value = Results(self.folder).get(file, *keys)
        return list(value) if isinstance(value, list) else []

    def seen(self, value):
        """`value`; notes its stamp if it has one."""
        if isinstance(value, dict) and "stamp" in value and value["stamp"] not in self.stamps:
            self.stamps.append(value["stamp"])
        return value

    def caption(self) -> str:
        """The stamps of all rows that were looked up: for each machine its commits, and the first and last day."""
        places: dict[str, list[dict]] = {}
        for facts in self.stamps:
            where = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads"
            versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
            places.setdefault(f"{where}, {versions}", []).append(facts)
        parts = []
        for place, some in places.items():
            commits, days = sorted({one["commit"] for one in some}), sorted({one["date"][:10] for one in some})
            span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {span}, {place}")
        return "Measured at: " + "; ".join(sorted(parts)) + "." if parts else "Nothing here has been measured."


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def listed(results: Results, rows: Iterable[dict], columns: dict[str, str | Callable[[dict], str]]) -> str:
    """A line for each row, whose stamp is noted. columns: title -> a format of the row's fields, or a function."""
    cells = (
        [form.format_map(row) if isinstance(form, str) else form(row) for form in columns.values()]
        for row in map(results.seen, rows)
    )
    return table(columns, cells)


def crossed(corner: str, cells: dict[str, dict], titles: dict, missing: str = "") -> str:
    """A line for each key of `cells`, and a column for each key of `titles`, whose values are the titles."""
    rows = ((line, *(by.get(key, missing) for key in titles)) for line, by in cells.items())
    return table((corner, *titles.values()), rows)


def model_name(row: dict) -> str:
    """The model of a row as tables name it: "smollm2" and "SmolLM2-135M-Instruct" are "SmolLM2-135M"."""
    found = (title for start, title in MODELS.items() if row["model"].lower().startswith(start))
    return next(found, row["model"])


def set_title(name: str) -> str:
    return SETS.get(name, name.replace("_", " "))


def ms(key: str, digits: int = 1) -> Callable[[dict], str]:
    """A field in seconds as milliseconds."""
    return lambda row: f"{1e3 * row[key]:.{digits}f} ms"


def over_floor(row: dict) -> str:
    """The time of a row over the floor of a copy."""
    return f"{row['over_copy']:.2f}×" if "over_copy" in row else ""


def with_floor(row: dict) -> str:
    """The milliseconds of a row, and how many floors they are."""
    return f"{row['ms']:.2f} ({over_floor(row)})"


def hardware(row: dict) -> str:
    """The hardware that measured a row."""
    stamp = row["stamp"]
    if stamp.get("gpu"):
        return stamp["gpu"].removeprefix("NVIDIA ")
    return "1 CPU core" if stamp["threads"] == 1 else f"{stamp['threads']} CPU cores"
