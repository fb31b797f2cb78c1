"""Greedy acceptance under grammars, with one look at the GPU where no likeliest token is illegal."""

import torch
from torch import Tensor

from ...compat import argmax
from ...tree import Accepted, Tree
from ..answer import Answer
from .grammars import Grammars
from .host import HostAcceptor


class GreedyGrammars(HostAcceptor):
    """Takes the target's likeliest legal tokens, as `HostAcceptor` does where a grammar is the only processor.

    The likeliest token after every node is known at once. A likeliest token that is legal is the likeliest legal one,
    so a mask is needed only where the target's is illegal. Each row goes down its tree until it comes to such a token;
    then the masks of the rows that stand there are copied together, and they go on from the likeliest legal tokens.
    """

    def __init__(self, answer: Answer, processors: list):
        super().__init__(answer, processors, None)
        (self.grammars,) = self.processors.processors
        assert isinstance(self.grammars, Grammars)

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """See `HostAcceptor`."""
        columns = [tree.tokens, tree.parents, tree.real, argmax(logits).view_as(tree.tokens)]
        columns = torch.stack(columns, dim=1).tolist()  # the one place where a GPU is waited for
        walks = {row: _Walk(*columns[row]) for row in range(len(columns)) if self._goes_on(row)}
        for row in walks:
            self.grammars.follow(row)
        going = list(walks)
        while going:
            stuck = [row for row in going if self._walk(row, walks[row])]
            if stuck:
                for row in stuck:
                    self.grammars.fill(row)
                nodes = [walks[row].path[-1] for row in stuck]
                likeliest = argmax(self.grammars.mask(stuck, logits[stuck, nodes].float())).tolist()
                for row, token in zip(stuck, likeliest):
                    walks[row].take(token)
                    # Where no token is legal, `follow` raises if the row needs another one, as plain decoding does.
                    walks[row].is_over |= not self.grammars.accept(row, token)
            going = stuck
        self.answer.take([walks[row].gained if row in walks else [] for row in range(len(columns))])
        return self._accepted(walks, *tree.tokens.shape)

    def _walk(self, row: int, walk: "_Walk") -> bool:
        """Go down as far as tokens are legal; returns whether the row stands before one that is not."""
        while not walk.is_over and not self._is_last(row, walk.gained):
            if not walk.enter():
                return False
            token = walk.likeliest[walk.path[-1]]
            if not self.grammars.accept(row, token):
                return True
            walk.take(token)
        return False

    def _is_last(self, row: int, gained: list[int]) -> bool:
        """Whether the last of the tokens that the row gains in this round ends it."""
        answer = self.answer
        length = answer.prompt_width + len(answer.rows[row]) + len(gained)
        return length >= answer.longest or (bool(gained) and gained[-1] in answer.eos)

    @staticmethod
    def _accepted(walks: dict[int, "_Walk"], batch: int, nodes: int) -> Accepted:
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count = torch.ones(batch, dtype=torch.int64)
        for row, walk in walks.items():
            count[row] = len(walk.path)
            path[row, : len(walk.path)] = torch.tensor(walk.path)
            tokens[row, : len(walk.path)] = torch.tensor(walk.gained)
        return Accepted(path, tokens, count)


class _Walk:
    """One row's way down its tree.

    tokens, parents, real, likeliest: [N] lists, of the tree's nodes and of the target after them.
    path: nodes that were entered. gained: the tokens chosen after them, which are as many but while one is chosen.
    """

    def __init__(self, tokens: list[int], parents: list[int], real: list[int], likeliest: list[int]):
        self.likeliest, self.path, self.gained, self.is_over = likeliest, [], [], False
        self.children = {edge[:2]: node for node, edge in enumerate(zip(parents, tokens, real)) if node > 0 and edge[2]}

    def enter(self) -> bool:
        """Go to the child that has the last token; whether there is one."""
        node = self.children.get((self.path[-1], self.gained[-1])) if self.path else 0
        if node is not None:
            self.path.append(node)
        return node is not None

    def take(self, token: int) -> None:
        self.gained.append(token)
