"""Hindsight: how far the text followed drafted trees, verified or not."""

from dataclasses import dataclass, field

from .state import State


@dataclass
class _Tree:
    """A tree that the text still follows. end: the slot of the text's token that is `node`."""

    hint: int
    children: dict[tuple[int, int], int]
    end: int
    node: int = 0
    path: list[int] = field(default_factory=list)

    def follow(self, text: list[int], begin: int) -> bool:
        """Go on along `text`, whose first token is in slot `begin`. True if the text has left the tree.

        With end = 7, begin = 6 and text = [4, 9, 3, 5], slots 8 and 9 hold the next tokens, 3 and 5.
        """
        for token in text[self.end + 1 - begin :]:
            child = self.children.get((self.node, token))
            if child is None:
                return True
            self.path.append(child)
            self.end, self.node = self.end + 1, child
        return all(parent != self.node for parent, _ in self.children)


class Hindsight:
    """Compares the trees in a `State` on a CPU with the tokens that are committed afterwards.

    An n-gram tree does not depend on how many of its nodes are verified, so even plain rounds show the gain of drafts.
    """

    def __init__(self, state: State):
        self._state = state
        self._trees: list[list[_Tree]] = [[] for _ in range(state.batch)]
        self._ends = [-1] * state.batch
        """The slot of each row's last token at the last `look`."""

    def move(self, row: int, to: int) -> None:
        """The text of one row goes on in another."""
        self._trees[to], self._ends[to] = self._trees[row], self._ends[row]
        self.forget(row)

    def forget(self, row: int) -> None:
        """Drop the trees of a row that gets another text."""
        self._trees[row], self._ends[row] = [], int(self._state.lengths[row])

    def look(self) -> list[tuple[int, list[int]]]:
        """Call this before each round. Returns (hint, path without root) of trees that the text has left since."""
        state, known = self._state, []
        ends, hints, counts = state.lengths.tolist(), state.tree_hint.tolist(), state.tree_count.tolist()
        for row, (end, before) in enumerate(zip(ends, self._ends)):
            if end == before:
                continue
            if end < before:
                self._trees[row].clear()  # another text
            text, going = state.tokens[row, before + 1 : end + 1].tolist() if before < end else [], []
            for tree in self._trees[row]:
                if tree.follow(text, before + 1):
                    known.append((tree.hint, tree.path))
                else:
                    going.append(tree)
            if counts[row] > 1:
                tokens, parents = (
                    nodes[row, : counts[row]].tolist() for nodes in (state.tree_tokens, state.tree_parents)
                )
                pairs = zip(parents[1:], tokens[1:])
                going.append(_Tree(hints[row], {pair: node for node, pair in enumerate(pairs, 1)}, end))
            self._trees[row], self._ends[row] = going, end
        return known
