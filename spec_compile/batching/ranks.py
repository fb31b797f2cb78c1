"""Batches on several ranks: what the first one lets in and out, on its way to the others.

Only the first rank has requests. Before each round it says which of them enter and leave; the others have a `Shadow`
of each, and run the same rounds on their own parts of the model. After each round the first rank says which
requests have ended.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.messages import pack, unpack
from ..parallel.ranks import Alone
from ..runtime.accept.draw import RowSettings
from .job import Job

MOST_NUMBERS = 1 << 16
"""Most numbers of a message to the other ranks."""


@dataclass
class Admission:
    """A request that enters, as far as the other ranks need it.

    eos, numbers, longest, references, scores_prompt: see `Job`. has_acceptor: True if the first rank reads the target's
    logits on the host.
    row, known: the row of which the first `known` slots are copied, because its text begins alike.
    """

    request_id: str
    prompt: list[int]
    eos: list[int]
    numbers: dict[str, int | float]
    longest: int
    settings: RowSettings | None
    has_acceptor: bool
    share_text: bool | str
    references: list[list[int]]
    row: int
    known: int
    scores_prompt: bool

    @classmethod
    def of(cls, job: Job, row: int, known: int) -> "Admission":
        """The admission of `job`."""
        return cls(
            job.request_id, job.prompt, job.eos, job.numbers(), job.prepared.ask.longest, job.settings,
            job.is_on_host, job.share_text, [each.tolist() for each in job.references], row, known, job.scores_prompt,
        )  # fmt: skip


class Shadow(Job):
    """A request of the first rank, on another one: it takes tokens, and ends when the first rank says so."""

    def __init__(self, admission: Admission):
        super().__init__(
            admission.request_id, admission.prompt, None, 0, share_text=admission.share_text,
            most_nodes=int(admission.numbers["most_nodes"]),
            references=[torch.tensor(ids, dtype=torch.int64) for ids in admission.references],
        )  # fmt: skip
        self.admission, self.eos, self.settings = admission, admission.eos, admission.settings
        self.acceptor = admission.has_acceptor or None

    @property
    def room(self) -> int:
        """See `Job`."""
        return self.admission.longest - self.length - 1

    @property
    def scores_prompt(self) -> bool:
        """See `Job`."""
        return self.admission.scores_prompt

    def numbers(self) -> dict[str, int | float]:
        """See `Job`."""
        return self.admission.numbers

    def gain(self, tokens: list[int]) -> bool:
        """Take tokens of a round, of which the first rank may keep fewer."""
        self.tokens.extend(tokens)
        return False


@dataclass
class RoundChange:
    """The first rank's changes before a round. left: requests that are cancelled. entered: those that begin."""

    left: list[str]
    entered: list[Admission]


def share(ranks: Alone, value: Any, kind: Any) -> Any:
    """The value that the first rank has, on all ranks; the others' does not count. kind: its type, see `from_json`."""
    if ranks.size == 1:
        return value
    numbers = pack(value) if ranks.leads else []
    (count,) = ranks.lead(lambda: [len(numbers)])
    received = []
    for begin in range(0, count, MOST_NUMBERS):
        received += ranks.lead(lambda begin=begin: numbers[begin : begin + MOST_NUMBERS])
    return unpack(received, kind, "what rank 0 shares")
