"""`Pages`: which pages of the pool are free, and how many rows use each of the others."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..cache import PAGE


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class Pages:
    """The pages of a pool. A page is free while no row uses it, and then it may still be kept for later prompts.

    Page 0 is scratch and never given. With 4 pages, take(2) gives [1, 2]; after share([1]) and release([1, 2]) page 2
    is free, and page 1 has one user. Free pages that are not kept are given first, the one that was given back last
    before others, because a CPU has its memory already. Then kept ones are given, the one that was used the longest
    time ago first: as the pages of a text are given back together, its last page before its first.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = OrderedDict.fromkeys(range(1, count))
        """The free pages in the order in which they are given."""
        self._users = [0] * count
        self.kept: set[int] = set()
        """Pages whose contents serve later prompts."""
        self.keeps = True
        """True if they are kept once no row uses them."""
        self.lose: Callable[[Sequence[int]], None] = lambda pages: None
        """Called with kept pages that are not kept any more."""

    @property
    def free(self) -> int:
        """The number of pages that no row uses."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """The number of pages that can be given."""
        return self.count - 1

    @property
    def spare(self) -> int:
        """The number of free pages that are kept."""
        return len(self.kept & self._free.keys())

    def take(self, count: int) -> list[int]:
        """Pages for one user. OutOfPages if fewer are free; none is taken then."""
        if count > self.free:
            raise OutOfPages(f"{count} pages of {PAGE} tokens are needed, and {self.free} of {self.usable} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        self._lose(taken)
        return taken

    def _lose(self, pages: Sequence[int]) -> None:
        if lost := [page for page in pages if page in self.kept]:
            self.kept.difference_update(lost)
            self.lose(lost)

    def share(self, pages: Iterable[int]) -> None:
        """Each of these pages, which are in use or kept, has one more user."""
        for page in pages:
            assert self._users[page] or page in self.kept, f"page {page} is free"
            self._users[page] += 1
            self._free.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Each of these pages, which are the pages of a text in order, has one user less."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] -= 1
            if not self._users[page]:
                if not self.keeps:
                    self._lose([page])
                self._free[page] = None
                self._free.move_to_end(page, last=page in self.kept)

    def drop(self, page: int) -> None:
        """A page is not kept any more."""
        self.kept.discard(page)
        if page in self._free:
            self._free.move_to_end(page, last=False)


def pages_of(slots: int) -> int:
    """Pages that hold `slots` slots: 65 slots take two of 64."""
    return -(-slots // PAGE)
