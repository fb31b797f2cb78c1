"""The tables of README.md and of the pages in docs (`FILES`), made from benchmarks/results/*.json only."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import LOOKUP, RESULTS, ROOT
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
    named,
    number,
    over_floor,
    set_title,
    table,
    with_floor,
)
from benchmarks.tables.summary import summary

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [path for path in PAGES if BLOCK.search(path.read_text())]
WORKLOADS = {
    "code_editing": "code editing (EditEval)",
    "bug_fixing": "bug fixing (HumanEvalFix)",
    "code_completion": "code completion (HumanEval)",
    "maths": "maths (GSM8K)",
    "chat": "chat (MT-bench)",
    "docstrings": "docstrings",
    "random": "random tokens",
}
HEADS = {
    "eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash", "jetspec": "JetSpec", "dspark": "DSpark",
    "domino": "Domino", "p_eagle": "P-EAGLE",
}  # fmt: skip
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


@shown
def cpu_workloads(results: Results) -> str:
    names = ("HF greedy", LOOKUP, "ours, no drafts", "ours, n-gram")
    rows = []
    for workload, title in WORKLOADS.items():
        row = results.get("cpu", "workloads", workload)
        if row:
            speeds = row["tokens_per_second"]
            ratios = (f"{speeds['ours, n-gram'] / speeds[name]:.1f}×" if name in speeds else "" for name in names[:2])
            cells = (number(speeds, name, "{:.0f}") for name in names)
            rows.append((title, *cells, f"{row['accept_length']:.2f}", *ratios))
    return table(("workload", *names, "accept length", "vs greedy", "vs lookup"), rows)


def acceptance(results: Results, file: str) -> str:
    """A row for each system, a column for each workload of a file: accept length and tokens a second."""
    every = results.get(file, "workloads")
    names = [name for name in WORKLOADS if name in every] + [name for name in every if name not in WORKLOADS]
    cells: dict[str, dict[str, str]] = {}
    for workload in names:
        for name, row in every[workload]["systems"].items():
            length = f"{row['accept_length']:.2f}, " if "accept_length" in row else ""
            text = length + number(results.seen(row), "tokens_per_second", "{:,.0f}")
            cells.setdefault(name, {})[workload] = text
    return crossed("", cells, named(names), NONE)


@shown
def smollm2_acceptance(results: Results) -> str:
    return acceptance(results, "acceptance_smollm2")


@shown
def gemma3_acceptance(results: Results) -> str:
    return acceptance(results, "acceptance_gemma3")


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


@shown
def peers(results: Results) -> str:
    """A row for each model, engine and way of drafting, a column for each set: accept length and tokens a second."""
    names, every = engine_rows(results, "peers")
    rows = []
    for row in map(results.seen, every):
        found = by_title(row)
        cells = [row["refused"], *[""] * (len(names) - 1)] if "refused" in row else [
            speed(found.get(name)) for name in names
        ]  # fmt: skip
        rows.append((model_name(row), row["drafts"], f"{row['engine']} {row.get('version', '')}".strip(), *cells))
    return table(("model", "drafts", "engine", *names), rows)


LLAMA_CPP = {None: "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Weights of ours -> the type in which llama.cpp has them."""


@shown
def peers_cpu(results: Results) -> str:
    """A row for each model, engine, its weights and way of drafting, a column for each set: accept length, tokens a
    second, and for ours in brackets over llama.cpp of the same weights: plain steps over its plain steps, drafts over
    the faster of its plain steps and its lookup."""
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
        rows.append((model_name(row), weights, row["drafts"], f"{row['engine']} {row['version']}", *cells))
    return table(("model", "weights", "drafts", "engine", *names), rows)


@shown
def first_token(results: Results) -> str:
    """A row for each model and system: seconds from the start of its process, with empty caches and with kept ones."""
    starts: dict[tuple, dict] = {}
    for row in map(results.seen, results.all("first_token", "rows")):
        key = model_name(row), hardware(row), f"{row['system']} {row['version']}"
        starts.setdefault(key, {})[row["cache"]] = f"{row['seconds']:.1f} s"
    rows = ((*key, cells.get("cold", NONE), cells.get("warm", NONE)) for key, cells in starts.items())
    return table(("model", "hardware", "engine", "first start", "later starts"), rows)


@shown
def rounded_weights(results: Results) -> str:
    """A row for each format of `weights`: perplexity before and after, and answers."""
    columns = {
        "weights": "{weights}", "perplexity before": "{before:.3f}",
        "after": lambda row: f"{row['after']:.3f} ({row['after'] / row['before'] - 1:+.2%})",
        "same most probable token": lambda row: f"{row['agreeing'] / row['predicted']:.1%} of {row['predicted']:,}",
        "greedy answers equal": "{same}/{of}",
    }  # fmt: skip
    return listed(results, results.all("rounded_weights", "rows"), columns)


@shown
def draft_weights(results: Results) -> str:
    """A row for each head, a column for each format of both parts: a draft, and a round with it."""
    cells: dict[str, dict[str, str]] = {}
    for row in results.all("draft_weights", "rows"):
        if isinstance(row["draft_weights"], str) and not row["draft_weights"].startswith("{"):
            times = f"{row['draft_ms']:.2f} ms, {row['round_ms']:.2f} ms"
            head = f"{SHAPES[results.seen(row)['shape']]}, {HEADS[row['algo']]}"
            cells.setdefault(head, {})[row["draft_weights"]] = times
    return crossed("a draft, a round", cells, {way: way for by in cells.values() for way in by})


@shown
def training(results: Results) -> str:
    """A row for each head."""
    columns = {
        "head": lambda row: HEADS[row["algorithm"]], "tokens/s": "{tokens_per_second:,}",
        "peak memory": lambda row: f"{row['peak_gigabytes']:.1f} GB" if "peak_gigabytes" in row else "",
    }  # fmt: skip
    return listed(results, results.all("training", "rows"), columns)


@shown
def trained(results: Results) -> str:
    """A row for each head and loss, trained by Muon, a column for each set of held-out prompts: accept length."""
    rows = [row for row in results.all("trained", "rows") if row["options"]["optimizer"] == "muon"]
    columns = {"head": lambda row: HEADS[row["algorithm"]], "weights of positions": "{loss}"}
    columns |= {name: f"{{accept_length[{name}]:.2f}}" for name in (rows[0]["accept_length"] if rows else ())}
    return listed(results, rows, columns)


@shown
def never_slower(results: Results) -> str:
    """The five cells of each device that gain least by adaptive drafting."""
    every, worst = sorted(results.all("never_slower", "rows"), key=lambda row: row["adaptive"]), []
    for device, name in {"cpu": "CPU", "cuda": "H200"}.items():
        worst += [{**row, "on": name} for row in every if row["device"] == device][:5]
    columns = {
        "on": "{on}", "adaptive": "{adaptive:.2f}", "fixed": "{fixed:.2f}", "accept length": "{accept_length:.2f}",
        "draft": "{draft}", "prompts": lambda row: row["workload"].replace("_", " "), "rows": "{batch}",
        "tokens": lambda row: "drawn" if row["sampled"] else "greedy",
    }  # fmt: skip
    return listed(results, worst, columns)


@shown
def conversation(results: Results) -> str:
    columns = {
        "device": "{device}", "tokens/s": "{tokens/s:,.0f}", "plain steps": "{plain tokens/s:,.0f}",
        "over plain": "{over plain:.2f}", "first token of a cold prompt": ms("cold s", 0),
        "of a later turn": ms("later s", 0),
    }  # fmt: skip
    return listed(results, results.all("conversation", "rows"), columns)


@shown
def second_turns(results: Results) -> str:
    """A row for each model and length of a text: the first tokens of its first and second turn."""
    columns = {
        "model": "{model}", "tokens": "{tokens:,}", "cold": ms("cold_s"), "second turn": ms("second_s"),
        "only what it adds": ms("added_s"), "second over cold": "{second over cold:.2f}",
    }  # fmt: skip
    return listed(results, results.all("prefixes", "turns"), columns)


@shown
def kept_prefixes(results: Results) -> str:
    """A row for each number in flight and length of prompts: the rates with and without kept prefixes."""
    rates: dict[tuple, dict] = {}
    for row in map(results.seen, results.all("prefixes", "serving")):
        rates.setdefault((row["model"], row["in_flight"], row["prompt_tokens"]), {})[row["prefixes"]] = row
    columns = {
        "model": "{on[model]}", "in flight": "{on[in_flight]}", "prompt tokens": "{on[prompt_tokens]}",
        "tokens/s without": "{off[tokens_per_s]:,.0f}", "with": "{on[tokens_per_s]:,.0f}",
        "ratio": "{on[over off]:.2f}",
    }  # fmt: skip
    return listed(results, rates.values(), columns)


@shown
def rollouts(results: Results) -> str:
    """A row for each system and epoch of rollouts, next to transformers' loops."""
    columns = {
        "model": "{model}", "system": "{system}", "epoch": "{epoch}", "seconds": "{seconds:.2f} s",
        "accept length": lambda row: f"{row['accept length']:.2f}" if "accept length" in row else "-",
        "over generate_batch()": "{over HF generate_batch:.2f}", "over generate()": "{over HF generate:.2f}",
    }  # fmt: skip
    return listed(results, results.all("rollouts", "rows"), columns)


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
def gpu_prompts(results: Results) -> str:
    columns = {"shape": "{title}", "tokens": "{tokens:,}", "transformers, tokens/s": "{HF:,.0f}"}
    return listed(results, shape_rows(results, "prompts"), columns | {"ours, tokens/s": "{ours:,.0f}"})


@shown
def attention(results: Results) -> str:
    rows = [row for row in results.all("attention", "models", "llama-3.1-8b", "trees") if row["nodes"] == 16]
    columns: dict = {"context": "{context:,}"}
    for name in ("floor", "triton", "flex", "flashinfer", "sdpa"):
        columns[name] = lambda row, name=name: number(row, name, "{:.1f}")
    return listed(results, rows, columns)


@shown
def routed_experts(results: Results) -> str:
    """A row for each model, a column for each number of tokens: the floor, ours and PyTorch's."""
    sizes, names, cells = (4, 64, 2048), ("floor", "ours", "grouped_mm"), {}
    for row in map(results.seen, results.all("experts", "rows")):
        times = (f"{row[name]:.0f}" for name in names if row.get(name) is not None)
        cells.setdefault(row["model"], {})[row["tokens"]] = ", ".join(times)
    return crossed("model", cells, {size: f"{size:,} tokens" for size in sizes})


@shown
def bits(results: Results) -> str:
    """A row for each way of drafting, a column for greedy answers and one for sampled ones."""
    cells: dict[str, dict[str, str]] = {}
    for row in results.all("bits", "rows"):
        if row["set"] == "all":
            cells.setdefault(results.seen(row)["system"], {})[row["mode"]] = f"{row['equal']} of {row['of']}"
    return crossed("drafts", cells, named(("greedy", "sampled")))


@shown
def serving(results: Results) -> str:
    """A row for each way of drafting and number in flight, over a static batch of as many rows."""
    rows, static = results.all("serving", "rows"), ", static batch"
    ours = [row for row in rows if not row["system"].endswith(static)]

    def over(row: dict) -> str:
        same = dict(model=row["model"], in_flight=row["in_flight"], system=row["system"] + static)
        batch = results.row("serving", "rows", **same)
        return f"{row['tokens_per_s'] / batch['tokens_per_s']:.2f}" if batch else ""

    columns = {
        "drafts": "{system}", "in flight": "{in_flight}", "tokens/s": "{tokens_per_s:,.0f}",
        "over a static batch": over, "first token after": ms("first_token_s", 0),
        "99th percentile": ms("first_token_p99_s", 0),
    }  # fmt: skip
    return listed(results, sorted(ours, key=lambda row: (row["system"], row["in_flight"])), columns)


@shown
def serving_random(results: Results) -> str:
    """A row for each system and set of random prompts, systems of one set one after the other."""
    keys = "model", "prompt_tokens", "in_flight"
    found = sorted(results.all("serving", "random"), key=lambda row: [row[key] for key in keys])
    columns = {
        "model": "{model}", "system": "{system}", "requests": "{requests:,}", "prompt tokens": "{prompt_tokens}",
        "new tokens": "{new_tokens}", "in flight": "{in_flight}", "tokens/s": "{tokens_per_s:,.0f}",
        "first token after": ms("first_token_s", 0), "99th percentile": ms("first_token_p99_s", 0),
        "most at once": lambda row: str(row.get("most_at_once", "")),
        "rows of the longest": lambda row: str(row.get("whole_rows", "")),
    }  # fmt: skip
    return listed(results, found, columns)


@shown
def serving_arrivals(results: Results) -> str:
    """A row for each system: gaps between tokens before prompts arrive, and while they are processed."""
    columns = {
        "model": "{model}", "system": "{system}", "rows": "{in_flight}", "prompts": "{arrivals} of {prompt_tokens}",
        "longest gap without": ms("without_longest_s"), "99th percentile": ms("without_p99_s"),
        "longest gap with": ms("with_longest_s"), "its 99th percentile": ms("with_p99_s"),
    }  # fmt: skip
    return listed(results, results.all("serving", "arrivals"), columns)


@shown
def simulated_load(results: Results) -> str:
    """A row for each draft and number in flight, a column for each simulated acceptance: the rate over plain steps of
    adaptive drafting and of drafts in every round, and in brackets the tokens of a round of the latter."""
    cells: dict[str, dict] = {}
    rows = [row for row in results.all("simulated_acceptance", "load") if row["form"] in row]
    for row in map(results.seen, sorted(rows, key=lambda row: row["simulated acceptance"])):
        plain, form = row["plain"], row["form"]
        told = f"{row['adaptive'] / plain:.2f}, {row[form] / plain:.2f} ({row['accept lengths'][form]:.2f})"
        line = f"{row['drafting']}, {form}, {row['in flight']} in flight, {row['tokens']} tokens"
        cells.setdefault(line, {})[row["simulated acceptance"]] = told
    return crossed("draft", cells, {key: f"{key:.2f}" for by in cells.values() for key in by})


@shown
def backend(results: Results) -> str:
    """A row for each shape: a token of transformers' generate() whose forward each way compiles."""
    found: dict[str, dict] = {}
    for row in map(results.seen, results.all("backend", "rows")):
        found.setdefault(row["shape"], {"shape": SHAPES.get(row["shape"], "demo model")})[row["way"]] = row
    columns = {
        "shape": "{shape}, {spec[dtype]}", "floor (read)": "{spec[floor_ms]:.2f} ms",
        "no compiler": "{no compiler[ms]:.2f} ms", "Inductor": "{inductor[ms]:.2f} ms", "spec": "{spec[ms]:.2f} ms",
        "Inductor / spec": "{spec[over_inductor]:.2f}×", "hardware": lambda row: hardware(row["spec"]),
    }  # fmt: skip
    return listed(results, found.values(), columns)


@shown
def tensor_parallel(results: Results) -> str:
    """A row for each shape and number of GPUs, a column for each number of requests, system and number of nodes: the
    round, and how many floors it is. Heads are shown with one request. The file also has sums by NCCL and experts that
    are not shared by width."""
    found = [row for row in results.all("tensor_parallel", "rows") if "ms" in row and "NCCL" not in row["system"]]
    found = [row for row in found if not row.get("expert_parallel")]
    found = [results.seen(row) for row in found if row["requests"] == 1 or row["system"] == "n-gram"]
    columns, cells = {}, {}
    for row in found:
        for nodes, spent in row["ms"].items():
            key = row["requests"], row["system"], nodes
            columns[key] = f"{row['system'].split(',')[0]}, {row['requests']} × {nodes}"
            cells.setdefault((row["shape"], row["gpus"]), {})[key] = f"{spent:.2f} ({row['over_floor'][nodes]:.2f}×)"
    for shape in {shape for shape, _ in cells}:
        alone = {key: _on_one_gpu(results, shape, *key) for key in columns}
        if any(alone.values()):
            cells[shape, 1] = alone
    order = sorted(cells, key=lambda key: (list(SHAPES).index(key[0]), key[1]))
    rows = ((f"{SHAPES[key[0]]}, {key[1]}", *(cells[key].get(column, "") for column in columns)) for key in order)
    return table(("shape, GPUs", *columns.values()), rows)


def _on_one_gpu(results: Results, shape: str, requests: int, system: str, nodes: str) -> str:
    """The round of one GPU with 1,024 tokens in the cache, if it was measured."""
    is_plain = system == "n-gram"
    same = {"nodes": int(nodes), **({"batch": requests, "context": 1024} if is_plain else {"name": system})}
    for one in results.all("gpu", "shapes", shape, "rounds" if is_plain else "drafts"):
        if same.items() <= one.items() and (is_plain or requests == 1):
            return f"{one['ms']:.2f}"
    return ""
