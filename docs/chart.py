"""The bar chart docs/chart.svg: tokens a second of transformers, vLLM and spec_compile, a panel for each model.

    python docs/chart.py [--write]

Without --write, exits with 1 if the file is not the chart that benchmarks/results gives. The bars compare engines with
the same heads and prompts, one request at a time; an engine that was not measured with a model has no bar there. All
colours are of a middle tone, so the charts can be read on white and on black.
"""

import argparse
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parent / "chart.svg"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SETS = {
    "code editing": ("editeval", "code_editing"),
    "code completion": ("humaneval", "code_completion"),
    "maths": ("gsm8k_test", "maths"),
    "chat": ("mt_bench", "chat"),
}
"""The name of a set in the chart, and in the results."""
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma-3-270M"}
"""How the folder of a model begins, in small letters, and its name."""
TRANSFORMERS, VLLM = "transformers, its fastest way", "vLLM, its fastest way"
HEAD, UNION = "spec_compile, EAGLE-3", "spec_compile, EAGLE-3 and n-grams"
COLOURS = {TRANSFORMERS: "#bf8700", VLLM: "#8c959f", HEAD: "#54aeff", UNION: "#0969da"}
TEXT, LINE = "#7d8590", "#8c959f"
WIDTH, PANEL, LABELS, BAR, GAP, TOP = 880, 430, 112, 13, 12, 92
Panel = tuple[str, dict[str, dict[str, float]]]
"""A title, and for each engine the tokens a second of each set."""


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def on_gpu(folder: Path, model: str) -> list[Panel]:
    """From peers.json: each other engine by its fastest way of drafting, spec_compile by both of its ways. Nothing if
    the model was not measured."""
    rows = [row for row in read(folder, "peers")["rows"] if "sets" in row and row["model"].lower().startswith(model)]

    def fastest(engine: str, drafts: str | None = None) -> dict[str, float]:
        some = [row["sets"] for row in rows if row["engine"] == engine and drafts in (None, row["drafts"])]
        found = {
            title: [sets[name]["tokens_per_second"] for sets in some for name in names if sets.get(name)]
            for title, names in SETS.items()
        }
        return {title: max(rates) for title, rates in found.items() if rates}

    engines = {
        TRANSFORMERS: fastest("transformers"),
        VLLM: fastest("vllm"),
        HEAD: fastest("ours", "EAGLE-3"),
        UNION: fastest("ours", "EAGLE-3 + n-gram"),
    }
    engines = {name: rates for name, rates in engines.items() if len(rates) == len(SETS)}
    stamp = next((row["stamp"] for row in rows if row["engine"] == "ours"), None)
    return [(f"{MODELS[model]}, {stamp['gpu']}, bfloat16", engines)] if stamp and engines else []


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" fill="{TEXT}" {style}>{escape(words)}</text>'


def draw(panel: Panel, left: int) -> tuple[list[str], int]:
    """The shapes of a panel whose left edge is at `left`, and the y below it."""
    title, engines = panel
    most = max(rate for rates in engines.values() for rate in rates.values())
    room, y = PANEL - LABELS - 60, TOP
    parts = [text(left, y - 14, title, 13, weight="bold")]
    for key in SETS:
        parts.append(text(left + LABELS - 8, y + len(engines) * BAR / 2 + 4, key, anchor="end"))
        parts.append(f'<path d="M{left + LABELS} {y - 2}v{len(engines) * BAR + 3}" stroke="{LINE}"/>')
        for engine, rates in engines.items():
            width = max(1, rates[key] / most * room)
            shape = f'x="{left + LABELS + 1}" y="{y}" width="{width:.1f}" height="{BAR - 2}"'
            parts.append(f'<rect {shape} fill="{COLOURS[engine]}"/>')
            parts.append(text(left + LABELS + width + 6, y + BAR - 3, f"{rates[key]:,.0f}", 11))
            y += BAR
        y += GAP
    return parts, y


def legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], 0
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 16, 44, name))
        x += 36 + 7 * len(name)
    return parts


def render(folder: Path = RESULTS) -> str:
    """The file."""
    panels = [panel for model in MODELS for panel in on_gpu(folder, model)]
    drawn = [draw(panel, number * (PANEL + 20)) for number, panel in enumerate(panels)]
    shown = {name: COLOURS[name] for name in COLOURS if any(name in engines for _, engines in panels)}
    title = "Tokens per second, one request at a time, same heads and prompts"
    return picture(title, shown, drawn)


def picture(title: str, colours: dict[str, str], panels: list[tuple[list[str], int]]) -> str:
    """The file of a chart with a legend of these colours; each panel has its shapes and the y below them."""
    height = max((y for _, y in panels), default=TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{title}</title>",
        text(0, 16, title, 14, weight="bold"),
        *legend(colours),
        *(part for shapes, _ in panels for part in shapes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the chart")
    write = parser.parse_args().write
    content = render()
    if write:
        FILE.write_text(content)
    elif not FILE.exists() or FILE.read_text() != content:
        sys.exit(f"{FILE.name}: not what the results give; run python docs/chart.py --write")


if __name__ == "__main__":
    main()
