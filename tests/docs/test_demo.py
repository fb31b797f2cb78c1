"""What examples/demo.py shows: colours by rounds, bars, figures. Nothing is generated here."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402

CODE = "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny_coder")


def test_what_drafts_gave_is_coloured_and_the_targets_own_token_is_not(tokenizer):
    ids = tokenizer(CODE).input_ids
    rounds = [3, 1, 4, len(ids) - 8]
    text = demo.coloured(tokenizer, ids, rounds)
    assert text.plain == CODE
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    drafted = [tokenizer.decode(part) for part in (ids[:2], ids[4:7], ids[8:-1])]
    assert spans == list(zip(drafted, ["bold green", "bold green", "bold cyan"]))


def test_a_bar_a_round():
    assert demo.bars([1, 2, 8, 16]) == "▁▂██"
    assert demo.bars([1] * 9, most=4) == "▁▁▁▁…"


def printed(table, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def rows_of(table) -> list[list[str]]:
    """The cells under the heading, line by line."""
    lines = printed(table)
    begin = next(number for number, line in enumerate(lines) if line.startswith("├"))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[begin:] if "│" in line]


def test_figures_of_each_prompt_and_of_all():
    answers = {
        "one": {
            demo.PLAIN: demo.Answer([1, 2, 3, 4], 2.0, 4),
            demo.LOOKUP: demo.Answer([1, 2, 3, 4], 1.0, 2),
            "ours": demo.Answer([1, 2, 3, 4], 0.5, [3, 1]),
        },
        "two": {
            demo.PLAIN: demo.Answer([5, 6], 1.0, 2),
            demo.LOOKUP: demo.Answer([5, 6], 1.0, 2),
            "ours": demo.Answer([5, 7], 0.5, [2]),
        },
    }
    assert rows_of(demo.figures(answers, "title")) == [
        ["one", "", "", "", "", ""],
        [demo.PLAIN, "2", "", "1.00", "yes", ""],
        [demo.LOOKUP, "4", "", "2.00", "yes", ""],
        ["ours", "8", "2.00×", "2.00", "yes", "▃▁"],
        ["two", "", "", "", "", ""],
        [demo.PLAIN, "2", "", "1.00", "yes", ""],
        [demo.LOOKUP, "2", "", "1.00", "yes", ""],
        ["ours", "4", "2.00×", "2.00", "no", "▂"],
        ["all together", "", "", "", "", ""],
        [demo.PLAIN, "2", "", "1.00", "yes", ""],
        [demo.LOOKUP, "3", "", "1.50", "yes", ""],
        ["ours", "6", "2.00×", "2.00", "no", ""],
    ]


def test_the_table_fits_in_80_columns():
    answer = demo.Answer([1] * 999, 0.001, [1] * 999)
    systems = dict.fromkeys((demo.PLAIN, demo.LOOKUP, demo.NGRAM, *demo.HEADS), answer)
    table = demo.figures(dict.fromkeys(("edit a method", "complete a class"), systems), "title")
    lines = printed(table, 80)
    assert max(map(len, lines)) <= 80
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in printed(table, 200)]  # nothing was cut


def test_it_says_at_once_what_it_does_and_imports_what_is_slow_later():
    script = "import sys, demo; print(demo.INTRODUCTION, 'torch' in sys.modules, 'transformers' in sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT / "examples", text=True)
    assert output.rstrip().endswith("False False")


def test_it_runs(two_layers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--eager", "--new-tokens", "4", "--heads", "none", "--device", "cpu"])
    monkeypatch.setenv("COLUMNS", "80")
    demo.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    wanted = ("spec_compile makes", "• importing", "• n-grams", "complete a class:", "N-grams cost", "all together")
    places = [next(number for number, line in enumerate(lines) if text in line) for text in wanted]
    assert places == sorted(places)  # n-grams come before a word about heads
