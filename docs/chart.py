"""The bar chart of README.md (docs/chart.svg): tokens a second of transformers, vLLM and spec_compile.

    python docs/chart.py [--write]

Without --write, exits with 1 if the file is not the chart that benchmarks/results gives. One model, the same heads and
prompts, one request at a time. An engine that was not measured on a machine has no bar there. All colours are of a
middle tone, so the chart can be read on white and on black.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parent / "chart.svg"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SETS = {
    "editeval": "code editing",
    "humaneval": "code completion",
    "gsm8k_test": "maths",
    "mt_bench": "chat",
    "spec_bench_qa_rag": "retrieval",
}
TRANSFORMERS, VLLM = "transformers, its fastest way", "vLLM, its fastest way"
HEAD, UNION = "spec_compile, EAGLE-3", "spec_compile, EAGLE-3 and n-grams"
COLOURS = {TRANSFORMERS: "#bf8700", VLLM: "#8c959f", HEAD: "#54aeff", UNION: "#0969da"}
TEXT, LINE = "#7d8590", "#8c959f"
WIDTH, PANEL, LABELS, BAR, GAP, TOP = 880, 430, 112, 13, 12, 92
Panel = tuple[str, dict[str, dict[str, float]]]
"""A title, and for each engine the tokens a second of each set."""


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def on_gpu(folder: Path) -> Panel:
    """From peers.json: each other engine by its fastest way of drafting, spec_compile by both of its ways."""
    rows = [row for row in read(folder, "peers")["rows"] if "sets" in row]

    def fastest(engine: str, drafts: str | None = None) -> dict[str, float]:
        some = [row["sets"] for row in rows if row["engine"] == engine and drafts in (None, row["drafts"])]
        return {key: max(sets[key]["tokens_per_second"] for sets in some if sets.get(key)) for key in SETS if some}

    engines = {
        TRANSFORMERS: fastest("transformers"),
        VLLM: fastest("vllm"),
        HEAD: fastest("ours", "EAGLE-3"),
        UNION: fastest("ours", "EAGLE-3 + n-gram"),
    }
    stamp = next(row["stamp"] for row in rows if row["engine"] == "ours")
    return f"{stamp['gpu']}, bfloat16", {name: rates for name, rates in engines.items() if rates}


def on_cpu(folder: Path) -> Panel:
    """From acceptance_smollm2.json: transformers by its fastest way, spec_compile by both of its ways."""
    workloads = read(folder, "acceptance_smollm2")["workloads"]

    def rates(of: Callable[[str], bool]) -> dict[str, float]:
        systems = {key: workloads[key]["systems"] for key in SETS}
        return {
            key: max(row["tokens_per_second"] for name, row in some.items() if of(name))
            for key, some in systems.items()
        }

    engines = {
        TRANSFORMERS: rates(lambda name: name.startswith("HF ")),
        HEAD: rates(lambda name: name == "EAGLE-3, tree of 16"),
        UNION: rates(lambda name: name == "EAGLE-3 and n-gram, tree of 16"),
    }
    stamp = workloads["editeval"]["systems"]["HF greedy"]["stamp"]
    return f"{stamp['threads']} CPU cores ({stamp['cpu']}), {stamp['dtype']}", engines


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" fill="{TEXT}" {style}>{escape(words)}</text>'


def draw(panel: Panel, left: int) -> tuple[list[str], int]:
    """The shapes of a panel whose left edge is at `left`, and the y below it."""
    title, engines = panel
    most = max(rate for rates in engines.values() for rate in rates.values())
    room, y = PANEL - LABELS - 60, TOP
    parts = [text(left, y - 14, title, 13, weight="bold")]
    for key, name in SETS.items():
        parts.append(text(left + LABELS - 8, y + len(engines) * BAR / 2 + 4, name, anchor="end"))
        parts.append(f'<path d="M{left + LABELS} {y - 2}v{len(engines) * BAR + 3}" stroke="{LINE}"/>')
        for engine, rates in engines.items():
            width = max(1, rates[key] / most * room)
            shape = f'x="{left + LABELS + 1}" y="{y}" width="{width:.1f}" height="{BAR - 2}"'
            parts.append(f'<rect {shape} fill="{COLOURS[engine]}"/>')
            parts.append(text(left + LABELS + width + 6, y + BAR - 3, f"{rates[key]:,.0f}", 11))
            y += BAR
        y += GAP
    return parts, y


def legend(engines: list[str]) -> list[str]:
    parts, x = [], 0
    for engine in engines:
        parts.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{COLOURS[engine]}"/>')
        parts.append(text(x + 16, 44, engine))
        x += 36 + 7 * len(engine)
    return parts


def render(folder: Path = RESULTS) -> str:
    """The file."""
    panels = [on_gpu(folder), on_cpu(folder)]
    drawn = [draw(panel, number * (PANEL + 20)) for number, panel in enumerate(panels)]
    height = max(y for _, y in drawn)
    shown = [name for name in COLOURS if any(name in engines for _, engines in panels)]
    title = "Tokens per second of SmolLM2-135M-Instruct, one request at a time, same heads and prompts"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{title}</title>",
        text(0, 16, title, 14, weight="bold"),
        *legend(shown),
        *(part for shapes, _ in drawn for part in shapes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the chart")
    if parser.parse_args().write:
        FILE.write_text(render())
    elif not FILE.exists() or FILE.read_text() != render():
        sys.exit(f"{FILE.name}: not what the results give; run python docs/chart.py --write")


if __name__ == "__main__":
    main()
