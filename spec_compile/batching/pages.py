"""`Pages`: which pages of the pool are free, and how many texts use each of the others."""

from collections.abc import Iterable

from ..cache import PAGE


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class Pages:
    """The pages of a pool. A page has as many users as rows and kept prefixes hold it, and is free without any.

    Page 0 is scratch and never given. With 4 pages, take(2) gives [1, 2]; after share([1]) and release([1, 2]) page 2
    is free, and page 1 has one user. Pages that were given back last are given first, because a CPU has their memory
    already.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = [*range(count - 1, 0, -1)]
        self._users = [0] * count

    @property
    def free(self) -> int:
        """The number of pages that nobody uses."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """The number of pages that can be given."""
        return self.count - 1

    def users(self, page: int) -> int:
        """The number of users of a page."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Pages for one user. OutOfPages if fewer are free; none is taken then."""
        if count > self.free:
            raise OutOfPages(f"{count} pages of {PAGE} tokens are needed, and {self.free} of {self.usable} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Each of these pages, which are in use, has one more user."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Each of these pages has one user less."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


def pages_of(slots: int) -> int:
    """Pages that hold `slots` slots: 65 slots take two of 64."""
    return -(-slots // PAGE)
