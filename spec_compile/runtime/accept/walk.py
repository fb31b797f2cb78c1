"""The walk: choosing tokens on the host, down each tree, exactly as plain decoding chooses them."""

import torch
from torch import Tensor

from ...tree import Accepted, Tree
from ..answer import Answer
from .processors import Processors
from .random import accept_drawn, draw, probabilities, uniform


class Walk:
    """Goes down verified trees, one level at a time: process the logits of the node reached, choose a token, and go on
    to the child that has it.

    Only nodes that are reached cost anything, and each is processed with its true prefix, so that any logits processor
    is exact. If all processors are known to treat rows by themselves, each row goes as far as its tree allows.
    Otherwise all rows stay at one length, and processors, criteria and streamer are called in the order and with the
    arguments of plain decoding, which also holds for those that remember what they saw.

    A chosen token is the most likely one, or with `seed` drawn with the random number of its place in its row: it does
    not depend on what was drafted. Where drafts were themselves drawn (``tree.probs``), they are tested by
    `sampling.accept_drawn` instead.
    """

    def __init__(self, answer: Answer, processors: list, seed: int | None):
        self.answer, self.seed = answer, seed
        self.processors = Processors(processors, answer.batch)
        self.abreast = not self.processors.rowwise

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """logits [B, N, V] of the target at every node. The answer is given the tokens as they are chosen.

        Scores stay on the device of the logits; what is returned, and everything else, is on the CPU.
        """
        answer, tree = self.answer, tree.cpu()
        batch, nodes = tree.tokens.shape
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count, node = torch.zeros(2, batch, dtype=torch.int64)
        going = [row for row in range(batch) if answer.needs(row) and not answer.full(row)]
        for level in range(nodes):
            rows = torch.arange(batch) if self.abreast else torch.tensor(going)
            raw = logits[rows, node[rows]].float()
            places = [len(answer.rows[row]) for row in going]
            lengths = [answer.prompt_width + place for place in places]
            scores = self.processors(answer.ids, rows, lengths, raw.clone())
            scores = torch.broadcast_to(scores, (len(rows), -1))  # as plain decoding does with one row for all
            if self.abreast:
                raw, scores, rows = raw[going], scores[going], torch.tensor(going)
            chosen = self._choose(tree, rows, node[rows], torch.tensor(places), scores).cpu()
            path[rows, level], tokens[rows, level] = node[rows], chosen
            count[rows] += 1
            follows = (tree.parents[rows] == node[rows, None]) & (tree.tokens[rows] == chosen[:, None])
            follows = follows & tree.real[rows]
            node[rows] = follows.to(torch.int64).argmax(dim=1)
            self._report(going, chosen.tolist(), raw, scores)
            stays = dict(zip(going, follows.any(dim=1).tolist()))
            on = [row for row in going if answer.needs(row) and not answer.full(row)]
            if self.abreast and not all(stays[row] for row in on):
                break
            going = [row for row in on if stays[row]]
            if not going:
                break
        return Accepted(path, tokens, count.clamp(min=1))

    def _choose(self, tree: Tree, rows: Tensor, node: Tensor, places: Tensor, scores: Tensor) -> Tensor:
        """The next token [R] after nodes [R] of rows [R], that have gained so many tokens: places [R]."""
        if self.seed is None:
            return scores.argmax(dim=-1)
        weights = probabilities(scores)
        if tree.probs is None:
            return draw(weights, uniform(self.seed, rows, places).to(weights.device))
        below = (tree.parents[rows] == node[:, None]) & tree.real[rows]
        streams = torch.arange(int(below.sum(dim=1).max()) + 1)
        numbers = uniform(self.seed, rows[:, None], places[:, None], streams).to(weights.device)
        chosen = []
        for row, at, children, target, u in zip(rows.tolist(), node.tolist(), below, weights, numbers):
            children = tree.tokens[row, children].tolist()
            chosen.append(accept_drawn(target, tree.probs[row, at].double(), children, u[: len(children) + 1]))
        return torch.stack(chosen)

    def _report(self, going: list[int], chosen: list[int], raw: Tensor, scores: Tensor) -> None:
        answer = self.answer
        gained = [[] for _ in range(answer.batch)]
        kept = [[None] * answer.batch for _ in range(2)]
        for place, (row, token) in enumerate(zip(going, chosen)):
            gained[row] = [token]
            kept[0][row], kept[1][row] = raw[place], scores[place]
        answer.take(gained, *kept)
