"""The language of the package: class names once, and no openers that turn a sentence around."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "spec_compile"
FILES = sorted(PACKAGE.rglob("*.py"))
AVOIDED = {
    **{word: rf"\b{word}\b" for word in ("behind", "alone", "beside")},
    **{word: rf"(?:^|[.:;] ){word}\b" for word in ("What", "Whether", "Of", "Those", "Whose")},
}
"""Words that docstrings and comments avoid anywhere, and words that open no sentence of theirs."""
COUNTS: dict[str, int] = {}
"""By file, the avoided words that are left. A count may only fall."""


def texts(file):
    """The docstrings and comments of a file."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield "\n".join(line.strip() for line in node.value.value.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_sentences_are_read_once(file):
    found = [match[0] for text in texts(file) for word in AVOIDED.values() for match in re.finditer(word, text, re.M)]
    assert len(found) == COUNTS.get(str(file.relative_to(PACKAGE)), 0), found


def test_avoided_words_are_found():
    words = "What. Whether so: Of it. Those. Whose; behind, alone, beside."
    assert sum(len(re.findall(pattern, words)) for pattern in AVOIDED.values()) == 8


def test_a_class_name_occurs_once():
    names = Counter(
        node.name for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
