"""`match.propose` in plain Python: the reference of the kernels. Importing it makes `propose` run on CPUs, too."""

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.ngram.match import empty_outputs, match_op
from spec_compile.ngram.store import MatchOptions


def propose_plainly(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, references: Tensor,
    reference_lengths: Tensor, num_nodes: int, options: MatchOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`propose` for tensors on any device."""
    out = empty_outputs(tokens, num_nodes)
    end = torch.tensor([-1])
    for row in range(tokens.shape[0]):
        held = corpus[: int(corpus_length[row])].long().cpu()
        reference = references[row, : int(reference_lengths[row])].long().cpu()
        row_text = tokens[row, : int(committed[row])].cpu()
        tree, parents, longest = _grow(row_text, torch.cat([held, end, reference]), num_nodes, options)
        padding = [0] * (num_nodes - len(tree))
        for tensor, value in zip(out, (tree + padding, parents + padding, len(tree), longest)):
            tensor[row] = torch.tensor(value)
    return out


@match_op.register_kernel("cpu")
def _(*arguments):
    *inputs, numbers = arguments
    return propose_plainly(*inputs, MatchOptions.of(numbers))


@dataclass
class _Match:
    length: int
    following: list[int]


def _grow(row_text: Tensor, earlier: Tensor, num_nodes: int, options: MatchOptions) -> tuple[list[int], list[int], int]:
    matches = _best_matches(row_text, earlier, num_nodes, options)
    tree, parents = [int(row_text[-1])], [-1]
    children: dict[tuple[int, int], int] = {}

    def add(parent: int, token: int) -> int:
        node = children.setdefault((parent, token), len(tree))
        if node == len(tree):
            tree.append(token)
            parents.append(parent)
        return node

    def full() -> bool:
        return len(tree) == num_nodes

    longest = max((match.length for match in matches), default=0)
    anchors = [
        (window, [match.following for match in matches if match.length >= window])
        for window in range(longest, options.min_match_window_size - 1, -1)
        if longest
    ]
    if options.match_type == "PROB":
        _by_frequency(anchors, add, full, options)
    else:
        _by_recency(anchors, add, full, options)
    return tree, parents, longest


def _best_matches(row_text: Tensor, earlier: Tensor, num_nodes: int, options: MatchOptions) -> list[_Match]:
    """The longest `match_limit` matches that go on, and the most recent among equals; most recent first."""
    suffix = row_text[-options.max_match_window_size :].flip(0)
    text = torch.cat([earlier, torch.tensor([-1]), row_text])
    length, alive = torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool)
    for back, token in enumerate(suffix):
        shifted = torch.cat([torch.full((back,), -1), text])[: len(text)]
        alive = alive & (shifted == token)
        length += alive
    length[:-1][text[1:] < 0] = 0  # nothing follows
    length[-1] = 0
    positions = (length >= options.min_match_window_size).nonzero().flatten().tolist()
    candidates = [(int(length[at]), at) for at in positions]
    candidates = heapq.nlargest(options.match_limit, candidates)
    matches = []
    for size, at in sorted(candidates, key=lambda match: -match[1]):
        following = text[at + 1 : at + 1 + options.branch_length - options.min_match_window_size].tolist()
        matches.append(_Match(size, following[: following.index(-1)] if -1 in following else following))
    return matches


def _followers(texts: list[list[int]], depth: int) -> dict[int, list[list[int]]]:
    """The texts that go on after `depth` tokens, by the next token; the most recent token first."""
    groups: dict[int, list[list[int]]] = {}
    for text in texts:
        if len(text) > depth:
            groups.setdefault(text[depth], []).append(text)
    return groups


def _by_recency(anchors, add, full, options: MatchOptions) -> None:
    """Breadth first for each anchor: the most recent followers of each node, fewer the deeper it lies."""
    deepest = options.branch_length - 1
    low, high = options.min_bfs_breadth, options.max_bfs_breadth
    for window, texts in anchors:
        queue = [(texts, 0, 0)]
        for texts, depth, node in queue:
            if window + depth > deepest:
                continue
            breadth = low + (deepest - window - depth) * (high - low) // deepest
            for token, group in list(_followers(texts, depth).items())[:breadth]:
                if full():
                    return
                queue.append((group, depth + 1, add(node, token)))


def _by_frequency(anchors, add, full, options: MatchOptions) -> None:
    """The most frequent followers first, by their share of the matches; a shorter anchor is worth half as much."""
    heap: list[tuple] = []

    def offer(texts: list[list[int]], window: int, depth: int, node: int, score: float) -> None:
        if window + depth == options.branch_length:
            return
        groups = sorted(_followers(texts, depth).items(), key=lambda item: -len(item[1]))
        total = sum(len(group) for _, group in groups)
        for token, group in groups[: options.max_bfs_breadth]:
            worth = score * len(group) / total
            heapq.heappush(heap, (-worth, -window, next(order), token, group, depth + 1, node))

    order = iter(range(1 << 62))
    for place, (window, texts) in enumerate(anchors):
        offer(texts, window, 0, 0, 0.5**place)
    while heap and not full():
        score, window, _, token, texts, depth, parent = heapq.heappop(heap)
        offer(texts, -window, depth, add(parent, token), -score)
