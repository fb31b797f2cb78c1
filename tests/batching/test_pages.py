"""Pages of a pool: each has its users, and none is lost or given twice."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spec_compile.batching.pages import OutOfPages, Pages, pages_of
from spec_compile.cache import PAGE


class Pool(RuleBasedStateMachine):
    """Users take, share, keep and release pages as they like."""

    def __init__(self):
        super().__init__()
        self.pages = Pages(9)
        self.users: list[list[int]] = []
        self.kept, self.lost = {}, []
        self.pages.lose = self.lost.extend

    @rule(count=st.integers(0, 9))
    def take(self, count):
        free = self.pages.free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages of {PAGE} tokens are needed, and {free} of 8"):
                self.pages.take(count)
            assert self.pages.free == free
            return
        unused = [page for page in self.kept if not self.pages._users[page]]
        spare = self.pages.free - len(unused)
        taken = self.pages.take(count)
        assert self.lost == unused[: max(count - spare, 0)]  # the oldest, and no more than needed
        for page in self.lost:
            del self.kept[page]
        self.lost.clear()
        assert len(taken) == count and not {*taken} & {page for pages in self.users for page in pages}
        self.users.append(taken)

    @rule(data=st.data())
    def share(self, data):
        if self.users:
            shared = data.draw(st.sampled_from(self.users))
            self.pages.share(shared)
            self.users.append([*shared])

    @rule(data=st.data())
    def keep(self, data):
        if self.users:
            for page in data.draw(st.sampled_from(self.users)):
                self.pages.kept.setdefault(page, [page])

    @rule(data=st.data())
    def revive(self, data):
        if self.kept:
            page = data.draw(st.sampled_from([*self.kept]))
            self.pages.share([page])
            self.users.append([page])

    @rule(data=st.data())
    def drop(self, data):
        if self.pages.kept:
            page = data.draw(st.sampled_from(sorted(self.pages.kept)))
            self.pages.drop(page, page)
            self.kept.pop(page, None)

    @rule(data=st.data())
    def release(self, data):
        if self.users:
            pages = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
            self.pages.release(pages)
            for page in reversed(pages):  # its last page is given before its first
                if page in self.pages.kept and not self.pages._users[page]:
                    self.kept.pop(page, None)
                    self.kept[page] = None

    @invariant()
    def none_is_lost_or_given_twice(self):
        counts = Counter(page for pages in self.users for page in pages)
        assert self.pages.free == self.pages.usable - len(counts) and 0 not in counts
        assert self.pages._users == [counts[page] for page in range(9)]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_is_free_has_no_users():
    pages = Pages(3)
    assert pages.take(2) == [1, 2]
    pages.release([1])
    for wrong in (pages.share, pages.release):
        with pytest.raises(AssertionError, match="page 1 is free"):
            wrong([1])


@given(st.integers(0, 10 * PAGE))
def test_slots_fit_into_their_pages(slots):
    assert (pages_of(slots) - 1) * PAGE < slots <= pages_of(slots) * PAGE or slots == pages_of(slots) == 0
