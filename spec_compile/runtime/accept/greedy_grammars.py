"""Greedy acceptance under a grammar, with one look at the GPU where no likeliest token is illegal."""

from torch import Tensor

from ...compat import argmax
from ...tree import Accepted, Tree
from .grammar_walks import GrammarWalks, Walk
from .grammars import forbid


class GreedyGrammars(GrammarWalks):
    """Takes the target's likeliest legal tokens, as `HostAcceptor` does where a grammar is the only processor.

    The likeliest token after every node is known at once. If it is legal, it is the likeliest legal one, so a mask is
    needed only where it is illegal. Each row goes down its tree until it comes to such a token; then the masks of the
    rows that stand there are copied together, and the rows go on from their likeliest legal tokens.
    """

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """See `HostAcceptor`."""
        walks = self.begin(tree, argmax(logits))
        stuck = [row for row in walks if self._walk(row, walks[row])]
        while stuck:
            for row in stuck:
                self.grammars.fill(row)
            nodes = [walks[row].path[-1] for row in stuck]
            legal = forbid(logits[stuck, nodes].float(), self.grammars.bitmask[stuck])
            for row, token in zip(stuck, argmax(legal).tolist()):
                self.choose(row, walks[row], token)
            stuck = [row for row in stuck if self._walk(row, walks[row])]
        return self.end(walks, *tree.tokens.shape)

    def _walk(self, row: int, walk: Walk) -> bool:
        """Go down as far as tokens are legal; returns whether the row stands before one that is not."""
        while not self.is_over(row, walk) and walk.enter():
            if not self.grammars.accept(row, walk.guess):
                return True
            walk.gained.append(walk.guess)
        return False
