"""The moving picture of the demo (docs/demo.svg), which plays a recording (docs/demo.json) at the speed of that run.

    python docs/picture.py [--write | --record [ARGUMENTS OF THE DEMO]]

--write draws it anew; --record first runs ``python -m spec_compile demo`` with the arguments that follow, such as
``--record --model HuggingFaceTB/SmolLM2-135M-Instruct``. Without both, exits with 1 if the file is not the picture of
the recording. It is an SVG whose text appears by CSS, without a script; where animations are off, it shows the end. It
has a dark ground, so it can be read on white and on black.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parent / "demo.svg"
RECORDING = FILE.with_suffix(".json")
COLOURS = {"the model itself": "#c9d1d9", "n-grams": "#56d364"}
OTHER = "#79c0ff"
"""The colour of drafts that n-grams have not given."""
WIDTH, PANE, EDGE, TOP, LINE, LETTER = 880, 430, 14, 64, 16, 7.23
COLUMNS = int((PANE - 2 * EDGE) / LETTER)
OWN_MODEL = ("demo_model", "tiny_coder")
"""Folders of the model that the demo has without an argument."""
HOLD = 4.0
"""Seconds for which the end stays, before the picture begins again."""
STEP = 0.02
"""Seconds that are told apart."""
STYLE = """text{{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#c9d1d9;white-space:pre}}
.b{{font-weight:bold}}.d{{fill:#8b949e}}
.t{{animation:{duration:.2f}s step-end infinite}}.g{{animation:{duration:.2f}s linear infinite;transform-box:fill-box}}
@media (prefers-reduced-motion:reduce){{.t,.g{{animation:none}}}}"""  # noqa: E501


class Drawing:
    """The times at which parts of the picture appear. duration: of one play, in seconds."""

    def __init__(self, duration: float):
        self.duration, self._rules = duration, dict[str, str]()

    def at(self, seconds: float) -> str:
        """The attributes of what appears at a time."""
        number = round(seconds / STEP)
        name = f"t{number}"
        begin = min(100 * number * STEP / self.duration, 99.9)
        self._rules[name] = f"@keyframes {name}{{0%{{fill-opacity:0}}{begin:.2f}%{{fill-opacity:1}}}}"
        return f'class="t" style="animation-name:{name}"'

    def growing(self, number: int, seconds: float) -> str:
        """The attributes of a bar that grows until a time."""
        end = 100 * seconds / self.duration
        self._rules[f"g{number}"] = f"@keyframes g{number}{{0%{{transform:scaleX(0)}}{end:.2f}%{{transform:none}}}}"
        return f'class="g" style="animation-name:g{number}"'

    @property
    def style(self) -> str:
        return "\n".join([STYLE.format(duration=self.duration), *self._rules.values()])


def lines_of(pieces: list) -> Iterator[list[tuple[float, str, str]]]:
    """The lines of a pane, each as (seconds, text, source); a line of more than `COLUMNS` characters goes on below."""
    line: list[tuple[float, str, str]] = []
    for seconds, text, source in pieces:
        for letter in text.replace("\t", "    "):
            if letter == "\n" or len(line) == COLUMNS:
                yield line
                line = []
            if letter != "\n":
                line.append((seconds, letter, source))
    yield line


def spans(line: list[tuple[float, str, str]], drawing: Drawing) -> str:
    """A line's text, in one element for all that appears at once in one colour."""
    parts = []
    for (step, source), letters in groupby(line, lambda each: (round(each[0] / STEP), each[2])):
        text = escape("".join(letter for _, letter, _ in letters))
        parts.append(f'<tspan {drawing.at(step * STEP)} fill="{COLOURS.get(source, OTHER)}">{text}</tspan>')
    return "".join(parts)


def pane(run: dict, number: int, height: int, drawing: Drawing) -> list[str]:
    """The shapes of one answer. number: of the pane, from the left."""
    left = number * (PANE + WIDTH - 2 * PANE)
    inner = left + EDGE
    shape = f'x="{left + 0.5}" y="30.5" width="{PANE - 1}" height="{height}" rx="6"'
    parts = [
        f'<rect {shape} fill="#0d1117" stroke="#30363d"/>',
        f'<text x="{inner}" y="48" class="b">{escape(run["title"])}</text>',
    ]
    for row, line in enumerate(lines_of(run["pieces"])):
        if line:
            parts.append(f'<text x="{inner}" y="{TOP + LINE * (row + 0.5):g}">{spans(line, drawing)}</text>')
    y, count = height + 14, len(run["pieces"])
    told = f"{count} tokens in {run['seconds']:.2f} s: {run['rate']:.0f} tokens/s"
    bar = f'x="{inner}" y="{y + 6}" width="{PANE - 2 * EDGE}" height="3" fill="{OTHER if number else "#8b949e"}"'
    return [
        *parts,
        f'<text x="{inner}" y="{y}" {drawing.at(run["seconds"])} font-weight="bold">{told}</text>',
        f"<rect {bar} {drawing.growing(number, run['seconds'])}/>",
    ]


def legend(recording: dict, y: int) -> str:
    """Who gave how many tokens, in the colours of the text."""
    counts: dict[str, int] = {}
    for _, _, source in recording["runs"][1]["pieces"]:
        counts[source] = counts.get(source, 0) + 1
    parts = [
        f'<tspan fill="{COLOURS.get(source, OTHER)}" class="b">{count} by {escape(source)}</tspan>'
        for source, count in sorted(counts.items(), key=lambda each: -each[1])
    ]
    return f'<text x="{EDGE}" y="{y}" class="d">tokens given: {", ".join(parts)}</text>'


def render(file: Path | None = None) -> str:
    """The picture of a recording; None: of `RECORDING`."""
    recording = json.loads((file or RECORDING).read_text())
    runs = recording["runs"]
    slowest = max(run["seconds"] for run in runs)
    drawing = Drawing(slowest + HOLD)
    rows = max(sum(1 for _ in lines_of(run["pieces"])) for run in runs)
    height = TOP + rows * LINE + 4
    panes = [part for number, run in enumerate(runs) for part in pane(run, number, height, drawing)]
    cores = f", {recording['threads']} threads" if recording["device"] == "cpu" and recording["threads"] > 1 else ""
    about = f"{recording['device']}{cores}, {recording['dtype']}, torch {recording['torch']}"
    model = "" if recording["model"] in OWN_MODEL else f" --model {recording['model']}"
    verdict = f'<text x="{WIDTH - EDGE}" y="{height + 50}" text-anchor="end" {drawing.at(slowest)} font-weight="bold"'
    total = height + 62
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
            f'xml:space="preserve" role="img">',
            f"<title>One answer by transformers and by spec_compile: {escape(recording['verdict'])}</title>",
            f"<style>{drawing.style}</style>",
            f'<rect width="{WIDTH}" height="{total}" rx="8" fill="#010409"/>',
            f'<text x="{EDGE}" y="20" class="b">$ python -m spec_compile demo{escape(model)}</text>',
            f'<text x="{WIDTH - EDGE}" y="20" text-anchor="end" class="d">{escape(about)}</text>',
            *panes,
            legend(recording, height + 50),
            f"{verdict}>{escape(recording['verdict'])}</text>",
            "</svg>",
        ]
    ) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the picture")
    parser.add_argument("--record", nargs=argparse.REMAINDER, help="record the demo with these arguments, and rewrite")
    arguments = parser.parse_args()
    if arguments.record is not None:
        demo = [sys.executable, "-m", "spec_compile", "demo", "--record", str(RECORDING), *arguments.record]
        subprocess.run(demo, check=True)
    if arguments.write or arguments.record is not None:
        FILE.write_text(render())
    elif not FILE.exists() or FILE.read_text() != render():
        sys.exit(f"{FILE.name}: not the picture of {RECORDING.name}; run python docs/picture.py --write")


if __name__ == "__main__":
    main()
