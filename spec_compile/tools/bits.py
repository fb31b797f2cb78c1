"""The bits that `audit` compares: speculative rounds and plain steps of the same engine, which draft nothing."""

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

PATHS = (MAX_NODES // 2, 8, 2)
"""Nodes of the paths that `first_difference` runs. Every node but the root has a rival."""


@contextmanager
def plain_steps(engine: Engine) -> Iterator[None]:
    """A context in which the engine verifies only roots, and counts in separate statistics."""
    stats = engine.runtime.stats
    engine.most_nodes, engine.runtime.stats = 1, Stats()
    try:
        yield
    finally:
        engine.most_nodes, engine.runtime.stats = MAX_NODES, stats


@torch.no_grad()
def first_difference(engine: Engine, text: Tensor) -> str:
    """The first part of the rewritten graph, not compiled, whose bits in a tree are not those of plain steps.

    The trees have the last tokens of `text` [1, T] on a path, and a rival of each. Returns "" if every bit is the same,
    or if the layers of the model cannot be told apart.
    """
    taps = (*range(engine.captured.decoder_layers + 1), FINAL)
    try:
        graph = passes.run(engine.captured, dataclasses.replace(engine.settings["verify"], taps=taps))
    except KeyError:  # a tap that `tap_hidden_states` does not find
        return ""
    names = [
        "the embeddings",
        *(f"layer {n}" for n in range(engine.captured.decoder_layers)),
        "the final norm",
        "the head",
    ]
    longest = text.shape[1] - 1
    for path in (n for n in PATHS if n <= longest):
        for name, in_tree, alone in zip(names, *_both(graph, text, text.shape[1] - path), strict=True):
            if not torch.equal(in_tree, alone):
                return name
    return ""


def _both(graph: ModelGraph, text: Tensor, begin: int) -> tuple[list[Tensor], list[Tensor]]:
    """Taps and logits [1, T - begin, *] of `text` [1, T] from `begin` on, as a path of a tree and by plain steps."""
    length = text.shape[1]
    slots = -(-(length + MAX_NODES) // PAGE) * PAGE
    buffers = Cache(graph, 1, slots)
    states, cache = buffers.states, buffers.argument
    steps = torch.arange(length, device=text.device)[None]
    states.reset(steps.new_tensor([begin]))
    for counted in states.tensors[:1]:
        counted.fill_(begin)
    graph.gm(text[:, :begin], steps[:, :begin], steps.new_zeros(1), None, cache, slots)
    in_tree = _tree(graph, text[:, begin:], steps[:, begin : begin + 1], cache, slots)
    root = torch.ones_like(text[:, :1])  # sees itself
    alone = []
    for n in range(begin, length):
        alone.append(graph.gm(text[:, n : n + 1], steps[:, n : n + 1], steps[0, n : n + 1], root, cache, slots))
        states.commit(torch.zeros_like(root), root[0])
    rows = [torch.cat(parts, dim=1) for parts in zip(*alone)]
    return [*in_tree[1:], in_tree[0]], [*rows[1:], rows[0]]


def _tree(graph: ModelGraph, path: Tensor, begin: Tensor, cache: list[Tensor], slots: int) -> list[Tensor]:
    """Logits and taps [1, count, *] of `path` [1, count], whose root is at `begin` [1, 1], in a tree with rivals.

    Nodes come level by level: the root, then each token of the path (odd numbers) followed by its rival (even numbers).
    The path r, a, b gives nodes r, a, a', b, b' with parents -1, 0, 0, 1, 1.
    """
    count = path.shape[1]
    tokens = torch.stack([path, (path + 1) % graph.vocab_size], dim=2).flatten(1)[:, [0, *range(2, 2 * count)]]
    on_path = [0, *range(1, 2 * count - 1, 2)]
    parents = [-1, *(parent for parent in on_path[:-1] for _ in range(2))]
    ancestors, depth = ancestry(torch.tensor([parents], device=path.device))
    out = graph.gm(tokens, begin + depth, begin[0], ancestors, cache, slots)
    return [states[:, on_path] for states in out]
