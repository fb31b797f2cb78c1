"""The tables of README.md and of the pages in docs (`FILES`), made from benchmarks/results/*.json only."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import RESULTS, ROOT
from benchmarks.rounds.token_times import EAGER, PLAIN, STATIC
from benchmarks.tables.figures import (
    MODELS,
    NONE,
    SHAPES,
    Results,
    crossed,
    hardware,
    listed,
    model_name,
    ms,
    over_floor,
    set_title,
    table,
    with_floor,
)
from benchmarks.tables.summary import summary

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [path for path in PAGES if BLOCK.search(path.read_text())]
SHOWN = {(1, 1024), (1, 32768), (1, 131072), (4, 1024), (8, 8192)}
"""Batches and contexts of the table of rounds."""
TABLES: dict[str, Callable[[Results], str]] = {"summary": summary}


def shown(make: Callable[[Results], str]) -> Callable[[Results], str]:
    """Make a function's table one that a page can name."""
    TABLES[make.__name__] = make
    return make


def render(text: str, folder: Path = RESULTS) -> str:
    """`text` with its tables made from the results of `folder`. KeyError if a table is not in `TABLES`."""

    def fill(match: re.Match) -> str:
        results = Results(folder)
        body = TABLES[match[2]](results)
        return f"{match[1]}\n{body}\n\n{results.caption()}\n{match[3]}"

    return BLOCK.sub(fill, text)


def engine_rows(results: Results, file: str) -> tuple[list[str], list[dict]]:
    """The sets of a file, and its rows, those of one model together; refused ones have no sets."""
    rows = sorted(results.all(file, "rows"), key=lambda row: model_name(row) != next(iter(MODELS.values())))
    return list(dict.fromkeys(set_title(name) for row in rows for name in row.get("sets", {}))), rows


def by_title(row: dict) -> dict[str, dict]:
    """The figures of a row's sets by the names that tables give them."""
    return {set_title(name): figures for name, figures in row.get("sets", {}).items()}


def speed(figures: dict | None) -> str:
    """Accept length and tokens a second."""
    return f"{figures['accept_length'] or 0:.2f}, {figures['tokens_per_second']:,.0f}" if figures else NONE


EQUAL = "equal to plain"
"""The title of `equal`."""


def equal(found: dict[str, dict]) -> str:
    """How many answers of all sets equal those of the engine's plain steps."""
    same, of = (sum(figures.get(key, 0) for figures in found.values()) for key in ("same", "of"))
    return f"{same} of {of}" if of else ""


@shown
def peers(results: Results) -> str:
    """A row for each model, engine and way of drafting, a column for each set: accept length and tokens a second;
    and `equal`."""
    names, every = engine_rows(results, "peers")
    rows = []
    for row in map(results.seen, every):
        found = by_title(row)
        cells = [row["refused"], *[""] * len(names)] if "refused" in row else [
            *(speed(found.get(name)) for name in names), equal(found)
        ]  # fmt: skip
        rows.append((model_name(row), row["drafts"], f"{row['engine']} {row.get('version', '')}".strip(), *cells))
    return table(("model", "drafts", "engine", *names, EQUAL), rows)


LLAMA_CPP = {None: "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Weights of ours -> the type in which llama.cpp has them."""


@shown
def peers_cpu(results: Results) -> str:
    """A row for each model, engine, its weights and way of drafting, a column for each set: accept length, tokens a
    second, and for ours in brackets over llama.cpp of the same weights: plain steps over its plain steps, drafts over
    the faster of its plain steps and its lookup; and `equal`."""
    names, every = engine_rows(results, "peers_cpu")
    every, rows = [row for row in every if "sets" in row], []
    for row in map(results.seen, every):
        same = [one for one in every if (one["model"], one["weights"]) == (row["model"], row["weights"])]
        theirs = [by_title(one) for one in same if one["engine"] == "llama_cpp"
                  and (one["drafts"] == "plain" or row["drafts"] != "plain")]  # fmt: skip
        cells = []
        for name in names:
            figures = by_title(row).get(name)
            rates = [one[name]["tokens_per_second"] for one in theirs if name in one]
            over = figures and rates and row["engine"] == "ours"
            ratio = f" ({figures['tokens_per_second'] / max(rates):.2f}×)" if over else ""
            cells.append(speed(figures) + ratio)
        kinds = LLAMA_CPP if row["engine"] == "llama_cpp" else {None: row["dtype"]}
        weights = kinds.get(row["weights"], row["weights"])
        rows.append(
            (model_name(row), weights, row["drafts"], f"{row['engine']} {row['version']}", *cells, equal(by_title(row)))
        )
    return table(("model", "weights", "drafts", "engine", *names, EQUAL), rows)


@shown
def first_token(results: Results) -> str:
    """A row for each model and system: seconds from the start of its process, with empty caches and with kept ones."""
    starts: dict[tuple, dict] = {}
    for row in map(results.seen, results.all("first_token", "rows")):
        key = model_name(row), hardware(row), f"{row['system']} {row['version']}"
        starts.setdefault(key, {})[row["cache"]] = f"{row['seconds']:.1f} s"
    rows = ((*key, cells.get("cold", NONE), cells.get("warm", NONE)) for key, cells in starts.items())
    return table(("model", "hardware", "engine", "first start", "later starts"), rows)


def shape_rows(results: Results, part: str) -> Iterator[dict]:
    """All rows of a part of gpu.json, with the title of their shape."""
    for shape, title in SHAPES.items():
        for row in results.all("gpu", "shapes", shape, part):
            yield {**results.seen(row), "title": title}


@shown
def gpu_steps(results: Results) -> str:
    """A row for each shape, a column for each way that drafts nothing."""
    ways, cells = (EAGER, STATIC, PLAIN), {}
    for row in shape_rows(results, "steps"):
        by = cells.setdefault(row["title"], {"over": ""})
        by[row["system"]] = f"{row['ms']:.2f}"
        by["over"] += over_floor(row) if row["system"] == PLAIN else ""
    return crossed("shape", cells, {way: way for way in ways} | {"over": "ours over the floor"}, NONE)


@shown
def gpu_rounds(results: Results) -> str:
    """A row for each shape, batch and context, a column for each size."""
    sizes, cells = {1: "N=1", 4: "N=4", 16: "N=16", 64: "N=64"}, {}
    for shape, title in SHAPES.items():
        rows = results.all("gpu", "shapes", shape, "rounds")
        for row in sorted(rows, key=lambda row: (row["batch"], row["context"])):
            if (row["batch"], row["context"]) in SHOWN:
                line = f"{title}, {row['batch']}, {row['context']:,}"
                by = cells.setdefault(line, {"floor": f"{row['floor_copy_ms']:.2f}"})
                if row["nodes"] in sizes:
                    by.setdefault(row["nodes"], with_floor(results.seen(row)))
    return crossed("shape, batch, context", cells, {"floor": "floor"} | sizes)


@shown
def gpu_drafts(results: Results) -> str:
    columns = {
        "target, draft": "{title}, {name}", "nodes": "{nodes}", "a round": with_floor,
        "two graphs, acceptance on the host": "{separate_ms:.2f}",
    }  # fmt: skip
    return listed(results, shape_rows(results, "drafts"), columns)


@shown
def serving_random(results: Results) -> str:
    """A row for each system and set of random prompts, systems of one set one after the other."""
    keys = "model", "prompt_tokens", "in_flight"
    found = sorted(results.all("serving", "random"), key=lambda row: [row[key] for key in keys])
    columns = {
        "model": "{model}", "system": "{system}", "requests": "{requests:,}", "prompt tokens": "{prompt_tokens}",
        "new tokens": "{new_tokens}", "in flight": "{in_flight}", "tokens/s": "{tokens_per_s:,.0f}",
        "first token after": ms("first_token_s", 0), "99th percentile": ms("first_token_p99_s", 0),
    }  # fmt: skip
    return listed(results, found, columns)
