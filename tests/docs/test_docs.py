"""Every code block of the README and of docs/ runs, or at least says nothing that is not so."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import dynamic_module_utils
from typer.main import get_command

import spec_compile
from spec_compile import __main__ as cli
from spec_compile import custom_generate, passes
from spec_compile.config import Options
from spec_compile.drafters import ALGORITHMS, parse_algorithm
from spec_compile.kernels.attention import BACKENDS
from spec_compile.train.options import TrainingOptions

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "spec_compile"
sys.path.insert(0, str(DOCS))

import chart  # noqa: E402
import options as options_page  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
PATHS = re.compile(r"`((?:spec_compile|examples|benchmarks|docs|tests)/[\w./]*)`")
ELSEWHERE = {"pip", "pre-commit", "cibuildwheel", "git", "lm-eval"}
"""Commands of other projects."""
ALL_LAYERS = {"drafts"}
"""Pages that read heads of the demo model, which tap its last layer."""


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(what stands behind the language, the code with its snippets) of each block of a page."""
    found = [(info, code) for name, info, code in FENCE.findall(page.read_text()) if name == language]
    return [(info, SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(), code)) for info, code in found]


def with_blocks(language: str) -> list:
    return [pytest.param(page, id=page.stem) for page in PAGES if blocks(page, language)]


@pytest.fixture
def at_root(tmp_path, monkeypatch):
    """A folder to write in that looks like the repository's root; rounds run eagerly."""
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    speculate = spec_compile.speculate

    def eager(model, algo="ngram", **options):
        return speculate(model, algo, **{"compile": False, "check": False, **options})

    monkeypatch.setattr(spec_compile, "speculate", eager)
    monkeypatch.setattr(custom_generate, "speculate", eager)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    registries = ALGORITHMS, BACKENDS, passes.PIPELINE
    before = [registry.copy() for registry in registries]
    yield
    for registry, entries in zip(registries, before):
        registry.clear()
        registry.extend(entries) if isinstance(registry, list) else registry.update(entries)


@pytest.mark.parametrize("page", with_blocks("python"))
def test_blocks_run_in_order(page, at_root, request):
    """In one namespace a page. Blocks whose title says what they need are read, and not run."""
    if page.stem not in ALL_LAYERS:
        request.getfixturevalue("two_layers")
    namespace = {"__name__": page.stem}
    for number, (info, code) in enumerate(blocks(page, "python"), 1):
        check_options(ast.parse(code))
        if "needs" not in info:
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def check_options(tree: ast.Module) -> None:
    """The options in calls of `speculate` and `train_draft` exist."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).split(".")[-1]
        algo = next((word.value for word in call.keywords if word.arg == "algo"), [*call.args, None, None][1])
        algo = algo.value if isinstance(algo, ast.Constant) else "ngram"
        names = {word.arg for word in call.keywords} - {"algo"}
        if name == "speculate":
            known = ALGORITHMS[parse_algorithm(algo)].options if algo in ALGORITHMS else Options
        elif name == "train_draft":
            known, names = TrainingOptions, names - {*inspect.signature(spec_compile.train_draft).parameters}
        else:
            continue
        assert algo not in ALGORITHMS or names <= {field.name for field in dataclasses.fields(known)}, ast.unparse(call)


def test_a_wrong_option_is_noticed():
    with pytest.raises(AssertionError, match="num_step=3"):
        check_options(ast.parse('speculate(model, algo="eagle3", draft="head", num_step=3)'))
    with pytest.raises(AssertionError, match="step=3"):
        check_options(ast.parse('train_draft(model, "eagle3", data=texts, step=3)'))


@pytest.mark.parametrize("page", with_blocks("sh"))
def test_commands_exist(page):
    for _, code in blocks(page, "sh"):
        for line in filter(None, code.splitlines()):
            check_command(shlex.split(line, comments=True))


def check_command(words: list[str]) -> None:
    """A command's file, target and flags exist."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), words
    elif words[:3] == ["python", "-m", "spec_compile"]:
        assert set(flags(words)) <= set(known_flags(words[3])), words
    elif words[0] == "python" and (words[1] != "-m" or words[2].startswith("benchmarks.")):
        file = words[1] if words[1] != "-m" else words[2].replace(".", "/") + ".py"
        text = (ROOT / file).read_text() + (ROOT / "benchmarks" / "common.py").read_text()
        assert [flag for flag in flags(words) if f'"{flag}"' not in text] == [], words
    else:
        assert words[0] in ELSEWHERE or words[2] in ("build", "pytest"), words


def flags(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def known_flags(command: str) -> list[str]:
    """Of a command of ``python -m spec_compile``."""
    parameters = get_command(cli.application).commands[command].params
    return [flag for parameter in parameters for flag in parameter.opts]


def test_the_flags_and_options_that_replace_others_exist():
    """Each cell on the right of the page for those who come from another server: its flags and options."""
    page = (DOCS / "coming_from.md").read_text().replace("\\|", "")
    cells = [line.strip("|").split(" | ")[1] for line in page.splitlines() if line.startswith("| ") and "`" in line]
    codes = [code for cell in cells[1:] for code in re.findall("`([^`]+)`", cell) if "launch_server" not in code]
    serve = get_command(cli.application).commands["serve"]
    flags = {flag for parameter in serve.params for flag in parameter.opts}
    named = {flag for code in codes for flag in re.findall(r"--[a-z][\w-]+", code)}
    assert len(named) >= 20 and named <= flags
    known = {field.name for cls in [Options, *(each.options for each in ALGORITHMS.values())]
             for field in dataclasses.fields(cls)}  # fmt: skip
    values = {name for code in codes for name in re.findall(r"(\w+): ", code)} - {"generation_config"}
    assert len(values) >= 8 and values <= known


def test_the_options_are_those_of_the_dataclasses():
    assert options_page.PAGE.read_text() == options_page.render(), "run python docs/options.py --write"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    """Also on a code host, where nobody builds the site."""
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    assert [path for path in PATHS.findall(text) if not (ROOT / path).exists()] == []


def test_the_tour_is_ten_files_and_its_answers_exist():
    text = (DOCS / "tour.md").read_text()
    named = re.findall(r"^\d+\. `([\w/.]+)`: .+\.$", text, re.MULTILINE)
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert len({*named}) == len(named) == 10
    assert sum(len((ROOT / path).read_text().splitlines()) for path in named) <= 2530
    places = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(places) > 10
    for path, name in places:
        tree = ast.parse((PACKAGE / path).read_text())
        for part in name.split("."):
            defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert part in defined, f"{path} has no {name}"
            tree = defined[part]


def texts(tree: ast.Module) -> Iterator[str]:
    """All texts of a file, with "…" in place of what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%\w", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_troubleshooting_quotes_messages_of_the_package():
    package = "\n".join(text for path in PACKAGE.rglob("*.py") for text in texts(ast.parse(path.read_text())))
    cells = re.findall(r"^\| ([^|]+) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quotes = [quote for cell in cells if cell.startswith("`") for quote in re.findall(r"`([^`]* [^`]*)`", cell)]
    assert len(quotes) > 30 and [quote for quote in quotes if quote not in package] == []


def test_the_layout_is_that_of_the_levels():
    tree = ast.parse(next((ROOT / "tests").rglob("test_layout.py")).read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    told = [(int(number), re.findall(r"`(\w+)`", modules)) for number, modules in rows]
    assert told == [(number, names.split()) for number, names in enumerate(ast.literal_eval(assigned["LEVELS"]), 1)]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 700
    parts = ("docs/demo.svg", "```python", "pip install", "| --- |", "## How it works", "## What is refused")
    assert sorted(parts, key=text.index) == list(parts)


def test_the_chart_is_what_the_results_give(tmp_path):
    assert chart.FILE.read_text() == chart.render(), "run python docs/chart.py --write"
    rows = json.loads((chart.RESULTS / "peers.json").read_text())["rows"]
    model = next(row["model"] for row in rows if "sets" in row)
    rows = [row for row in rows if "sets" in row and row["model"] == model and row["engine"] != "transformers"]
    theirs = next(row for row in rows if row["engine"] == "vllm") | {"engine": "transformers"}
    gemma = [row | {"model": "gemma-3-270m"} for row in rows]
    charts = []
    for some in (rows, [*rows, theirs], [*rows, *gemma]):
        (tmp_path / "peers.json").write_text(json.dumps({"rows": some}))
        charts.append(chart.render(tmp_path))
    bars = [drawn.count(chart.COLOURS[chart.TRANSFORMERS]) for drawn in charts[:2]]
    assert bars == [0, 1 + len(chart.SETS)]  # an engine that is measured later gets its bars, and a place in the legend
    assert ["Gemma-3-270M" in drawn for drawn in charts] == [False, False, True]


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is installed by `make docs` alone")
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
