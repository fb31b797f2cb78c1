"""spec_compile: Hugging Face causal language models, generating faster with the same answer."""

import importlib
from typing import TYPE_CHECKING, Any

from .api import Speculation, speculate
from .capture.experts import load_mxfp4
from .capture.rounded import load_gguf
from .errors import UnsupportedModelError
from .ngram.trie import NgramTrie
from .report.explain import dump
from .runtime.verify.thinking import ThinkingBudget
from .stats import Stats

if TYPE_CHECKING:
    from .tools.audit import audit
    from .train import train_draft, train_while_serving

__all__ = [
    "NgramTrie", "Speculation", "Stats", "ThinkingBudget", "UnsupportedModelError", "audit", "dump", "load_gguf",
    "load_mxfp4", "speculate", "train_draft", "train_while_serving",
]  # fmt: skip
__version__ = "0.1.0"
_SIDES = {"audit": ".tools.audit", "train_draft": ".train", "train_while_serving": ".train"}
"""Public names that a start does not import, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _SIDES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_SIDES[name], __name__), name)
