"""Ratchets: the size and the habits of the package, whose stored numbers may only fall.

A change that makes a number smaller stores the smaller one. What needs a larger one goes to contrib/, whose number may
rise with an ability that begins there, or names what it removes.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "spec_compile"
SOURCES = {".py", ".cpp", ".h", ".cu", ".html"}
SIDES = {"serve", "train", "tools", "contrib"}
LINES = {
    "": 2712,
    "batching": 3706,
    "capture": 4610,
    "compile": 3167,
    "contrib": 5676,
    "drafters": 5406,
    "kernels": 13398,
    "ngram": 2743,
    "parallel": 828,
    "passes": 3098,
    "quantised": 2722,
    "runtime": 6248,
    "serve": 7793,
    "tools": 2193,
    "train": 4710,
}
"""The most lines of a folder, with the folders in it; "" has the files at the top."""
CORE_FILES = 229
CIRCLES = 0
"""Groups of modules that import each other in a circle."""
CALLED_ONCE = 341
"""Private functions and methods that are named in one place."""
PHRASES = {
    r"^\s*\w+(, \w+)*: of\b": 0,
    r"\b[Tt](hose|hat) of\b": 0,
    r"\bso many\b": 0,
    r"\bof (its|their) own\b": 2,
}
"""The most places of a phrase that makes a sentence hard to read, in comments and docstrings."""
COMMENTS = 5.9
"""The least lines of comments for 100 lines of code. It may only rise."""


def files(*suffixes):
    """The sources of the package with one of these suffixes."""
    return [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in suffixes and "__pycache__" not in path.parts]


def folder_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@cache
def parsed(path):
    return ast.parse(path.read_text())


def test_lines_of_folders():
    lines = Counter()
    for path in files(*SOURCES):
        lines[folder_of(path)] += path.read_text().count("\n")
    assert {name: count for name, count in lines.items() if count > LINES.get(name, 0)} == {}


def test_files_of_the_core():
    assert len([path for path in files(*SOURCES) if folder_of(path) not in SIDES]) <= CORE_FILES


@cache
def modules():
    """The modules of the package by their names from it: kernels.linear for kernels/linear/__init__.py."""
    paths = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in files(".py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}


def imports(path):
    """The modules that a file imports when it is imported itself. `from . import walk` imports the module walk only."""
    package = path.relative_to(PACKAGE).parts[:-1]
    skipped = {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level and node not in skipped:
            base = [*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split("."))]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in modules() else ".".join(base)


def circles():
    """Groups of two or more modules, each of which imports the others, directly or by way of others."""
    edges = {name: {*imports(path)} & modules().keys() - {name} for name, path in modules().items()}
    reached = {}
    for name in edges:
        todo, seen = [name], set()
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        reached[name] = seen
    return {
        frozenset(each for each in reached[name] if name in reached[each]) for name in edges if name in reached[name]
    }


def test_import_circles():
    assert len(circles()) <= CIRCLES, circles()


def test_private_functions_that_are_called_once():
    named = Counter(re.findall(r"\b_\w+\b", "\n".join(path.read_text() for path in files(".py"))))
    private = [
        node.name
        for path in files(".py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and re.match(r"_(?!_)\w", node.name)
    ]
    assert len([name for name in private if named[name] == 2]) <= CALLED_ONCE


@cache
def prose():
    """The comments and docstrings of the package, in one text; and the numbers of lines of comments and of code."""
    texts, comments, code = [], 0, set()
    for path in files(".py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                texts.append(token.string.lstrip("# "))
                comments += 1
            elif token.type == tokenize.STRING and token.string.lstrip("rf").startswith('"""'):
                texts.append(token.string)
            elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                code |= {(path, line) for line in range(token.start[0], token.end[0] + 1)}
    return "\n".join(texts), comments, len(code)


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases(phrase):
    assert len(re.findall(phrase, prose()[0], re.MULTILINE)) <= PHRASES[phrase]


def test_comments_inside_bodies():
    _, comments, code = prose()
    assert 100 * comments / code >= COMMENTS
