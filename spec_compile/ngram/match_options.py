"""`MatchOptions`: the options of matching and of growing trees from the matches, on a CPU and on a GPU."""

from dataclasses import dataclass

from ..errors import check_int

MAX_MATCH_LIMIT = 128
MOST_BREADTH = 1 << 20


@dataclass(frozen=True)
class MatchOptions:
    """How to match and how to grow trees from the matches.

    branch_length: 2 to 256, most tokens of match and continuation together.
    min_match_window_size, max_match_window_size: 1 <= min <= max < branch_length, lengths of suffix to match.
    min_bfs_breadth, max_bfs_breadth: 1 <= min <= max, continuations of a node.
    match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent).
    match_limit: 1 to 128, the matches that a tree is grown from on a GPU. A trie grows it from all.
    """

    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    match_limit: int = 64

    def __post_init__(self):
        def check(name: str, low: int, high: int, meaning: str = "") -> None:
            check_int(name, getattr(self, name), low, high, meaning)

        longest, above = self.branch_length, "from min_match_window_size, and below branch_length"
        check("branch_length", 2, 256)
        check("min_match_window_size", 1, longest - 1, "below branch_length")
        check("max_match_window_size", self.min_match_window_size, longest - 1, above)
        check("min_bfs_breadth", 1, MOST_BREADTH)
        check("max_bfs_breadth", self.min_bfs_breadth, MOST_BREADTH, "from min_bfs_breadth")
        check("match_limit", 1, MAX_MATCH_LIMIT)
        if not isinstance(self.match_type, str):
            raise TypeError(f'match_type must be the string "BFS" or "PROB", not {type(self.match_type).__name__}')
        if self.match_type not in ("BFS", "PROB"):
            raise ValueError(f'match_type must be "BFS" (recency) or "PROB" (frequency), not {self.match_type!r}')

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Branch length, windows, breadths, and 1 if the most frequent continuations are taken."""
        return (
            self.branch_length, self.min_match_window_size, self.max_match_window_size, self.min_bfs_breadth,
            self.max_bfs_breadth, int(self.match_type == "PROB"),
        )  # fmt: skip

    @classmethod
    def of(cls, numbers: list[int]) -> "MatchOptions":
        """The options with these `numbers`, after which comes the `match_limit`."""
        *sizes, by_frequency, limit = numbers
        return cls(*sizes, "PROB" if by_frequency else "BFS", limit)
