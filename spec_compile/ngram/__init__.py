"""N-gram stores: `trie.NgramTrie` on a CPU and `corpus.NgramCorpus` on a GPU, which read each other's files."""

from .store import MOST_OWNERS, NgramStore, OwnedTexts

__all__ = ["MOST_OWNERS", "NgramStore", "OwnedTexts"]
