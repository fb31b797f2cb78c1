"""The moving picture of the demo: all text of the recording, at its time, in an SVG without a script."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import picture  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
OWN, NGRAMS, RECYCLED = "the model itself", "n-grams", "recycled tokens"


def recording(pieces, **more):
    runs = [{"title": "a", "seconds": 2.0, "rate": 1.5, "pieces": pieces}, {"title": "b", "seconds": 1.0, "rate": 3.0}]
    runs[1]["pieces"] = [[seconds / 2, text, NGRAMS] for seconds, text, _ in pieces]
    about = {"model": "m", "device": "cpu", "dtype": "float32", "threads": 2, "torch": "2.13.0"}
    return about | {"verdict": "2.00× · same tokens: yes", "runs": runs} | more


@pytest.fixture
def drawn(tmp_path):
    def draw(pieces, **more):
        file = tmp_path / "run.json"
        file.write_text(json.dumps(recording(pieces, **more)))
        text = picture.render(file)
        return text, ElementTree.fromstring(text.encode())

    return draw


def test_the_file_is_the_picture_of_the_recording():
    assert picture.FILE.read_text() == picture.render(), "run python docs/picture.py --write"
    assert picture.FILE.stat().st_size < 150_000
    assert not re.search(r"<script|href|url\(|onload|@import", picture.FILE.read_text())
    recorded = json.loads(picture.RECORDING.read_text())
    assert recorded["verdict"].endswith("same tokens: yes") and "/" not in recorded["model"].removeprefix("HuggingFace")


def lines(root, left):
    """The text of each line of a pane, whose text begins at `left`."""
    rows = [row for row in root.iter(f"{SVG}text") if float(row.get("x")) == left and len(row)]
    return ["".join(part.text for part in row) for row in rows if not row.text]


def test_both_panes_have_all_text_in_its_colour(drawn):
    pieces = [[0.5, "if a < b:\n", OWN], [1.0, "\n    x", RECYCLED], [1.0, " = 'é&'", NGRAMS], [2.0, "y" * 60, OWN]]
    text, root = drawn(pieces)
    wanted = ["if a < b:", "    x = 'é&'" + "y" * (picture.COLUMNS - 12), "y" * (72 - picture.COLUMNS)]
    assert lines(root, picture.EDGE) == wanted and lines(root, 450 + picture.EDGE) == wanted
    colours = {part.text: part.get("fill") for part in root.iter(f"{SVG}tspan")}
    assert colours["    x"] == picture.OTHER and colours["if a < b:"] == picture.COLOURS[NGRAMS]
    assert (
        "4 by n-grams" in text and "3 tokens/s" in text and "2.00× · same tokens: yes" in text and "2 threads" in text
    )
    assert "spec_compile demo --model m<" in text and "spec_compile demo<" in drawn(pieces, model="demo_model")[0]


def test_text_appears_when_its_token_came(drawn):
    text, root = drawn([[0.5, "a", OWN], [1.0, "b", OWN], [1.001, "c", OWN], [2.0, "d", OWN]])
    duration = 2.0 + picture.HOLD
    begins = {
        name: float(share) * duration / 100 for name, share in re.findall(r"@keyframes (t\d+)\{.*?\}([\d.]+)%", text)
    }
    times = [
        (part.text, begins[part.get("style").partition(":")[2]])
        for row in root.iter(f"{SVG}text") if float(row.get("x")) == picture.EDGE
        for part in row if part.get("style")
    ]  # fmt: skip
    assert [(words, pytest.approx(seconds, abs=0.01)) for words, seconds in times] == [
        ("a", 0.5),
        ("bc", 1.0),
        ("d", 2.0),
    ]
    assert {*re.findall(r"animation-name:(\w+)", text)} == {*re.findall(r"@keyframes (\w+)", text)}
    assert f"animation:{duration:.2f}s" in text and "prefers-reduced-motion" in text


def test_it_records_and_says_when_it_is_old(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "FILE", tmp_path / "demo.svg")
    monkeypatch.setattr(picture, "RECORDING", tmp_path / "demo.json")
    commands = []

    def run(command, check):
        commands.append(command[1:])
        picture.RECORDING.write_text(json.dumps(recording([[1.0, "a", OWN]])))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["picture.py", "--record", "--new-tokens", "8"])
    picture.main()
    file = str(picture.RECORDING)
    assert commands == [["-m", "spec_compile", "demo", "--record", file, "--new-tokens", "8"]]
    monkeypatch.setattr(sys, "argv", ["picture.py"])
    picture.main()
    picture.RECORDING.write_text(json.dumps(recording([[1.0, "b", OWN]])))
    with pytest.raises(SystemExit, match=r"demo\.svg: not the picture of demo\.json"):
        picture.main()
    monkeypatch.setattr(sys, "argv", ["picture.py", "--write"])
    picture.main()
    assert picture.FILE.read_text() == picture.render(picture.RECORDING)
