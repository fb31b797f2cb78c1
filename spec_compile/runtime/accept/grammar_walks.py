"""What the acceptors share that go down trees on the host along tokens chosen at all nodes at once."""

import torch
from torch import Tensor

from ...tree import Accepted, Tree
from ..answer import Answer
from .grammars import Grammars
from .host import HostAcceptor


class Walk:
    """One row's way down its tree.

    tokens, parents, real, guesses: [N] lists, of the tree's nodes and of what probably follows them.
    path: nodes that were entered. gained: the tokens chosen after them; behind the last node it may still be missing.
    """

    def __init__(self, tokens: list[int], parents: list[int], real: list[int], guesses: list[int]):
        self.guesses, self.path, self.gained, self.is_over = guesses, [], [], False
        self.children = {edge[:2]: node for node, edge in enumerate(zip(parents, tokens, real)) if node > 0 and edge[2]}

    def enter(self) -> bool:
        """Go to the child that has the last token, or first to the root; whether there is one."""
        node = self.children.get((self.path[-1], self.gained[-1])) if self.path else 0
        if node is not None:
            self.path.append(node)
        return node is not None

    @property
    def guess(self) -> int:
        """What probably follows the last node."""
        return self.guesses[self.path[-1]]


class GrammarWalks(HostAcceptor):
    """A `HostAcceptor` with `Grammars` among its processors."""

    def __init__(self, answer: Answer, processors: list, seed: int | None):
        super().__init__(answer, processors, seed)
        self.grammars = next(each for each in self.processors.processors if isinstance(each, Grammars))

    def begin(self, tree: Tree, guesses: Tensor) -> dict[int, Walk]:
        """The walks of the rows that go on, by row. guesses: [B, N] int64, what probably follows each node."""
        columns = torch.stack([tree.tokens, tree.parents, tree.real, guesses], dim=1).tolist()  # waits for a GPU
        walks = {row: Walk(*columns[row]) for row in range(len(columns)) if self._goes_on(row)}
        for row in walks:
            self.grammars.follow(row)
        return walks

    def choose(self, row: int, walk: Walk, token: int) -> None:
        """Take a token that was chosen under the mask. Where no token is legal, `Grammars.follow` raises once the row
        needs another one, as plain decoding does."""
        walk.gained.append(token)
        walk.is_over = not self.grammars.accept(row, token)

    def is_over(self, row: int, walk: Walk) -> bool:
        """Whether the last of the tokens that the row gains in this round ends it."""
        answer, gained = self.answer, walk.gained
        length = answer.prompt_width + len(answer.rows[row]) + len(gained)
        return walk.is_over or length >= answer.longest or (bool(gained) and gained[-1] in answer.eos)

    def end(self, walks: dict[int, Walk], batch: int, nodes: int) -> Accepted:
        """Give the answer what the rows have gained; the accepted nodes, on the CPU."""
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count = torch.ones(batch, dtype=torch.int64)
        for row, walk in walks.items():
            count[row] = len(walk.path)
            path[row, : len(walk.path)] = torch.tensor(walk.path)
            tokens[row, : len(walk.path)] = torch.tensor(walk.gained)
        self.answer.take([walks[row].gained if row in walks else [] for row in range(batch)])
        return Accepted(path, tokens, count)
