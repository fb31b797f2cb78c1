"""The rows that decode: rounds over as many of them as are in use."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..outcome import Outcome
from ..runtime.pipeline import AHEAD, InFlightRound, RoundPipeline, check_gained
from ..runtime.runtime import Runtime
from ..runtime.session import Kind, MixedKind, Piece, Session, StepKind
from ..runtime.state import MOST_LATE
from ..runtime.verify.sample import DrawInRound, DrawRows, RowSettings, follow
from ..tree import Accepted, Tree, ancestry
from .output import look_ahead
from .pages import pages_of
from .prefill import COMMON_STEP, PrefillRows
from .rows import Rows
from .sequence import BatchSequence

RIDDEN_ROWS, RIDDEN_NODES, RIDDEN_SHARE = 16, 16, 4
"""Fewest rows of a round that takes prompts with it, and most rows whose drafter catches up when one of them leaves;
most nodes of that round's trees, which take one token in RIDDEN_SHARE of a common step, or two nodes."""


class DecodeRows(Rows):
    """Runs rounds over the sequences in its rows. On a GPU a round is launched while the one before it runs."""

    def __init__(self, runtime: Runtime, number: int, capacity: int, pages: int):
        """pages: their number in the pool that all rows of the batch share."""
        super().__init__(runtime, number, capacity, pages)
        self.rounds_by_nodes: Counter[int] = Counter()
        self.pipeline = RoundPipeline[BatchSequence](runtime)
        self._settings: RowSettings | None = None
        """All that any row so far was drawn with; rounds are captured for that, rather than anew for every mixture."""

    @property
    def late(self) -> int:
        """The most tokens of a row that the drafter has to process still."""
        return self.pipeline.late if self.runtime.algorithm.remembers else 0

    @property
    def is_on_host(self) -> bool:
        return any(sequence.is_on_host for sequence in self.active)

    @property
    def round_seconds(self) -> float | None:
        """Seconds that the shortest round takes over the rows in use; None if nobody has measured it."""
        session = self.session(max((sequence.row for sequence in self.active), default=0) + 1)
        return min(session.policies[StepKind.ROUND].costs.measured.values(), default=None)

    def merge(self, settings: RowSettings | None) -> None:
        """Rows are drawn like this, too."""
        self._settings = self._settings if settings is None else settings.merge(self._settings)

    def enter(self, sequence: BatchSequence) -> None:
        """A prompt that is done has been moved to row `sequence.row`."""
        self.merge(sequence.settings)
        self.state.finished[sequence.row].fill_(False)
        self._hindsight("forget", sequence.row)

    def leave(self, sequence: BatchSequence, is_over: bool = True) -> None:
        """A sequence gives up its row.

        is_over: False if it will go on in another row, so that its text is not drafted from until then.
        """
        row, sequences = sequence.row, self.active
        self.sequences[row] = None
        length, shares = (sequence.length, sequence.request.share_text) if is_over else (0, False)
        try:
            self.runtime.guard(self.all.drafter.leave, self.state, row, length, shares)
            # Others go on from what the drafter has, so it catches up, by 8 tokens of every row. Among many rows one
            # leaves in nearly every round; then the newest tokens are not kept.
            catches_up = len(sequences) <= RIDDEN_ROWS or bool(self.runtime.verify.recurrences)
            if catches_up and self.late:
                session = self.session(max(each.row for each in sequences) + 1)
                self.pipeline.catch_up(session, max(each.length for each in sequences))
        finally:
            self.vacate(row)
        self.runtime.records.keep()

    def known(self, sequence: BatchSequence) -> int:
        """The first slots of a row that the target and the draft have written, and will not write again."""
        return max(sequence.length - self.late - max(self.runtime.algorithm.ahead - 1, 0), 0)

    def lacking(self, rounds: int | None = None) -> list[tuple[BatchSequence, int]]:
        """The sequences that lack pages, and how many, for all that their rows may write until `rounds` more rounds are
        over; None: as many as may still be launched.

        The host knows a length of 100, a round over 16 nodes is in flight, and another one will be launched: its row
        may have 116 tokens by then, and writes 16 nodes after them, to the slots up to 131, on 3 pages of 64.
        """
        if rounds is None:
            rounds = max((AHEAD if self.runtime.on_gpu else 1) - len(self.pipeline), 0)
        lookahead = self.runtime.algorithm.plan.lookahead_slots
        after = 1 + self.pipeline.nodes + rounds * self.runtime.sizes[-1] + lookahead
        rows = ((sequence, pages_of(sequence.length + after) - len(sequence.pages)) for sequence in self.active)
        return [(sequence, count) for sequence, count in rows if count > 0]

    def shift(self, sequence: BatchSequence, to: int, target: Rows | None = None) -> None:
        self._hindsight("move", sequence.row, to)
        super().shift(sequence, to, target)

    def riding_session(self, rows: int) -> Session:
        """The session of rounds over the first `rows` rows, or few more at no cost, that take prompts with them."""
        return self.session(max(rows, min(RIDDEN_ROWS, len(self.sequences))))

    def riding_nodes(self, session: Session) -> int:
        """Nodes of the trees of a round that drafts and takes prompts with it; 1: none drafts.

        There is one such size, because a step is captured for each: 8 nodes with 16 rows, and 2 with 64 to 256.
        """
        if self.runtime.algorithm.plan.draws:  # the tokens depend on which drafts are verified
            return self.runtime.algorithm.plan.nodes
        share = COMMON_STEP // session.batch  # tokens of a row; two nodes of many rows pay where texts are long
        most = min(RIDDEN_NODES, max(share // RIDDEN_SHARE, min(2, share)))
        return max((size for size in session.policies[StepKind.ROUND].sizes if size <= most), default=1)

    def launch(self, prompts: PrefillRows) -> bool:
        """Begin a round, if one more may be in flight, and rows have pages for it; returns whether one was begun.
        Pieces of the prompts ride along if a step for them is captured."""
        # Its rows need pages for all that it may write.
        sequences, on_host = self.active, self.is_on_host
        if not sequences or not self.pipeline.may_launch(sequences, on_host):
            return False
        if self.lacking(1):  # guard: pages-of-rounds
            return False

        # Its tokens, and the prompts that it takes with it.
        rows, pieces, acceptor = sequences[-1].row + 1, self.pieces(prompts), self._acceptor
        session = self.riding_session(rows) if pieces else self.session(rows)
        kind = StepKind.LOOK if on_host or acceptor else StepKind.ROUND

        def begin(nodes: int, max_kv_len: int) -> Callable[[], list[list[int]]]:
            accept = partial(self._accept_rows, session, sequences) if on_host else acceptor
            if not pieces:
                return session.launch(accept, nodes, max_kv_len)
            piece = pieces[nodes]
            slots, shares = max(max_kv_len, prompts.max_kv_len(session, piece.size)), prompts.ride(piece)
            read = session.launch(accept, nodes, slots, piece=piece)
            prompts.advance(shares)
            return read

        longest = max(sequence.length for sequence in sequences)
        self.pipeline.launch(session, kind, sequences, longest, begin, max(pieces, default=None))
        return True

    def pieces(self, prompts: PrefillRows) -> dict[int, Piece]:
        """By the nodes that the next round may have, the piece of the prompts that rides along; empty if none does."""
        sequences = self.active
        if not (sequences and prompts.rides) or self.is_on_host:
            return {}
        # While many prompts wait, no row drafts, unless its tokens depend on that.
        session, kind = self.riding_session(sequences[-1].row + 1), self._acceptor or StepKind.ROUND
        nodes = {1} if prompts.is_behind and not self.runtime.algorithm.plan.draws else {1, self.riding_nodes(session)}
        pieces = {size: piece for size in nodes if (piece := prompts.piece(session, kind, size)) is not None}
        if len(pieces) == len(nodes):
            return pieces
        return {1: pieces[1]} if 1 in pieces and not self.runtime.algorithm.plan.draws else {}

    def steps(self, width: int, prompts: PrefillRows) -> list[tuple[Kind, int]]:
        """The steps of greedy rounds over the first `width` rows, and of drawn ones if rows are drawn, to be made
        ahead: by themselves and with pieces of prompts."""
        # Rounds without prompts.
        session, drawn = self.session(width), self._settings
        kinds: list[StepKind | DrawInRound] = [StepKind.ROUND, *([] if drawn is None else [DrawRows(drawn)])]
        sizes = session.policies[StepKind.ROUND].sizes
        steps: list[tuple[Kind, int]] = [(kind, nodes) for kind in kinds for nodes in sizes]
        # Rounds that take prompts with them: parts for one row take no further rows.
        if prompts.step_sizes and width > 1 and self.riding_session(width) is session:
            steps += [
                (MixedKind(kind, piece), nodes)
                for kind in kinds
                for nodes in sorted({1, self.riding_nodes(session)})
                for piece in prompts.pieces(width, nodes)
            ]
        return [*steps, *(session.proposal_steps(MOST_LATE) if self.pipeline.tree_size else [])]

    @property
    def _acceptor(self) -> DrawRows | None:
        """Draws in the next round; None if all rows take the likeliest tokens."""
        if self._settings is None or not any(sequence.settings for sequence in self.active):
            return None
        return DrawRows(self._settings)

    def collect(self) -> list[BatchSequence]:
        """Wait for the round that was launched first; returns the sequences that gained tokens in it."""
        in_flight, outcomes = self.pipeline.collect()
        self.rounds_by_nodes[in_flight.nodes] += 1
        for sequence, outcome in outcomes:
            self._take(sequence, outcome, in_flight)
        self.pipeline.learn(in_flight, outcomes)
        if self.runtime.options.ranks.size > 1:
            self._end_alike([sequence for sequence, _ in outcomes])
        return [sequence for sequence, outcome in outcomes if outcome.gained or sequence.is_over]

    def _end_alike(self, sequences: list[BatchSequence]) -> None:
        """Give sequences the tokens and the end that they have on the first rank."""
        ranks = self.runtime.options.ranks
        verdicts = iter(ranks.lead(lambda: [n for each in sequences for n in (len(each.tokens), each.is_over)]))
        for sequence, length, is_over in zip(sequences, verdicts, verdicts):
            if not ranks.leads:
                del sequence.tokens[length:]
                if is_over:
                    sequence.finish("stop")

    def _take(self, sequence: BatchSequence, outcome: Outcome, in_flight: InFlightRound) -> None:
        """Give a sequence what a round has gained for its row."""
        drafted = min(in_flight.drafted or sequence.count or in_flight.nodes, in_flight.nodes, sequence.most_nodes) - 1
        sequence.speculation.count(drafted, max(len(outcome.path) - 1, 0), len(outcome.gained))
        try:
            if sequence.failure is not None:
                raise sequence.failure
            check_gained(outcome, self.runtime.verify.embedded)
            sequence.gain(outcome.gained)
            sequence.is_whole = outcome.finished and sum(sequence.speculation.per_step_tokens) == len(sequence.tokens)
        except Exception as error:  # its own criterion failed; the others go on
            sequence.fail(error)

    def _accept_rows(self, session: Session, sequences: list[BatchSequence], tree: Tree, logits: Tensor) -> Accepted:
        """Accept the likeliest tokens, or in rows with an acceptor or settings the tokens that these choose."""
        device, state = logits.device, session.state
        # All rows at once, then those whose acceptors choose.
        ancestors, depth = ancestry(tree.parents)
        if acceptor := self._acceptor:
            accepted = acceptor(state, tree, ancestors, depth, logits)
        else:
            accepted = follow(tree, ancestors, depth, state.likeliest(logits, depth))
        ranks = self.runtime.options.ranks
        if ranks.leads:
            self._ask_acceptors(sequences, tree, logits, accepted)
        if ranks.size > 1:  # the others take over what the first one has chosen
            failed = [sequence.row for sequence in sequences if ranks.leads and sequence.failure is not None]
            parts = accepted.path, accepted.tokens, accepted.count
            numbers = ranks.lead(
                lambda: [len(failed), *failed, *torch.cat([each.flatten() for each in parts]).tolist()]
            )
            for row in numbers[1 : 1 + numbers[0]]:
                state.finished[row].fill_(True)
            chosen = torch.tensor(numbers[1 + numbers[0] :], device=device).split([each.numel() for each in parts])
            for part, values in zip(parts, chosen):
                part.copy_(values.view(part.shape))
        look_ahead(sequences, logits, accepted)
        return accepted

    def _ask_acceptors(self, sequences: list[BatchSequence], tree: Tree, logits: Tensor, accepted: Accepted) -> None:
        """Replace what was accepted of the rows that have an acceptor."""
        for sequence in sequences:
            if sequence.acceptor is None:
                continue
            row = sequence.row
            probs = None if tree.probs is None else tree.probs[row : row + 1]
            tokens, parents, real = (part[row : row + 1] for part in (tree.tokens, tree.parents, tree.real))
            try:
                result = sequence.acceptor(Tree(tokens, parents, real, probs), logits[row : row + 1])
                tokens, vocab = result.tokens, logits.shape[-1]
                if not bool(((tokens >= 0) & (tokens < vocab)).all()):  # guard: chosen-tokens
                    raise ValueError(
                        f"logits_processor: its scores choose a token outside the vocabulary of {vocab} tokens"
                    )
            except Exception as error:  # its own logits processor or criterion failed; the others go on
                sequence.failure = error
                self.state.finished[row].fill_(True)
                continue
            for part in ("path", "tokens", "count"):
                getattr(accepted, part)[row : row + 1] = getattr(result, part).to(logits.device)

    def _hindsight(self, what: str, *rows: int) -> None:
        hindsight = self.all.policies[StepKind.ROUND].hindsight
        if hindsight is not None:
            getattr(hindsight, what)(*rows)
