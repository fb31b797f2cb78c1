"""The layout: folders import only from below, files and functions stay short, mutations fit the source."""

import ast
from pathlib import Path

import pytest
from mutation_list import MUTATIONS

ROOT = Path(__file__).parents[1]
LEVELS = (
    "errors compat extensions", "graph tree", "cache outcome forks parallel", "kernels", "ngram", "config", "passes",
    "capture", "drafting stats recording", "runtime", "drafters", "report", "batching", "api",
    "audit backend command_line", "training serving tune_kernels",
)  # fmt: skip
"""The modules and folders of the package, from the bottom to the top. One level's do not import each other."""
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names.split()}
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 400, 60, 80
MOST_PARAMETERS = 40
"""Of a kernel, or of a function that kernels call."""
FILES = sorted((ROOT / "spec_compile").rglob("*.py"))
INSIDE = [file for file in FILES if file.parent.name != "spec_compile" or not file.stem.startswith("__")]


def imported(file):
    """The parts of the package that a file imports, wherever in it, but not those for annotations alone."""
    tree = ast.parse(file.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    annotations = {inner for guard in guards for inner in ast.walk(guard)}
    package = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in annotations:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            yield from [alias.name for alias in node.names] if len(base) == 1 else [base[1]]


@pytest.mark.parametrize("file", INSIDE, ids=lambda file: str(file.relative_to(ROOT / "spec_compile")))
def test_imports_point_down(file):
    part = file.relative_to(ROOT / "spec_compile").parts[0].removesuffix(".py")
    above = {name for name in imported(file) if name != part and LEVEL[name] >= LEVEL[part]}
    assert not above, f"{part} is below {', '.join(above)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "spec_compile")))
def test_files_and_functions_are_short(file):
    text = file.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION), f"{node.name}: {lines} lines"
            parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            assert not is_kernel or parameters <= MOST_PARAMETERS, f"{node.name}: {parameters} parameters"


def test_every_mutation_fits_the_source():
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.file}"
        named = mutation.tests.split()[0].partition("::")[0]
        assert (ROOT / named).is_file(), f"{mutation.name}: {named}"
