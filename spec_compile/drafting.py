"""The contract between the runtime and those who propose trees: an `Algorithm` for a model makes a `Drafter` for a
batch size, and its `DraftPlan` says what rounds must be built for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from .cache import PAGE, Cache
from .graph import ModelGraph
from .tree import Accepted, Tree

if TYPE_CHECKING:
    from .compile.part import PartCompiler
    from .ngram import NgramStore
    from .runtime.state import State


@dataclass(frozen=True)
class DraftPlan:
    """The demands of an algorithm on rounds, computed from the options and the draft.

    nodes: most nodes of a tree, the root included.
    taps: hidden states of the target for `Drafter.prefill` and `Drafter.observe`, numbered as in `passes.Settings`.
    lookahead_slots: cache slots beyond the verified nodes that a drafter writes.
    draws: True if tokens are drawn at random, and ``state.propose`` gets the distributions that they were drawn from.
    sizes: nodes that a round verifies: "fixed" (always `nodes`, as many as every tree has), "tree" (as many as the
        trees have) or "adaptive" (fewer if that has paid).
    levels: the levels of a tree, if each takes a forward of the draft; 1: all drafts come from one forward.
    paged: True if rows have several pages of the cache in every session.
    """

    nodes: int
    taps: tuple[int, ...] = ()
    lookahead_slots: int = 0
    draws: bool = False
    sizes: Literal["fixed", "tree", "adaptive"] = "fixed"
    levels: int = 1
    paged: bool = False

    @property
    def is_whole(self) -> bool:
        """True if a round verifies all of a tree, or only the root. If drafts are drawn, the tokens depend on which of
        them are verified, so that their cost must not decide it."""
        return self.sizes == "fixed" and not self.draws

    @property
    def fresh_tokens(self) -> int:
        """Tokens at the end of a prompt that are processed whatever is known of it: the root, and before it the token
        whose states of the target the first drafts continue, because no row keeps them."""
        return 2 if self.taps else 1

    def next_nodes(self, nodes: int) -> int:
        """Nodes of the trees that a round over `nodes` nodes proposes: as many again if that takes fewer forwards of
        the draft (n nodes are n - 1 levels deep at most), else all. With 5 levels, a round over 4 nodes proposes trees
        of 4 nodes, and a round over 6 nodes whole trees."""
        return nodes if self.is_whole and nodes - 1 < self.levels else self.nodes


class Drafter(nn.Module):
    """Proposes the trees of one batch. Each generate() calls `start`, `prefill` for each chunk of the prompts, then
    `propose` and, after each verification, `observe` and `propose`; and `finish`. Only `propose` has no default.

    The methods marked [graph] run inside the compiled round. Small tensors that they change are buffers registered on
    the drafter itself, which are put back after a round of warm-up; keys and values are in a `cache.Cache`.
    max_kv_len: slots of a cache to look at on a CPU, which hold everything when the round ends.

    The other defaults are for a drafter whose `propose` is a few operators and changes nothing but its own buffers, and
    which keeps all that it knows of a row in its caches and in buffers [B, ...].
    """

    fuses: bool = True
    """True if `propose` is compiled in one part with what comes before it in the round; else `compile` does it."""

    seconds: float = 0.0
    """Time spent proposing on the host since the drafter was made (0 if it is part of the graph)."""

    def start(
        self, state: "State", prompts: list[list[int]], references: list[Tensor], share_text: bool = True
    ) -> None:
        """A call of generate() begins.

        prompts: token ids, one list a row.
        references: [n] int64 each; texts that the output may copy from.
        share_text: True if later calls may draft from the texts of this one.
        """

    def prefill(self, state: "State", ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        """[graph] The target has processed a chunk of the prompts, or earlier plain rounds of a drafter of whole trees
        (`DraftPlan.is_whole`), which it observes late. Each slice that rides along with a round is a row, and
        `state` has only tokens, lengths, prompt_lengths and capacity then.

        ids, positions: [B, T] int64; at slots ``state.lengths`` onwards. features: for each tap their states [B, T, C].
        """

    def observe(
        self, state: "State", features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int
    ) -> None:
        """[graph] The target has verified trees, and what was accepted is committed.

        features: for each tap the hidden states [B, N, C] of the verified nodes.
        begin: [B] int64; ``state.lengths`` before the commit.
        """

    def see(self, state: "State", tree: Tree, logits: Tensor) -> None:
        """[graph] The target's logits [B, N, V] after every node of the trees, before any is accepted."""

    def propose(self, state: "State", max_kv_len: int, nodes: int | None = None) -> None:
        """[graph] Call ``state.propose`` with the trees to verify next: siblings distinct, parents first.

        nodes: only their first nodes are wanted (None: all); never given to a drafter of one level
            (`DraftPlan.levels`).
        """
        raise NotImplementedError

    def finish(self, lengths: list[int]) -> None:
        """End a call of generate(), also after an error. lengths: tokens of each row less one; [] before any round."""

    # How rounds are compiled and warmed up.

    def compile(self, compiler: "PartCompiler") -> None:
        """Compile the parts of `propose` by `compiler`. Called for each kind of round, and after caches have grown."""

    def mute(self) -> None:
        """Warm-up begins: until the buffers are put back, rounds must leave no trace outside them."""

    def small_buffers(self) -> list[Tensor]:
        """The buffers that are put back after warm-up: those on the drafter, and on the drafters that it is made of."""
        return list(self.buffers(recurse=False))

    # Rows that requests enter and leave while the others go on.

    def row_buffers(self) -> list[Tensor]:
        """The `small_buffers` that have an entry for each row [B, ...], which moves with the row."""
        return self.small_buffers()

    def share(self, other: "Drafter") -> None:
        """Use the first rows of `other`, a drafter of the same algorithm for more rows, and give up its rows.
        From then on `enter` and `leave` of `other` are about this one's rows, too."""
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, getattr(other, name)[: len(buffer)])
        for cache, larger in zip(caches(self), caches(other)):
            cache.share(larger)

    def resize(self, slots: int) -> None:
        """Make room for `slots` tokens a row in all buffers that are no caches; what they hold stays."""

    def enter(self, row: int, share_text: bool | str, references: list[Tensor]) -> None:
        """A text begins in one row, while the others go on.

        share_text: see `Drafter.start`; or the name of the text's owner: then the row drafts only from texts of rows
            with the same name, and only these draft from its text. Rows with the name "" draft from no other text.
        references: [n] int64 each, on the CPU; texts that only this row may draft from, until it is left. With one -1
            after each but the last they fit into the slots of a row.
        """
        for buffer in self.row_buffers():
            buffer[row].zero_()

    def vacate(self, row: int) -> None:
        """The text of a row goes on in another row, or in another drafter of the same algorithm, with all that was
        known of it."""

    def leave(self, state: "State", row: int, length: int, share_text: bool | str) -> None:
        """The text of one row is over. length: tokens of the row less one. share_text: as when it entered, or False if
        the text shall leave with the row."""


def caches(owner: nn.Module) -> list[Cache]:
    """The caches of a drafter or of a state."""
    return [module for module in owner.modules() if isinstance(module, Cache)]


def use_pages(slots: int, pool: Iterable[list[Tensor] | int], *owners: "State | Drafter") -> None:
    """Let each row have up to `slots` slots in pages, all of which are scratch until `State.set_pages`.

    pool: for each cache of the owners, whose rows are as many, the tensors of another's pool, or the number of pages.
    """
    paged = [cache for owner in owners for cache in caches(owner)]
    table = paged[0].table.new_zeros(len(paged[0].table), slots // PAGE)
    for cache, pages in zip(paged, pool):
        cache.use_pages(pages, table)
    for owner in owners:
        owner.resize(slots)


class Algorithm:
    """A way of drafting for one model. It makes drafters of any batch size. Each sets `plan`."""

    plan: DraftPlan

    graph: ModelGraph | None = None
    """The graph of a draft that runs in rounds, as a rule with its own cache."""

    draft_module: nn.Module | None = None
    """The user's draft module, whose weights ``speculation.refresh()`` takes over."""

    store: "NgramStore | None" = None
    """The n-grams that it drafts from, if any."""

    stored: int = 0
    """The size of its store, which must be the same on all ranks for the same drafts."""

    vocabulary_share: float | None = None
    """The share of the target's tokens that are in the draft's vocabulary, too; None if both have one tokenizer."""

    @property
    def ahead(self) -> int:
        """Tokens after a slot's own that its keys and values may depend on: 1 for a head, 0 if there are none."""
        return int(self.graph is not None)

    @property
    def remembers(self) -> bool:
        """True if its drafters hold keys and values of the text. Then a prompt that the target has cached must still be
        processed again if the drafters' are of another text."""
        return self.ahead > 0

    @property
    def token_bytes(self) -> int:
        """Bytes that its own cache takes for each token of a sequence."""
        return 0 if self.graph is None else self.graph.token_bytes

    def take(self, target: ModelGraph) -> None:
        """Get the target's rewritten graph of rounds, before any drafter is made."""

    def refresh(self) -> None:
        """Compute copies of weights anew, because the weights have changed in place."""

    def drafter(self, batch: int, slots: int) -> Drafter:
        """The drafter for `batch` sequences of up to `slots` tokens."""
        raise NotImplementedError

    def documents(self, reference) -> list[Tensor]:
        """The texts in generate()'s `reference`, checked."""
        raise ValueError("reference: only n-grams copy from a reference; pass ngram=True, or leave it out")

    def explain(self) -> list[str]:
        """Lines about it for ``speculation.explain()``."""
        return []
