"""The notebooks in examples/ run on a CPU with the demo model. Jupyter is not needed: they are JSON with code."""

import ast
import json
import re
import shutil
import signal
import socket
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from server_fixtures import TEMPLATE
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "tiny_coder"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
OF_ONE = {"install", "parameters"}
"""Tags of the cells whose code may differ between notebooks."""


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def tag(cell: dict) -> str:
    return "".join(cell["metadata"].get("tags", []))


def run(path: Path, until: str = "", **parameters) -> dict:
    """The names that a notebook has made. Its parameters are replaced, and pip is left out, as is the cell `until` and
    all after it."""
    namespace = {"__name__": path.stem}
    try:
        for cell in code_cells(path):
            if cell["id"] == until:
                break
            if tag(cell) != "install":
                exec(compile("".join(cell["source"]), f"{path.name}, cell {cell['id']}", "exec"), namespace)
            if tag(cell) == "parameters":
                assert parameters.keys() <= namespace.keys()
                namespace.update(parameters)
    except BaseException:
        if "server" in namespace:
            namespace["server"].kill()
        raise
    return namespace


@pytest.fixture
def parameters(tmp_path):
    """Parameters of a notebook on a CPU: the demo model with a chat template, and its EAGLE-3 head."""
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("heads", "*.py"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MODEL": str(folder), "DRAFT": str(DEMO / "heads" / "eagle3"), "DTYPE": "float32", "DEVICE": "cpu",
        "COMPILE": False, "NEW_TOKENS": 24, "PORT": port,
    }  # fmt: skip


def test_it_loads_speculates_generates_and_explains(parameters, two_layers, capsys):
    names = run(NOTEBOOKS[0], until="draft", **parameters)
    assert names["ours"] == names["plain"] and len(names["plain"]) == 24
    assert names["plain_rate"] > 0 and names["fast"].speculation.engine.name == "ngram"
    printed = capsys.readouterr().out
    assert re.search(r"transformers: 24 tokens, \d+ tokens/s\nn-grams: 24 tokens, \d+ tokens/s\nthe same", printed)
    assert "accept length" in printed and "use_tree_attention" in printed


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_whole_notebook(path, parameters, capsys):
    names = run(path, **parameters)
    assert names["plain"] == names["ours"] == names["by_head"]
    decode = AutoTokenizer.from_pretrained(parameters["MODEL"]).decode
    assert names["served"] == decode(names["plain"], skip_special_tokens=True)
    assert names["server"].poll() in (0, -signal.SIGTERM) and "fast" not in names
    assert capsys.readouterr().out.count("the same answer") == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_form(path):
    """nbformat 4.5, without outputs, and pip is asked for extras that exist."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)
    cells = code_cells(path)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert [tag(cell) for cell in cells][:2] == ["install", "parameters"] and not any(map(tag, cells[2:]))
    for cell in cells[1:]:
        ast.parse("".join(cell["source"]))
    pip, wanted = "".join(cells[0]["source"]).split('"')[:2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirement = Requirement(wanted.replace("REPOSITORY", "https://example.org/repository"))
    assert pip == "%pip install --quiet " and requirement.name == project["name"]
    assert requirement.extras == {"gpu", "serve"} <= project["optional-dependencies"].keys()


def test_both_notebooks_have_the_same_code():
    colab, local = map(code_cells, NOTEBOOKS)
    for one, other in zip(colab, local, strict=True):
        assert one["id"] == other["id"] and (tag(one) in OF_ONE or one["source"] == other["source"])
    assert json.loads(NOTEBOOKS[0].read_text())["metadata"]["colab"]["gpuType"] == "T4"


def test_the_badges_open_the_notebook_itself():
    title = "".join(json.loads(NOTEBOOKS[0].read_text())["cells"][0]["source"])
    opened = re.findall(r"\]\(https://(\w+)\.\S+/OWNER/spec_compile/blob/main/(\S+)\)", title)
    assert opened == [(site, str(NOTEBOOKS[0].relative_to(ROOT))) for site in ("colab", "kaggle")]
