"""`Beginnings`: the keys and values that a new prompt can start from, in a row or among the kept prefixes."""

from functools import partial
from typing import NamedTuple

import numpy as np

from ..capture.weight_values import WeightValues
from ..runtime.prefill_chunks import SIZES, common_end
from ..runtime.prefix_budget import PrefixBudget
from ..runtime.runtime import Runtime
from .decoding import Decoder
from .job import Job
from .lanes import Lanes
from .prefix_store import TOKENS, PrefixStore
from .prompts import CopySlots
from .texts import whole

LEAST_BRANCH = 256
"""Tokens that states at a branch save later prompts at least. One chunk more, which this prompt pays, costs less."""


class Beginning(NamedTuple):
    """The part of a prompt that need not be processed.

    row: the row that has its keys and values, or 0. known: its tokens. copy: copies it. branch: the tokens of a longer
    part that earlier texts share, if states are to be kept there; 0 if not.
    """

    row: int
    known: int
    copy: CopySlots
    branch: int


class Beginnings:
    """Finds what earlier requests have computed of a prompt, as long as the weights are those of that time."""

    def __init__(self, runtime: Runtime, decoder: Decoder, weights: WeightValues):
        """decoder: has the rows. weights: tell whether keys and values of earlier requests still hold."""
        self._decoder, self._weights = decoder, weights
        self.distrusts_weights = False
        """True if somebody may have changed weights in a way that torch does not count, because no round ran."""
        ahead, self._has_states = runtime.algorithm.ahead, bool(runtime.verify.recurrences)
        self._ahead = min(ahead, 1) if self._has_states else ahead  # states are those of all tokens but the last
        self.prefixes = PrefixStore(decoder.lanes, PrefixBudget.of(runtime), self._ahead)
        self._runtime = runtime

    def _cut(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text serve others: with fixed chunks, those of whole chunks."""
        runtime = self._runtime
        return common_end(tokens, SIZES[runtime.device.type]) if runtime.has_fixed_chunks else tokens

    def forget(self) -> None:
        """The weights have changed: keys and values of earlier requests are of no use."""
        self._decoder.texts.forget()
        self.prefixes.forget()  # guard: prefixes-of-weights

    def keep(self, row: int) -> None:
        """Keep the text that a request has left in a row, for prompts that come when the row has another one."""
        texts = self._decoder.texts
        if not self._has_states or texts.has_ended(row):  # or the states are of more tokens
            slots = self._cut(texts.length(row) - 1)
            self.prefixes.keep(self._decoder.lanes, row, texts.tokens(row), slots, texts.scope(row))

    def keep_prompt(self, job: Job, lanes: Lanes, row: int, slots: int) -> None:
        """Keep the first `slots` tokens of a prompt in a row of these lanes, if the row has states, because these are
        about to go on with the answer, or with the rest of the prompt."""
        if self._has_states and not self._runtime.has_fixed_chunks and job.weights == self._decoder.texts.weights:
            self.prefixes.keep(lanes, row, np.asarray(job.prompt, dtype=TOKENS), slots, job.scope)

    def find(self, job: Job) -> Beginning:
        """The longest beginning of a prompt that has keys and values."""
        texts, scope = self._decoder.texts, job.scope
        # The last token is the root of the first tree, but a drafter's slot may depend on it.
        tokens = job.prompt[: len(job.prompt) - 1 + self._ahead]
        row, known = (0, 0) if job.needs_all_tokens else texts.longest_prefix(tokens, scope, self._ahead, job.client)
        blocks, seen = ([], 0) if job.needs_all_tokens else self.prefixes.match(job.prompt, scope)
        is_sure = self.distrusts_weights and (known > 0 or bool(blocks))
        if self._weights.have_changed(is_sure):
            self.forget()
            row, known, blocks, seen = 0, 0, [], 0
        self.distrusts_weights &= not is_sure
        # Recurrences have states after all tokens but the last, from which nothing steps back.
        most = max(len(job.prompt) - (1 if self._has_states else self._runtime.algorithm.plan.fresh_tokens), 0)
        known = self._cut(min(known, most))
        copy = self.copy_row(row, known)
        if (kept := self._cut(min(self.prefixes.length(blocks), most))) > known:
            row, known, copy = 0, kept, partial(self.prefixes.copy, blocks)
        has_branch = self._has_states and known + LEAST_BRANCH <= seen < len(job.prompt) - 1
        return Beginning(row, known, copy, seen if has_branch else 0)

    def copy_row(self, row: int, known: int) -> CopySlots:
        """A function that copies the first slots of a row that decodes, or has decoded, to a row of other lanes."""

        def copy(lanes: Lanes, to: int) -> None:
            if self._decoder.jobs[row] is not None:
                self._decoder.catch_up()
            self._decoder.lanes.copy_slots(row, to, known, lanes)
            self.prefixes.hits["row"] += whole(known)

        return copy
