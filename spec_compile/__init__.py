"""spec_compile: Hugging Face causal language models, generating faster with the same answer."""

from typing import TYPE_CHECKING, Any

from .api import Speculation, speculate
from .capture.experts import load_mxfp4
from .capture.rounded import load_gguf
from .errors import UnsupportedModelError
from .ngram.trie import NgramTrie
from .registry import side
from .runtime.verify.thinking import ThinkingBudget
from .stats import Stats

if TYPE_CHECKING:
    from .tools.audit import audit
    from .tools.explain import dump
    from .train import train_draft, train_while_serving

__all__ = [
    "NgramTrie", "Speculation", "Stats", "ThinkingBudget", "UnsupportedModelError", "audit", "dump", "load_gguf",
    "load_mxfp4", "speculate", "train_draft", "train_while_serving",
]  # fmt: skip
__version__ = "0.2.0"
_SIDES = {"audit": "tools.audit", "dump": "tools.explain", "train_draft": "train", "train_while_serving": "train"}
"""Public names that a start does not import, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _SIDES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(side(_SIDES[name]), name)
