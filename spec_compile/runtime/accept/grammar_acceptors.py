"""Acceptance under a grammar with few copies from a GPU: rows follow tokens chosen after all nodes at once."""

import torch
from torch import Tensor

from ...compat import argmax
from ...errors import RequestError
from ...tree import Accepted, Tree, ancestry
from ..answer import Answer
from .grammars import Grammars, forbid
from .host import HostAcceptor
from .processors import OF_SCORES, WAITING, is_known
from .random_numbers import NO_PROBABILITIES, draw, uniform
from .row_invariant import row_invariant


class Walk:
    """One row's way down its tree.

    tokens, parents, real, guesses: [N] lists; the tree's nodes, and the tokens that probably follow them.
    path: nodes that were entered.
    gained: the tokens chosen after them, perhaps not yet after the last: tokens = [7, 4, 9], parents = [-1, 0, 1] and
        guesses = [4, 5, 6] give path [0, 1], gained [4, 5] if both guesses are legal; no child of node 1 has token 5.
    """

    def __init__(self, tokens: list[int], parents: list[int], real: list[int], guesses: list[int]):
        self.guesses, self.path, self.gained, self.is_over = guesses, [], [], False
        self.children = {edge[:2]: node for node, edge in enumerate(zip(parents, tokens, real)) if node > 0 and edge[2]}

    def enter(self) -> bool:
        """Go to the child that has the last token, or first to the root. True if there is one."""
        node = self.children.get((self.path[-1], self.gained[-1])) if self.path else 0
        if node is not None:
            self.path.append(node)
        return node is not None

    @property
    def guess(self) -> int:
        return self.guesses[self.path[-1]]


class GrammarWalks(HostAcceptor):
    """A `HostAcceptor` with `Grammars` among its processors."""

    def __init__(self, answer: Answer, processors: list, seed: int | None):
        super().__init__(answer, processors, seed)
        self.grammars = self.processors.grammars[0]

    def begin(self, tree: Tree, guesses: Tensor) -> dict[int, Walk]:
        """The walks of the rows that go on, by row. guesses: [B, N] int64, the probable token after each node."""
        columns = torch.stack([tree.tokens, tree.parents, tree.real, guesses], dim=1).tolist()  # waits for a GPU
        walks = {row: Walk(*columns[row]) for row in range(len(columns)) if self._goes_on(row)}
        for row in walks:
            self.grammars.follow(row)
        return walks

    def choose(self, row: int, walk: Walk, token: int) -> None:
        """Take a token that was chosen under the mask. If none was legal, `Grammars.follow` raises once the row needs
        another one, as plain decoding does."""
        walk.gained.append(token)
        walk.is_over = not self.grammars.accept(row, token)

    def is_over(self, row: int, walk: Walk) -> bool:
        """True if the last token of the walk ends the row."""
        answer, gained = self.answer, walk.gained
        length = answer.prompt_width + len(answer.rows[row]) + len(gained)
        return walk.is_over or length >= answer.longest or (bool(gained) and gained[-1] in answer.eos)

    def end(self, walks: dict[int, Walk], batch: int, nodes: int) -> Accepted:
        """Give the rows' tokens to the answer. Returns the accepted nodes, on the CPU."""
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count = torch.ones(batch, dtype=torch.int64)
        for row, walk in walks.items():
            count[row] = len(walk.path)
            path[row, : len(walk.path)] = torch.tensor(walk.path)
            tokens[row, : len(walk.path)] = torch.tensor(walk.gained)
        self.answer.take([walks[row].gained if row in walks else [] for row in range(batch)])
        return Accepted(path, tokens, count)


class GreedyGrammars(GrammarWalks):
    """Takes the target's likeliest legal tokens, as `HostAcceptor` does with a grammar as the only processor.

    The likeliest token after every node is known at once, and needs a mask only if it is illegal. Each row goes down
    its tree to the first illegal token. The masks of all such rows are then copied together, and the rows go on from
    their likeliest legal tokens.
    """

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
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
        """Go down as far as tokens are legal. Returns True if the next one is illegal."""
        while not self.is_over(row, walk) and walk.enter():
            if not self.grammars.accept(row, walk.guess):
                return True  # guard: grammar-forbids
            walk.gained.append(walk.guess)
        return False


class DrawnGrammars(GrammarWalks):
    """Draws the tokens that `HostAcceptor` draws, with a grammar among processors that `takes` accepts.

    On a GPU a guess is drawn after every node, without the mask. Each row follows its guesses while they are legal, and
    notes the mask of every node that it enters. Tokens are then drawn under these masks, which one copy brings, with
    the same random numbers. The row gains them up to the first that is not the guess, and goes on from there in the
    same way. On a CPU, and for drafts that were drawn, it is a `HostAcceptor`.
    """

    @staticmethod
    def takes(processors: list) -> bool:
        """True if all processors but one `Grammars` read only scores, and do not wait for a GPU."""
        others = [each for each in processors if not isinstance(each, Grammars)]
        return len(others) + 1 == len(processors) and all(is_known(each, OF_SCORES - WAITING) for each in others)

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
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
            stretches: list[tuple[int, int]] = []  # of each row: tokens before it, and nodes in it
            entered: list[tuple[int, int]] = []  # (row, node) of each mask in `bits`
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
        """A token [R] after each of R nodes, -1 if there is nothing to draw from.

        logits: [R, V]. numbers: [R] float64. bits: [R, W] int32 on the CPU, the masks, or None.
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
        """Replace guesses after the first `before` tokens by the `chosen` tokens. Returns True if any differs."""
        for index, token in enumerate(chosen, before):
            if walk.gained[index : index + 1] == [token]:
                continue
            if token < 0:
                raise RequestError(NO_PROBABILITIES)
            self.grammars.rewind(row, len(walk.gained) - index)
            del walk.gained[index:], walk.path[index + 1 :]
            self.choose(row, walk, token)
            return True
        return False
