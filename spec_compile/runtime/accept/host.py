"""Accepting tokens on the host, down each tree, as plain decoding chooses them."""

import torch
from torch import Tensor

from ...parallel.ranks import ALONE, Alone
from ...tree import Accepted, Tree
from ..answer import Answer
from .processors import Processors
from .random_numbers import draw, probabilities, uniform
from .rejection import accept_drawn
from .row_invariant import row_invariant


class HostAcceptor:
    """Goes down verified trees level by level: processes a node's logits, chooses a token, goes to its child.

    answer: takes the tokens as they are chosen.
    processors: any logits processors. Only nodes that are reached are processed, each with its true prefix.
    seed: of the random numbers with which tokens are drawn; None takes the likeliest token.
    ranks: the processes that share the model; processors run on all of them, and the first one's choice counts.

    If all processors are known to treat rows by themselves, each row goes as far as its tree allows. Otherwise rows go
    in lockstep, and processors, stopping criteria and streamer are called in the order and with the arguments of plain
    decoding, which also serves processors with a memory.

    A token is drawn with the random number of its row and position, so it does not depend on what was drafted. Drafts
    that were themselves drawn (``tree.probs``) are tested by `rejection.accept_drawn` instead.
    """

    def __init__(self, answer: Answer, processors: list, seed: int | None, ranks: Alone = ALONE):
        self.answer, self.seed, self.ranks = answer, seed, ranks
        self.first_row = 0  # the number of the answer's first row among those that share the seed
        self.processors = Processors(processors, answer.batch)
        self.lockstep = not self.processors.rowwise

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """The accepted nodes, on the CPU.

        logits: [B, N, V] of the target after every node. Scores stay on their device; all else is on the CPU.
        """
        answer, tree = self.answer, tree.cpu()
        batch, nodes = tree.tokens.shape
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count, node = torch.zeros(2, batch, dtype=torch.int64)
        going = [row for row in range(batch) if self._goes_on(row)]
        for level in range(nodes):
            rows = torch.arange(batch) if self.lockstep else torch.tensor(going)
            raw = logits[rows, node[rows]].float()
            gained = [len(answer.rows[row]) for row in going]
            lengths = [answer.prompt_width + length for length in gained]
            with row_invariant(raw.device, self.processors.processors):
                scores = self.processors(answer.ids, rows, lengths, raw.clone())
                scores = torch.broadcast_to(scores, (len(rows), -1))  # as plain decoding does with one row for all
                if self.lockstep:
                    raw, scores, rows = raw[going], scores[going], torch.tensor(going)
                chosen = self._choose(tree, rows, node[rows], torch.tensor(gained), scores).cpu()
                if self.ranks.size > 1:
                    chosen = torch.tensor(self.ranks.lead(chosen.tolist))
            path[rows, level], tokens[rows, level] = node[rows], chosen
            count[rows] += 1
            follows = (tree.parents[rows] == node[rows, None]) & (tree.tokens[rows] == chosen[:, None])
            follows = follows & tree.real[rows]
            node[rows] = follows.to(torch.int64).argmax(dim=1)
            self._hand_over(going, chosen.tolist(), raw, scores)
            was_drafted = dict(zip(going, follows.any(dim=1).tolist()))
            needy = [row for row in going if self._goes_on(row)]
            if self.lockstep and not all(was_drafted[row] for row in needy):
                break
            going = [row for row in needy if was_drafted[row]]
            if not going:
                break
        return Accepted(path, tokens, count.clamp(min=1))

    def _goes_on(self, row: int) -> bool:
        return self.answer.needs(row) and not self.answer.full(row)

    def _choose(self, tree: Tree, rows: Tensor, node: Tensor, gained: Tensor, scores: Tensor) -> Tensor:
        """The next token [R] int64 after one node of each of R rows.

        rows, node: [R] int64. gained: [R] int64, tokens that each row has gained. scores: [R, V] float.
        """
        if self.seed is None:
            return scores.argmax(dim=-1)
        weights, numbers = probabilities(scores), rows + self.first_row
        if tree.probs is None:
            return draw(weights, uniform(self.seed, numbers, gained).to(weights.device))
        is_child = (tree.parents[rows] == node[:, None]) & tree.real[rows]  # [R, N]
        streams = torch.arange(int(is_child.sum(dim=1).max()) + 1)
        numbers = uniform(self.seed, numbers[:, None], gained[:, None], streams).to(weights.device)
        chosen = []
        for row, parent, mask, target, u in zip(rows.tolist(), node.tolist(), is_child, weights, numbers):
            children = tree.tokens[row, mask].tolist()
            chosen.append(accept_drawn(target, tree.probs[row, parent].double(), children, u[: len(children) + 1]))
        return torch.stack(chosen)

    def _hand_over(self, going: list[int], chosen: list[int], raw: Tensor, scores: Tensor) -> None:
        """Give the answer one token of each row in `going`, with its logits and scores [R, V]."""
        batch = self.answer.batch
        gained, raw_of, scores_of = [[] for _ in range(batch)], [None] * batch, [None] * batch
        for index, (row, token) in enumerate(zip(going, chosen)):
            gained[row], raw_of[row], scores_of[row] = [token], raw[index], scores[index]
        self.answer.take(gained, raw_of, scores_of)
