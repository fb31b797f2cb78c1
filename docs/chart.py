"""The bar chart docs/chart.svg: tokens a second of transformers, vLLM and spec_compile, a panel for each model; and the
dots of docs/benchmarks/never_slower.svg: tokens a second with drafts over plain steps.

    python docs/chart.py [--write]

Without --write, exits with 1 if a file is not the chart that benchmarks/results gives. The bars compare engines with
the same heads and prompts, one request at a time; an engine that was not measured with a model has no bar there. All
colours are of a middle tone, so the charts can be read on white and on black.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parent / "chart.svg"
DOTS = Path(__file__).parent / "benchmarks" / "never_slower.svg"
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
ADAPTIVE, FIXED = "adaptive", "fixed"
WAYS = {ADAPTIVE: "#0969da", FIXED: "#bf8700"}
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


def draw_dots(title: str, rows: list[dict], left: int) -> tuple[list[str], int]:
    """A panel of never_slower's rows: a line for each draft, and a dot for each cell at its ratio, by its logarithm."""
    names, label = sorted({row["draft"] for row in rows}), 215
    bottom = TOP + 20 * len(names)

    def across(ratio: float) -> float:
        """For a ratio of 1/6 the left end, for 6 the right end."""
        return left + label + (PANEL - label - 10) * (math.log(ratio, 6) + 1) / 2

    parts = [text(left, TOP - 24, title, 13, weight="bold")]
    for ratio in (0.2, 0.5, 1, 2, 5):
        line = f"M{across(ratio):.1f} {TOP - 8}V{bottom}"
        parts.append(f'<path d="{line}" stroke="{LINE}" opacity="{0.9 if ratio == 1 else 0.3}"/>')
        parts.append(text(across(ratio), bottom + 14, f"{ratio:g}", 11, "middle"))
    for place, name in enumerate(names):
        y = TOP + 20 * place
        parts.append(text(left + label - 8, y + 4, name, 11, "end"))
        for way, drop in ((FIXED, 4), (ADAPTIVE, -2)):
            at = (across(row[way]) for row in rows if row["draft"] == name)
            parts += [f'<circle cx="{x:.1f}" cy="{y + drop}" r="3" fill="{WAYS[way]}" opacity="0.7"/>' for x in at]
    return parts, bottom + 24


def render_dots(folder: Path = RESULTS) -> str:
    """The file of all cells of never_slower.json."""
    rows, titles = read(folder, "never_slower")["rows"], {"cpu": "Two CPU cores, float32", "cuda": "H200, bfloat16"}
    drawn = [
        draw_dots(title, [row for row in rows if row["device"] == device], number * (PANEL + 20))
        for number, (device, title) in enumerate(titles.items())
    ]
    return picture("Tokens per second with drafts over plain steps of the same engine", WAYS, drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the charts")
    write = parser.parse_args().write
    for file, content in ((FILE, render()), (DOTS, render_dots())):
        if write:
            file.write_text(content)
        elif not file.exists() or file.read_text() != content:
            sys.exit(f"{file.name}: not what the results give; run python docs/chart.py --write")


if __name__ == "__main__":
    main()
