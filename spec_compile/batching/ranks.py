"""Batches on several ranks: what the first one lets in and out, on its way to the others.

Only the first rank has requests. Before each round it says which of them enter and leave; the others have a
`FollowerSequence` of each, and run the same rounds on their own parts of the model. After each round the first rank
says which requests have ended.
"""

import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..parallel.messages import pack, unpack
from ..parallel.ranks import Alone
from ..runtime.request import Request
from ..runtime.verify.sample import RowSettings
from .sequence import BatchSequence

MOST_NUMBERS = 1 << 16
"""Most numbers of a message to the other ranks."""


@dataclass
class FollowerRequest:
    """A sequence that enters, as far as the other ranks need it.

    eos, share_text, references: see `Request`. numbers, settings, needs_scores, pages: see `BatchSequence`.
    tokens: its answer so far, if its row was taken before.
    is_on_host: True if the first rank reads the target's logits on the host.
    known: its first tokens whose keys and values are in its pages.
    partial: the page whose copy is the page with the last of these, or None.
    """

    request_id: str
    prompt: list[int]
    tokens: list[int]
    eos: list[int]
    numbers: dict[str, int | float]
    settings: RowSettings | None
    is_on_host: bool
    share_text: bool | str
    references: list[list[int]]
    needs_scores: bool
    pages: list[int]
    known: int
    partial: int | None

    @classmethod
    def of(cls, sequence: BatchSequence, known: int, partial: int | None) -> "FollowerRequest":
        request = sequence.request
        return cls(
            sequence.request_id, sequence.prompt, sequence.tokens, request.eos, sequence.numbers(), sequence.settings,
            sequence.is_on_host, request.share_text, [each.tolist() for each in request.references],
            sequence.needs_scores, sequence.pages, known, partial,
        )  # fmt: skip


class FollowerSequence(BatchSequence):
    """A sequence of the first rank, on another one: it takes tokens, and ends when the first rank says so."""

    def __init__(self, told: FollowerRequest):
        numbers = told.numbers
        request = Request(
            int(numbers["max_lengths"]), int(numbers["min_lengths"]), told.eos, seed=int(numbers["seed"]),
            temperature=numbers["temperature"], share_text=told.share_text, most_nodes=int(numbers["most_nodes"]),
            references=[torch.tensor(ids, dtype=torch.int64) for ids in told.references],
        )  # fmt: skip
        super().__init__(
            request, told.prompt, shortest=request.shortest, longest=request.longest, most_nodes=request.most_nodes,
            request_id=told.request_id, sequence_index=int(numbers["numbers"]), settings=told.settings,
            tokens=[*told.tokens], pages=[*told.pages],
        )  # fmt: skip
        self._needs_scores, self._is_on_host = told.needs_scores, told.is_on_host

    @property
    def needs_scores(self) -> bool:
        return self._needs_scores

    @property
    def is_on_host(self) -> bool:
        return self._is_on_host

    def gain(self, tokens: list[int]) -> None:
        """Take tokens of a round, of which the first rank may keep fewer."""
        self.tokens.extend(tokens)


@dataclass
class RoundChange:
    """The first rank's changes before a round, in this order.

    preempted: requests whose rows are taken until they enter again.
    grown: the new pages at the ends of rows that decode, by request.
    left: requests that are cancelled, or have failed.
    entered: requests that begin or come back.
    """

    preempted: list[str] = field(default_factory=list)
    grown: dict[str, list[int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    entered: list[FollowerRequest] = field(default_factory=list)


def share(ranks: Alone, value: Any, kind: Any) -> Any:
    """The value that the first rank has, on all ranks; the others' does not count. kind: its type, see `from_json`."""
    if ranks.size == 1:
        return value
    numbers = pack(value) if ranks.leads else []
    (count,) = ranks.lead(lambda: [len(numbers)])
    received = list[int]()
    for begin in range(0, count, MOST_NUMBERS):
        received += ranks.lead(partial(operator.getitem, numbers, slice(begin, begin + MOST_NUMBERS)))
    return unpack(received, kind, "what rank 0 shares")
