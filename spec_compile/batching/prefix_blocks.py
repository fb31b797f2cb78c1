"""`PrefixTree`: which pages of earlier texts are kept, and where."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..cache import PAGE
from .pages import Pages

Tier = Literal["device", "host"]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A kept page of a text, after the pages above it.

    key: its tokens; see `PrefixTree`.
    tokens: how many of its slots count: PAGE, or fewer in the end of a text.
    client: whose text brought it.
    page: its page of the pool; 0 for none.
    places: where the host has it; empty if it does not.
    states: the states after an end of a text [n, units] on the device, if they are there.
    """

    parent: "Node | None" = None
    key: bytes = b""
    tokens: int = 0
    client: str = ""
    page: int = 0
    places: Sequence[int] = ()
    states: Tensor | None = None
    children: dict[bytes, "Node"] = field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        return self.tokens < PAGE

    @property
    def is_near(self) -> bool:
        """True if something of it is on the device."""
        return self.page > 0 or self.states is not None


class PrefixTree:
    """Texts as chains of nodes, one for each page, in the pool or in host memory or in both.

    A kept page has one user more, however many nodes have it: an end of a text may be the beginning of the page with
    which another text goes on. Pages never change as far as their tokens count, so a node may stay in host memory
    while its page is in the pool, too.

    A text renews all of its nodes, the first one last. So a node is newer than those after it, and the oldest ones are
    given up first. With a node all that come after it are dropped.

    A key is the tokens of the page themselves, not a hash of them, so different texts never meet. Each scope (see
    `BatchSequence`) has a root, so texts of two scopes share no node.
    """

    def __init__(self, pages: Pages, host: int, end_places: int = 1):
        """host: places in host memory. end_places: places that the end of a text takes there; others take one."""
        self._pages, self._end_places = pages, end_places
        self.room = host
        self.evicted = 0
        """Places of nodes that were dropped because there was no room, since this was made."""
        self._near: OrderedDict[Node, None] = OrderedDict()
        self._far: OrderedDict[Node, None] = OrderedDict()
        """The nodes that are on the device, and in host memory, the oldest first."""
        self._nodes_of: dict[int, int] = {}
        """How many nodes have a page."""
        self.clear()

    def clear(self) -> None:
        """Drop all nodes; they do not count as evicted."""
        self._pages.release(self._nodes_of)
        for node in (*self._near, *self._far):
            node.page, node.places, node.states = 0, (), None
        self._roots: dict[bytes, Node] = {}
        self._near.clear()
        self._far.clear()
        self._nodes_of.clear()
        self._free = [*range(self.room)][::-1]

    @property
    def used(self) -> int:
        """Places of host memory that are in use."""
        return self.room - len(self._free)

    def near(self) -> list[Node]:
        """The nodes that are on the device, the oldest first."""
        return [*self._near]

    def is_spare(self, node: Node) -> bool:
        """True if the page of a node has no other users."""
        return node.page > 0 and self._pages.users(node.page) == 1

    def match(self, scope: bytes, keys: Iterable[bytes]) -> list[Node]:
        """The nodes with which a text of pages with these keys begins."""
        chain: list[Node] = []
        children = self.after(scope, chain)
        for key in keys:
            child = children.get(key)
            if child is None:
                break
            chain.append(child)
            children = child.children
        return chain

    def after(self, scope: bytes, chain: list[Node]) -> dict[bytes, Node]:
        """The nodes after a chain, by their keys."""
        if chain:
            return chain[-1].children
        return self._roots[scope].children if scope in self._roots else {}  # guard: adapter-kv

    def add(self, scope: bytes, chain: list[Node], key: bytes, tokens: int, client: str) -> Node:
        """A node after a chain, which is extended by it; a new one, which is nowhere yet, if there is none."""
        parent = chain[-1] if chain else self._roots.setdefault(scope, Node(tokens=PAGE))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, tokens, client)
        chain.append(node)
        return node

    def renew(self, chain: list[Node]) -> None:
        """The nodes of a text become the newest ones."""
        for node in reversed(chain):
            for nodes in (self._near, self._far):
                if node in nodes:
                    nodes.move_to_end(node)

    def drop(self, node: Node) -> int:
        """Drop a node and all after it; returns the places that they take."""
        places, pending = 0, [node]
        while pending:
            last = pending.pop()
            pending += last.children.values()
            places += self._size(last)
            last.children.clear()
            self.let_go(last)
            self._leave_host(last)
        parent = node.parent
        if parent is not None and parent.children.get(node.key) is node:
            del parent.children[node.key]
            if not parent.children and parent.parent is None:
                self._roots = {scope: root for scope, root in self._roots.items() if root is not parent}
        return places

    # --- the device

    def hold(self, node: Node, page: int, states: Tensor | None = None) -> None:
        """A node is in this page, which is in use, and has these states."""
        assert not node.page
        node.page, node.states = page, states
        self._near[node] = None
        if page:
            self._nodes_of[page] = self._nodes_of.get(page, 0) + 1
            if self._nodes_of[page] == 1:
                self._pages.share([page])

    def let_go(self, node: Node) -> None:
        """A node is no longer on the device."""
        page, node.page, node.states = node.page, 0, None
        self._near.pop(node, None)
        if page:
            self._nodes_of[page] -= 1
            if not self._nodes_of[page]:
                del self._nodes_of[page]
                self._pages.release([page])

    # --- host memory

    def enter_host(self, node: Node) -> bool:
        """A node that is on the device becomes the newest one in host memory, if there is room when the oldest ones
        leave. True if it is written there anew."""
        size = self._size(node)
        if node.places or size > self.room:
            self.renew([node])
            return False
        while len(self._free) < size:
            oldest = next(iter(self._far))
            if self._needs_host(oldest):
                self.evicted += self.drop(oldest)
            else:
                self._leave_host(oldest)
        if not node.is_near:  # it came after one that was dropped
            return False
        node.places = self._free[-size:][::-1]
        del self._free[-size:]
        self._far[node] = None
        return True

    def _leave_host(self, node: Node) -> None:
        self._free += node.places[::-1]
        node.places = ()
        self._far.pop(node, None)

    def _needs_host(self, node: Node) -> bool:
        """True if some of a node is in host memory only."""
        has_states = node.is_end and self._end_places > 1
        return (node.tokens > 0 and not node.page) or (has_states and node.states is None)

    def _size(self, node: Node) -> int:
        return self._end_places if node.is_end else 1
