"""The tables of README.md and of the pages in docs (`FILES`), made from benchmarks/results/*.json only."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import LOOKUP, RESULTS, ROOT
from benchmarks.rounds.token_times import EAGER, PLAIN, STATIC
from benchmarks.tables.drafts import (
    WORKLOADS,
    draft_weights,
    measured_sets,
    never_slower,
    peers,
    peers_cpu,
    published,
    rounded_weights,
    trained,
    training,
)
from benchmarks.tables.figures import NONE, SHAPES, Results, number, over_floor, table
from benchmarks.tables.requests import kept_prefixes, rollouts, second_turns

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [path for path in PAGES if BLOCK.search(path.read_text())]
BEST = (LOOKUP, STATIC, EAGER, "HF greedy", "HF assistant")
"""Transformers' own ways to generate."""


def best_step(results: Results, shape: str) -> dict:
    """The row of the fastest of transformers' own ways."""
    rows = [row for row in results.all("gpu", "shapes", shape, "steps") if row["system"] in BEST]
    return results.seen(min(rows, key=lambda row: row["ms"])) if rows else {}


def step_cells(results: Results, shape: str) -> tuple[str, ...]:
    """Transformers' best way, ours by plain steps, the ratio, and the hardware."""
    best, plain = best_step(results, shape), results.row("gpu", "shapes", shape, "steps", system=PLAIN)
    if not best or not plain:
        return NONE, NONE, "", ""
    name, ratio = best["system"].removeprefix("HF "), best["ms"] / plain["ms"]
    return f"{best['ms']:.2f} ms ({name})", f"{plain['ms']:.2f} ms", f"{ratio:.1f}×", hardware(plain)


def rates(results: Results, file: str, workload: str, name: str) -> dict[str, float]:
    """Tokens a second of the system `name` and of all others in its run."""
    systems = results.get(file, "workloads", workload, "systems")
    stamp = results.seen(systems.get(name, {})).get("stamp")
    return {other: row["tokens_per_second"] for other, row in systems.items() if row["stamp"] == stamp}


def rate_cells(results: Results, file: str, workload: str, ours: str) -> tuple[str, ...]:
    """Transformers' best way, one of ours, the ratio, and the hardware, all of one run."""
    systems = rates(results, file, workload, ours)
    if LOOKUP not in systems or ours not in systems:
        return NONE, NONE, "", ""
    stamped = results.get(file, "workloads", workload, "systems", ours)
    return *compared(systems, ours), hardware(stamped)


def peer_cells(results: Results, workload: str) -> tuple[str, ...]:
    """vLLM with its best drafts, ours with EAGLE-3 and n-grams, the ratio, and the hardware."""
    rows = [row for row in results.all("peers", "rows") if workload in row.get("sets", {})]
    joined = next((row for row in rows if (row["engine"], row["drafts"]) == ("ours", "EAGLE-3 + n-gram")), None)
    theirs = [row for row in rows if row["engine"] == "vllm"]
    if joined is None or not theirs:
        return NONE, NONE, "", ""

    def rate(row: dict) -> float:
        return row["sets"][workload]["tokens_per_second"]

    best = results.seen(max(theirs, key=rate))
    cells = f"{rate(best):,.0f} tokens/s (vLLM, {best['drafts']})", f"{rate(joined):,.0f} tokens/s"
    return *cells, f"{rate(joined) / rate(best):.1f}×", hardware(results.seen(joined))


def llama_cpp_cells(results: Results, workload: str, weights: str) -> tuple[str, ...]:
    """llama.cpp by the faster of its plain steps and its lookup, ours with n-grams, the ratio, and the hardware."""
    rows = [row for row in results.all("peers_cpu", "rows") if workload in row.get("sets", {})]
    rows = [row for row in rows if row["weights"] == weights]
    ours = next((row for row in rows if (row["engine"], row["drafts"]) == ("ours", "n-gram")), None)
    theirs = [row for row in rows if row["engine"] == "llama_cpp"]
    if ours is None or not theirs:
        return NONE, NONE, "", ""
    rate = {id(row): row["sets"][workload]["tokens_per_second"] for row in rows}
    best = results.seen(max(theirs, key=lambda row: rate[id(row)]))
    way = "lookup" if best["drafts"] == "n-gram" else "plain"
    cells = f"{rate[id(best)]:,.0f} tokens/s (llama.cpp, {way})", f"{rate[id(ours)]:,.0f} tokens/s"
    return *cells, f"{rate[id(ours)] / rate[id(best)]:.1f}×", hardware(results.seen(ours))


def compared(speeds: dict[str, float], ours: str) -> tuple[str, str, str]:
    """The fastest of transformers' own ways, one of ours, and the ratio."""
    best = max((name for name in speeds if name in BEST), key=speeds.get)
    theirs = f"{speeds[best]:,.0f} tokens/s ({best.removeprefix('HF ')})"
    return theirs, f"{speeds[ours]:,.0f} tokens/s", f"{speeds[ours] / speeds[best]:.1f}×"


def hardware(row: dict) -> str:
    """The hardware that measured a row."""
    stamp = row["stamp"]
    if stamp.get("gpu"):
        return stamp["gpu"].removeprefix("NVIDIA ")
    return "1 CPU core" if stamp["threads"] == 1 else f"{stamp['threads']} CPU cores"


def round_cells(results: Results, shape: str, draft: str) -> tuple[str, ...]:
    """The floor of a round with a draft, the round, the ratio, and the hardware."""
    row = results.row("gpu", "shapes", shape, "drafts", name=draft)
    if not row:
        return NONE, NONE, "", ""
    cells = f"{row['floor_copy_ms']:.2f} ms (floor: reading the weights)", f"{row['ms']:.2f} ms"
    return *cells, f"{row['over_copy']:.2f}× the floor", hardware(row)


def summary(results: Results) -> str:
    """The rows of README.md."""
    sets = {"editeval": "code editing", "gsm8k_test": "maths", "mt_bench": "chat"}
    model, tree = "SmolLM2-135M, EAGLE-3 and n-grams", "EAGLE-3, tree of 16 in 5 steps"

    def on_cpu(key: str) -> tuple[str, ...]:
        return rate_cells(results, "acceptance_smollm2", key, "EAGLE-3 and n-gram, tree of 16")

    rows = [
        *((f"{model}, {name}", *peer_cells(results, key), "`peers.compare`") for key, name in sets.items()),
        (f"{model}, {sets['gsm8k_test']}", *on_cpu("gsm8k_test"), "`quality.acceptance --as-chat`"),
        (
            "SmolLM2-135M, 4 bits, n-grams, code editing",
            *llama_cpp_cells(results, "code_editing", "int4"),
            "`peers.compare --device cpu`",
        ),
        ("Llama-3.1-8B shape, one token without drafts", *step_cells(results, "llama-8b"), "`gpu --baselines`"),
        ("Llama-3.1-8B shape, a round of EAGLE-3's tree", *round_cells(results, "llama-8b", tree), "`gpu --drafts`"),
    ]
    return table(("", "compared with", "spec_compile", "", "hardware", "`python -m benchmarks.`"), rows)


def cpu_workloads(results: Results) -> str:
    names = ("HF greedy", LOOKUP, "ours, no drafts", "ours, n-gram")
    rows = []
    for workload, title in WORKLOADS.items():
        row = results.get("cpu", "workloads", workload)
        if row:
            speeds = row["tokens_per_second"]
            ours = speeds["ours, n-gram"]
            ratios = (f"{ours / speeds[name]:.1f}×" if name in speeds else "" for name in names[:2])
            cells = (number(speeds, name, "{:.0f}") for name in names)
            rows.append((title, *cells, f"{row['accept_length']:.2f}", *ratios))
    return table(("workload", *names, "accept length", "vs greedy", "vs lookup"), rows)


def acceptance(results: Results, file: str) -> str:
    """A row for each system, a column for each workload: accept length and tokens a second."""
    workloads = measured_sets(results, file)
    systems = {name: results.get(file, "workloads", name, "systems") for name in workloads}
    rows = []
    for name in dict.fromkeys(name for some in systems.values() for name in some):
        cells = []
        for workload in workloads:
            row = results.seen(systems[workload].get(name, {}))
            length = f"{row['accept_length']:.2f}, " if "accept_length" in row else ""
            cells.append(length + number(row, "tokens_per_second", "{:,.0f}"))
        rows.append((name, *cells))
    return table(("", *(name.replace("_", " ") for name in workloads)), rows)


def shape_rows(results: Results, part: str) -> Iterator[tuple[str, dict]]:
    """The title of a shape and a row, for all rows of a part of gpu.json."""
    for shape, title in SHAPES.items():
        for row in results.all("gpu", "shapes", shape, part):
            yield title, results.seen(row)


def gpu_steps(results: Results) -> str:
    """A row for each shape, a column for each way that drafts nothing."""
    ways, rows = (EAGER, STATIC, PLAIN), []
    for title in dict.fromkeys(title for title, _ in shape_rows(results, "steps")):
        some = {row["system"]: row for other, row in shape_rows(results, "steps") if other == title}
        cells = (f"{some[way]['ms']:.2f}" if way in some else NONE for way in ways)
        rows.append((title, *cells, over_floor(some.get(PLAIN, {}))))
    return table(("shape", *ways, "ours over the floor"), rows)


SHOWN = {(1, 1024), (1, 32768), (1, 131072), (4, 1024), (8, 8192)}
"""Batches and contexts of the table of rounds."""


def gpu_rounds(results: Results) -> str:
    """A row for each shape, batch and context, a column for each size."""
    sizes, rows = (1, 4, 16, 64), []
    for shape, title in SHAPES.items():
        every = results.all("gpu", "shapes", shape, "rounds")
        for batch, context in sorted({(row["batch"], row["context"]) for row in every} & SHOWN):
            key = dict(batch=batch, context=context)
            some = [results.row("gpu", "shapes", shape, "rounds", **key, nodes=nodes) for nodes in sizes]
            any_row = next(row for row in every if (row["batch"], row["context"]) == (batch, context))
            cells = (f"{row['ms']:.2f} ({over_floor(row)})" if row else "" for row in some)
            rows.append((f"{title}, {batch}, {context:,}", f"{any_row['floor_copy_ms']:.2f}", *cells))
    return table(("shape, batch, context", "floor", *(f"N={size}" for size in sizes)), rows)


def gpu_drafts(results: Results) -> str:
    rows = []
    for title, row in shape_rows(results, "drafts"):
        cells = (f"{row['ms']:.2f} ({over_floor(row)})", f"{row['separate_ms']:.2f}")
        rows.append((f"{title}, {row['name']}", str(row["nodes"]), *cells))
    return table(("target, draft", "nodes", "a round", "two graphs, acceptance on the host"), rows)


def gpu_prompts(results: Results) -> str:
    rows = []
    for title, row in shape_rows(results, "prompts"):
        rows.append((title, f"{row['tokens']:,}", f"{row['HF']:,.0f}", f"{row['ours']:,.0f}"))
    return table(("shape", "tokens", "transformers, tokens/s", "ours, tokens/s"), rows)


def attention(results: Results) -> str:
    names, rows = ("floor", "triton", "flex", "flashinfer", "sdpa"), []
    for row in results.all("attention", "models", "llama-3.1-8b", "trees"):
        if row["nodes"] == 16:
            results.seen(row)
            rows.append((f"{row['context']:,}", *(number(row, name, "{:.1f}") for name in names)))
    return table(("context", *names), rows)


def routed_experts(results: Results) -> str:
    """A row for each model, a column for each number of tokens: the floor, ours and PyTorch's."""
    sizes, names, cells = (4, 64, 2048), ("floor", "ours", "grouped_mm"), {}
    for row in map(results.seen, results.all("experts", "rows")):
        times = (f"{row[name]:.0f}" for name in names if row.get(name) is not None)
        cells.setdefault(row["model"], {})[row["tokens"]] = ", ".join(times)
    rows = ((model, *(by.get(size, "") for size in sizes)) for model, by in cells.items())
    return table(("model", *(f"{size:,} tokens" for size in sizes)), rows)


def bits(results: Results) -> str:
    """A row for each way of drafting, a column for greedy answers and one for sampled ones."""
    modes, counts = ("greedy", "sampled"), {}
    for row in results.all("bits", "rows"):
        if row["set"] == "all":
            results.seen(row)
            counts.setdefault(row["system"], {})[row["mode"]] = f"{row['equal']} of {row['of']}"
    rows = ((system, *(by.get(mode, "") for mode in modes)) for system, by in counts.items())
    return table(("drafts", *modes), rows)


def serving(results: Results) -> str:
    """A row for each way of drafting and number in flight, over a static batch of as many rows."""
    rows, static = [], ", static batch"
    for row in results.all("serving", "rows"):
        if row["system"].endswith(static):
            continue
        same = dict(model=row["model"], in_flight=row["in_flight"], system=row["system"] + static)
        batch = results.row("serving", "rows", **same)
        ratio = f"{row['tokens_per_s'] / batch['tokens_per_s']:.2f}" if batch else ""
        waits = (f"{row[key] * 1e3:.0f} ms" for key in ("first_token_s", "first_token_p99_s"))
        cells = str(row["in_flight"]), f"{results.seen(row)['tokens_per_s']:,.0f}", ratio, *waits
        rows.append((row["system"], *cells))
    rows.sort(key=lambda row: (row[0], int(row[1])))
    titles = "tokens/s", "over a static batch", "first token after", "99th percentile"
    return table(("drafts", "in flight", *titles), rows)


def serving_rounds(results: Results) -> str:
    """A row for each number of nodes of a round over many sequences, with its floors."""
    rows = []
    for row in map(results.seen, results.all("serving", "rounds")):
        times = (f"{row[key]:.2f} ms" for key in ("ms", "bytes_ms", "arithmetic_ms"))
        rates = ", ".join(f"{rate:,.0f} at {length}" for length, rate in row["simulated_tokens_per_s"].items())
        rows.append((str(row["nodes"]), *times, rates))
    titles = "floor of bytes", "floor of arithmetic", "tokens/s at simulated accept lengths"
    return table(("nodes of each", "a round", *titles), rows)


def backend(results: Results) -> str:
    """A row for each shape: a token of transformers' generate() whose forward each way compiles."""
    rows = list(map(results.seen, results.all("backend", "rows")))
    cells = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        some = {row["way"]: row for row in rows if row["shape"] == shape}
        spec, times = some["spec"], (f"{some[way]['ms']:.2f} ms" for way in ("no compiler", "inductor", "spec"))
        title = f"{SHAPES.get(shape, 'demo model')}, {spec['dtype']}"
        cells.append((title, f"{spec['floor_ms']:.2f} ms", *times, f"{spec['over_inductor']:.2f}×", hardware(spec)))
    titles = "floor (read)", "no compiler", "Inductor", "spec", "Inductor / spec", "hardware"
    return table(("shape", *titles), cells)


def tensor_parallel(results: Results) -> str:
    """A row for each shape and number of GPUs, a column for each number of requests, system and number of nodes: the
    round, and how many floors it is. Heads are shown with one request. The file also has sums by NCCL and experts that
    are not shared by width."""
    found = [row for row in results.all("tensor_parallel", "rows") if "ms" in row and "NCCL" not in row["system"]]
    found = [row for row in found if not row.get("expert_parallel")]
    found = [results.seen(row) for row in found if row["requests"] == 1 or row["system"] == "n-gram"]
    columns, cells = {}, {}
    for row in found:
        for nodes, ms in row["ms"].items():
            key = row["requests"], row["system"], nodes
            columns[key] = f"{row['system'].split(',')[0]}, {row['requests']} × {nodes}"
            cells.setdefault((row["shape"], row["gpus"]), {})[key] = f"{ms:.2f} ({row['over_floor'][nodes]:.2f}×)"
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


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "cpu_workloads": cpu_workloads,
    "gpu_steps": gpu_steps,
    "gpu_rounds": gpu_rounds,
    "gpu_drafts": gpu_drafts,
    "draft_weights": draft_weights,
    "training": training,
    "trained": trained,
    "gpu_prompts": gpu_prompts,
    "attention": attention,
    "routed_experts": routed_experts,
    "bits": bits,
    "serving": serving,
    "serving_rounds": serving_rounds,
    "second_turns": second_turns,
    "kept_prefixes": kept_prefixes,
    "rollouts": rollouts,
    "smollm2_acceptance": lambda results: acceptance(results, "acceptance_smollm2"),
    "smollm2_published": lambda results: published(results, "acceptance_smollm2"),
    "peers": peers,
    "peers_cpu": peers_cpu,
    "rounded_weights": rounded_weights,
    "never_slower": never_slower,
    "tensor_parallel": tensor_parallel,
    "backend": backend,
}


def render(text: str, folder: Path = RESULTS) -> str:
    """`text` with its tables made from the results of `folder`. KeyError if a table is not in `TABLES`."""

    def fill(match: re.Match) -> str:
        results = Results(folder)
        body = TABLES[match[2]](results)
        return f"{match[1]}\n{body}\n\n{results.caption()}\n{match[3]}"

    return BLOCK.sub(fill, text)
