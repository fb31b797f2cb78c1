"""The layout: folders import only from below, files and functions stay short, tests mirror the package."""

import ast
import functools
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVELS = (
    "errors", "extensions folders inventory registry", "compat", "graph tree", "cache outcome forks parallel",
    "quantised", "kernels", "ngram", "config", "passes", "capture", "compile", "drafting stats", "runtime",
    "drafters", "batching", "contrib", "api cli", "backend custom_generate", "train tools", "serve",
)  # fmt: skip
"""The modules and folders of the package, from the bottom to the top. One level's do not import each other."""
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names.split()}
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 500, 60, 80
MOST_PARAMETERS = 40
"""Of a kernel, or of a function that kernels call."""
FILES = sorted((ROOT / "spec_compile").rglob("*.py"))
INSIDE = [file for file in FILES if file.parent.name != "spec_compile" or not file.stem.startswith("__")]


def imported(file):
    """The parts of the package that a file imports, wherever in it, but not those for annotations alone."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    annotations = {inner for guard in guards for inner in ast.walk(guard)}
    package = file.relative_to(ROOT).parts[:-1]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level and node not in annotations:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            yield from [alias.name for alias in node.names] if len(base) == 1 else [base[1]]


SIDES = {"serve", "train", "tools", "contrib"}
"""The folders that the core does not import: what they add, they register."""


@pytest.mark.parametrize("file", INSIDE, ids=lambda file: str(file.relative_to(ROOT / "spec_compile")))
def test_imports_point_down_and_not_to_the_sides(file):
    part, found = file.relative_to(ROOT / "spec_compile").parts[0].removesuffix(".py"), {*imported(file)}
    # Only the command line imports the commands of contrib.
    level = LEVEL["tools" if file.parts[-2:] == ("contrib", "cli.py") else part]
    above = {name for name in found if name != part and LEVEL[name] >= level}
    assert not above, f"{part} is below {', '.join(above)}"
    assert part in SIDES or not SIDES & found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "spec_compile")))
def test_files_and_functions_are_short(file):
    text = file.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            assert not is_kernel or parameters <= MOST_PARAMETERS, f"{node.name}: {parameters} parameters"
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION), f"{node.name}: {lines} lines"


def test_each_guarded_line_has_a_mutation(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests")  # where mutations.py imports its list
    mutations = runpy.run_path(str(ROOT / "tests/mutations.py"))
    places, guards = mutations["markers"](), mutations["GUARDS"]
    assert sorted(guard.name for guard in guards) == sorted(places)
    for guard in guards:
        file, number = places[guard.name]
        changed = mutations["mutated"](guard, ROOT / file, number)
        assert file.suffix != ".py" or ast.parse(changed), guard.name
        assert (ROOT / guard.tests.split()[0].partition("::")[0]).is_file(), guard.name


STARTING = {"api.py", "config.py", "capture", "passes", "compile", "runtime", "drafters", "quantised"}
"""The parts of the package that run between `speculate()` and the first round."""
MODEL_FILES, MODEL_FUNCTIONS = 22, 81
"""Files with a function that is given the whole `model`, and such functions. Both may only fall: a function that needs
a config, a name or a list of layers takes that."""


def test_few_functions_take_the_whole_model():
    counts = {}
    for file in FILES:
        if file.relative_to(ROOT / "spec_compile").parts[0] in STARTING:
            nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
            given = [[*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] for node in nodes]
            counts[file] = sum(any(each.arg == "model" for each in names) for names in given)
    assert sum(map(bool, counts.values())) <= MODEL_FILES
    assert sum(counts.values()) <= MODEL_FUNCTIONS


TESTS = ROOT / "tests"
FOLDERS = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"support"}
ELSEWHERE = {
    "batching.model": "batching",  # methods of what speculate() returns, and of its `speculation`
    "outcome": "runtime", "forks": "product", "tools.explain": "runtime",
    "quantised.experts": "kernels", "quantised.mxfp4": "kernels",
    "serve.cli": "serve",  # a command of `python -m spec_compile`
}  # fmt: skip
"""Modules that no test of their folder imports, and the folder of tests that run them by a public path."""


@functools.cache
def named(file):
    """The dotted names that a file imports or has as text: `from spec_compile import cache` gives both parts of it."""
    package, names = file.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a path to patch, or a script
            names.update(re.findall(r"^spec_compile[\w.]+$", node.value))
            names.update(map(".".join, re.findall(r"from (spec_compile[\w.]*) import (\w+)", node.value)))
    return names


def folder_of(module):
    """The folder of tests that mirrors a module of the package; for one at the top it is product."""
    top = module.split(".")[1:2]
    return top[0] if top and top[0] in FOLDERS else "product"


def test_modules_are_tested_in_their_folder():
    """A test of the mirrored folder imports each module, or imports one of the same folder that does so."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    helpers = {file.stem: file for file in (TESTS / "support").glob("*.py")}
    reached = set()
    for folder in FOLDERS:
        files = {name: file for name, file in modules.items() if folder_of(name) == folder} | helpers
        todo, seen = [*(TESTS / folder).glob("test_*.py")], set()
        while todo:
            names = named(todo.pop())
            new = (names | {name.rpartition(".")[0] for name in names}) & files.keys() - seen
            todo += [files[name] for name in new]
            seen |= new
        reached |= seen
    assert {name.removeprefix("spec_compile.") for name in modules.keys() - reached} == ELSEWHERE.keys()
    assert set(ELSEWHERE.values()) <= FOLDERS


@pytest.mark.parametrize("file", sorted(TESTS.rglob("*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_no_test_imports_a_test(file):
    assert not [name for name in named(file) if name.rpartition(".")[2].startswith("test_")]
