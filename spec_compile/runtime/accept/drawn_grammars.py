"""Drawing tokens under a grammar, with two looks at a GPU where the grammar changes no token."""

import torch
from torch import Tensor

from ...tree import Accepted, Tree, ancestry
from .grammar_walks import GrammarWalks, Walk
from .grammars import Grammars, forbid
from .processors import OF_SCORES, WAITING, is_known
from .random_numbers import NO_PROBABILITIES, draw, uniform
from .row_invariant import row_invariant


class DrawnGrammars(GrammarWalks):
    """Draws the tokens that `HostAcceptor` draws, where there is a grammar among processors that `takes` accepts.

    On a GPU a guess is drawn after every node, without the mask. Each row goes down along its guesses as far as they
    are legal, and notes the mask of every node that it enters. Tokens are then drawn under these masks, which one copy
    brings, with the same random numbers. Up to the first that is not the guess they are what the row gains; from there
    it goes on in the same way. On a CPU, which is not waited for, and for drafts that were drawn, it is a
    `HostAcceptor`.
    """

    @staticmethod
    def takes(processors: list) -> bool:
        """Whether all processors but one `Grammars` look at nothing but scores, and do not wait for a GPU."""
        others = [each for each in processors if not isinstance(each, Grammars)]
        return len(others) + 1 == len(processors) and all(is_known(each, OF_SCORES - WAITING) for each in others)

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """See `HostAcceptor`."""
        if logits.device.type == "cpu" or tree.probs is not None:
            return super().__call__(tree, logits)
        return self.accept(tree, logits)

    def accept(self, tree: Tree, logits: Tensor) -> Accepted:
        """`__call__` on a GPU."""
        (batch, nodes), device = tree.tokens.shape, logits.device
        gained = torch.tensor([len(tokens) for tokens in self.answer.rows]).to(device, non_blocking=True)
        rows = torch.arange(batch, device=device) + self.first_row
        numbers = uniform(self.seed, rows[:, None], gained[:, None] + ancestry(tree.parents)[1])
        walks = self.begin(tree, self._draw(logits.flatten(0, 1), numbers.flatten()).view(batch, nodes))
        going = list(walks)
        bits = torch.empty(len(going) * nodes, self.grammars.bitmask.shape[1], dtype=torch.int32)
        while going:
            stretches: list[tuple[int, int]] = []  # of each row: tokens before its stretch, and nodes of the stretch
            entered: list[tuple[int, int]] = []  # (row, node), whose masks are the first of `bits`
            for row in going:
                before, begin = len(walks[row].gained), len(entered)
                self._guess_on(row, walks[row], bits, entered)
                stretches.append((before, len(entered) - begin))
            if not entered:
                break
            at = [list(numbers_) for numbers_ in zip(*entered)]
            chosen = iter(self._draw(logits[at[0], at[1]], numbers[at[0], at[1]], bits[: len(entered)]).tolist())
            going = [
                row
                for row, (before, count) in zip(going, stretches)
                if self._settle(row, walks[row], before, [next(chosen) for _ in range(count)])
            ]
        return self.end(walks, batch, nodes)

    def _draw(self, logits: Tensor, numbers: Tensor, bits: Tensor | None = None) -> Tensor:
        """A token [R] after each of R nodes, -1 where there is nothing to draw from.

        logits: [R, V]. numbers: [R] float64. bits: [R, W] int32 on the CPU, the masks; None masks nothing.
        """
        scores = logits.float()
        with row_invariant(scores.device, self.processors.processors):
            for processor in self.processors.processors:
                if processor is not self.grammars:
                    scores = processor(None, scores)
                elif bits is not None:
                    scores = forbid(scores, bits)
            weights = scores.double().softmax(dim=-1)
            token = draw(weights, numbers).clamp(max=scores.shape[1] - 1)
            return torch.where(weights.sum(dim=-1).isfinite(), token, -1)

    def _guess_on(self, row: int, walk: Walk, bits: Tensor, entered: list[tuple[int, int]]) -> None:
        """Go down as far as guesses are legal, and note every node with its mask."""
        matcher = self.grammars.matchers[row]
        while not self.is_over(row, walk) and walk.enter():
            self.grammars.fill(row, bits, len(entered))
            entered.append((row, walk.path[-1]))
            if matcher.is_terminated() or walk.guess < 0 or not self.grammars.accept(row, walk.guess):
                break
            walk.gained.append(walk.guess)
            if matcher.is_terminated():
                break

    def _settle(self, row: int, walk: Walk, before: int, chosen: list[int]) -> bool:
        """Replace guesses behind the first `before` tokens by what was `chosen`; returns whether that differs."""
        for index, token in enumerate(chosen, before):
            if walk.gained[index : index + 1] == [token]:
                continue
            if token < 0:
                raise RuntimeError(NO_PROBABILITIES)
            self.grammars.rewind(row, len(walk.gained) - index)
            del walk.gained[index:], walk.path[index + 1 :]
            self.choose(row, walk, token)
            return True
        return False
