"""The bits that `audit` compares: speculative rounds beside plain steps of the same engine, which draft nothing."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import passes
from ..cache import PAGE, Cache
from ..graph import ModelGraph
from ..passes.tap_hidden_states import FINAL
from ..runtime.engine import Engine
from ..stats import Stats
from ..tree import MAX_NODES, ancestry

LONGEST_PATH = MAX_NODES // 2
"""Nodes of the path that `first_difference` runs, each but the root with a rival."""


@contextmanager
def plain_steps(engine: Engine) -> Iterator[None]:
    """A context in which the engine verifies roots alone, and counts in statistics of its own."""
    stats = engine.runtime.stats
    engine.drafts, engine.runtime.stats = False, Stats()
    try:
        yield
    finally:
        engine.drafts, engine.runtime.stats = True, stats


@torch.no_grad()
def first_difference(engine: Engine, text: Tensor, count: int) -> str:
    """The first part of the rewritten graph, not compiled, whose bits in a tree are not those of plain steps.

    The tree has the last `count` tokens of `text` [1, T] on its path, `LONGEST_PATH` at most, and beside each of them a
    rival. Returns "" if every bit is the same, or if the layers of the model cannot be told apart.
    """
    taps = (*range(len(engine.captured.layers) + 1), FINAL)
    try:
        graph = passes.run(engine.captured, dataclasses.replace(engine.settings["verify"], taps=taps))
    except KeyError:  # a tap that `tap_hidden_states` does not find
        return ""
    length = text.shape[1]
    count = min(count, LONGEST_PATH, length - 1)
    prefix, slots = length - count, -(-(length + MAX_NODES) // PAGE) * PAGE
    cache = Cache(graph, 1, slots).tensors
    steps = torch.arange(length, device=text.device)[None]
    graph.gm(text[:, :prefix], steps[:, :prefix], steps.new_zeros(1), None, cache, slots)
    in_tree = _tree(graph, text[:, prefix:], steps[:, prefix : prefix + 1], cache, slots)
    alone = [
        graph.gm(text[:, n : n + 1], steps[:, n : n + 1], steps[0, n : n + 1], torch.ones_like(text[:, :1]), cache, slots)
        for n in range(prefix, length)
    ]  # fmt: skip
    names = ["the head", "the embeddings", *(f"layer {n}" for n in range(len(taps) - 2)), "the final norm"]
    pairs = [(name, ours, torch.cat(rows, dim=1)) for name, ours, *rows in zip(names, in_tree, *alone)]
    return next((name for name, ours, plain in [*pairs[1:], pairs[0]] if not torch.equal(ours, plain)), "")


def _tree(graph: ModelGraph, path: Tensor, begin: Tensor, cache: list[Tensor], slots: int) -> list[Tensor]:
    """Logits and taps [1, count, *] of `path` [1, count] behind the position `begin` [1, 1], in a tree with rivals."""
    count = path.shape[1]
    # Nodes: the root, then a token of the path (of odd number) and its rival (the even one behind it), level by level.
    tokens = torch.stack([path, (path + 1) % graph.vocab_size], dim=2).flatten(1)[:, [0, *range(2, 2 * count)]]
    on_path = [0, *range(1, 2 * count - 1, 2)]
    parents = [-1, *(parent for parent in on_path[:-1] for _ in range(2))]
    ancestors, depth = ancestry(torch.tensor([parents], device=path.device))
    out = graph.gm(tokens, begin + depth, begin[0], ancestors, cache, slots)
    return [states[:, on_path] for states in out]
