"""``python -m spec_compile cache``."""

import json
import os

import pytest
import torch

from spec_compile.__main__ import main
from spec_compile.compile.cache import ABOUT, ArtefactCache
from spec_compile.compile.key import about

FIRST, SECOND, THIRD = (f"{number:064x}"[::-1] for number in (1, 2, 3))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_COMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_artefacts_are_listed_the_one_used_last_first(folder, capsys):
    store = ArtefactCache()
    store.write(FIRST, ABOUT, json.dumps(about("LlamaForCausalLM", torch.device("cpu"))).encode())
    store.write(SECOND, ABOUT, json.dumps({"model": "[red]M[/]", "device": 3, "versions": {"torch": None}}).encode())
    store.write(THIRD, "part", bytes(2_000_000))
    for age, key in enumerate((FIRST, SECOND, THIRD)):
        os.utime(folder / key, (0, 86_400 * (364.5 - age)))
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert f"{folder}: 3 artefacts, 2.0 MB" in text.splitlines()[0]
    assert [row[0] for row in rows] == [key[:12] for key in (FIRST, SECOND, THIRD)]
    assert rows[0][1] == "LlamaForCausalLM" and rows[0][2].startswith("cpu, ") and rows[0][4].startswith("1970-12-31")
    assert "torch 2." in rows[0][5] and "transformers 5." in rows[0][5] and "cuda" not in rows[0][5]
    assert rows[1][1:4] == ["[red]M[/]", "3", "0.0"] and rows[2][1:4] == ["unknown", "unknown", "2.0"]


def test_folders_without_artefacts(folder, tmp_path, capsys):
    assert main(["cache"]) == 0 and capsys.readouterr().out == f"{folder}: no artefacts\n"
    assert main(["cache", "--clear"]) == 0 and capsys.readouterr().out == f"{folder}: 0 artefacts deleted\n"
    assert main(["cache", "--folder", str(tmp_path / "none")]) == 2
    assert f"error: --folder: there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_artefacts_are_cleared(folder, tmp_path, capsys):
    for store in (ArtefactCache(), ArtefactCache(tmp_path / "other")):
        store.write(FIRST, "part", b"1")
        store.write(SECOND, "part", b"2")
    assert main(["cache", "--clear", "--folder", str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'other'}: 2 artefacts deleted\n"
    assert len(ArtefactCache().entries()) == 2 and ArtefactCache(tmp_path / "other").entries() == []
