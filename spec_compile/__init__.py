"""spec_compile: Hugging Face causal language models, generating faster with the same answer."""

from .api import Speculation, speculate
from .audit import audit
from .capture.gguf import load_gguf
from .capture.mxfp4 import load_mxfp4
from .errors import UnsupportedModelError
from .ngram.trie import NgramTrie
from .report.explain import dump
from .runtime.accept.thinking import ThinkingBudget
from .stats import Stats
from .training import train_draft, train_while_serving

__all__ = [
    "NgramTrie", "Speculation", "Stats", "ThinkingBudget", "UnsupportedModelError", "audit", "dump", "load_gguf",
    "load_mxfp4", "speculate", "train_draft", "train_while_serving",
]  # fmt: skip
__version__ = "0.1.0"
