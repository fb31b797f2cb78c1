"""`BatchSequence`: a sequence of a request, from its admission to its last output, and what other ranks are told."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.continuous_batching.requests import RequestStatus

from ..errors import RequestError
from ..runtime.request import Request, Sequence, from_now
from ..runtime.verify import Route, make_acceptor
from ..runtime.verify.host import HostAcceptor
from ..runtime.verify.sample import RowSettings
from .output import Output, RequestSpeculation, Scores


@dataclass(eq=False, repr=False)
class BatchSequence(Sequence):
    """A sequence that waits for a row, has it for a while, and delivers outputs.

    request_id: its name.
    sequence_index: position in the request; selects the random stream (see `random_numbers.uniform`).
    scores: the log-probabilities that it asks for.
    passed: later sequences with an adapter that were let in while it waited for a slot for its own.
    is_whole: True if its row has ended by itself, with the tokens of the answer and no others.
    weights: counts the changes of weights before its prompt was begun, see `PrefixCache`.
    turn: orders sequences by when they were let in for the first time; 0 before.
    pages: the pages of its row, in order.
    done, stop: while it is a prompt, the first slots that are written, and after which slot processing stops next: its
    length, or before it the branch point.
    kept: the first slots of its row that are kept for later prompts already.
    settings: how tokens are drawn in the round; None if the likeliest is taken or the host chooses.
    failure: the error of its acceptor in a round that is still under way.
    acceptor: accepts its tokens on the host; None if the round does.
    """

    request_id: str = ""
    sequence_index: int = 0
    scores: Scores | None = None
    passed: int = 0
    status: RequestStatus = RequestStatus.PENDING
    timestamps: list[float] = field(default_factory=list)
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    first_token_time: float | None = None
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    error: str | None = None
    error_status: int | None = None
    error_field: str | None = None
    finish_reason: str | None = None
    is_cancelled: bool = False
    is_whole: bool = False
    weights: int = -1
    turn: int = 0
    pages: list[int] = field(default_factory=list)
    done: int = 0
    stop: int = 0
    kept: int = 0
    settings: RowSettings | None = None
    failure: Exception | None = None
    acceptor: HostAcceptor | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.shortest, self.longest, self.most_nodes = request.shortest, request.longest, request.most_nodes

    def admit(self, turn: int) -> None:
        """Make what is needed once it has a row for the first time. Time limits begin now, unless they began before."""
        request, self._criteria, self.turn = self.request, None, turn
        route = Route.ON_HOST if request.returns_logprobs else request.route
        self._set_status(RequestStatus.PREFILLING)
        if request.criteria is not None:
            self._criteria = _WatchedCriteria(map(from_now, request.criteria))
            request = replace(request, criteria=self._criteria)
        self._answer = request.answer(torch.tensor([self.prompt]), keep_logprobs=request.returns_logprobs)
        if route is Route.DRAW_IN_ROUND:
            self.settings = RowSettings.of(request.processors)
            route = route if self.settings else Route.ON_HOST
        if route is Route.ON_HOST:
            seed = request.seed if request.config.do_sample else None
            acceptor = make_acceptor(route, self._answer, request.processors, seed)
            if isinstance(acceptor, HostAcceptor):
                acceptor.first_row, self.acceptor = self.sequence_index, acceptor

    @property
    def text(self) -> list[int]:
        """Its prompt and what it has gained, all of which is processed when it is let in."""
        return self.prompt + self.tokens

    @property
    def scope(self) -> bytes:
        """Texts of the same scope share keys and values: they have one version of an adapter, and one salt."""
        salt = self.request.cache_salt.encode("utf-8", "surrogatepass")
        adapter = self.loaded.version.to_bytes(8)  # guard: adapter-kv
        return adapter + salt  # guard: salts

    @property
    def keys(self) -> list[int] | None:
        """Its text as the prefix cache knows it; None: it shares nothing with others."""
        own = self.request.process
        return self.text if own is None else own.keys and own.keys + self.tokens  # guard: texts-with-pictures

    @property
    def scores_prompt(self) -> bool:
        return self.scores is not None and self.scores.prompt_top is not None

    @property
    def needs_scores(self) -> bool:
        """True if some log-probabilities of its prompt have not been told yet."""
        return self.scores is not None and self.scores_prompt and len(self.scores.prompt) < len(self.prompt) - 1

    @property
    def is_on_host(self) -> bool:
        """True if its rounds hand the target's logits to the host, to accept tokens or to tell log-probabilities."""
        return self.acceptor is not None or self.scores is not None

    def numbers(self) -> dict[str, int | float]:
        return super().numbers() | vars(self.settings or RowSettings()) | {"numbers": self.sequence_index}

    def gain(self, tokens: list[int]) -> None:
        self.status = RequestStatus.DECODING
        before = len(self.tokens)
        if self.acceptor is None and self._criteria is None:
            self.tokens.extend(tokens)
        else:
            if self.acceptor is None:  # an acceptor has given them to the answer
                self._answer.take([tokens])
            self.tokens = self._answer.rows[0][: self._answer.columns]
        if self.scores is not None:
            self.scores.take(len(self.tokens))
        if self.request.record_timestamps:
            self.timestamps += [time.perf_counter()] * (len(self.tokens) - before)
        if self.first_token_time is None and self.tokens:
            self.first_token_time = time.perf_counter()
        is_met = self._criteria is not None and self._criteria.are_met
        if self.tokens and (is_met or self.tokens[-1] in self._answer.eos):
            self.finish("stop")  # also at the last token that it may have
        elif self.room <= 0:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End it: "stop", "length" or "cancelled"."""
        self.finish_reason, self.is_over = reason, True
        self._set_status(RequestStatus.FINISHED)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, OverflowError):  # raised by transformers' processors, such as a steep length penalty
            name = "generation_config"
            error = RequestError(f"{name}: numbers of a setting grow beyond float64; weaken it", field=name)
        self.error, self.finish_reason, self.is_over = str(error) or type(error).__name__, "error", True
        if isinstance(error, RequestError):
            self.error_status, self.error_field = error.status, error.field
        self._set_status(RequestStatus.FAILED)

    def output(self) -> Output:
        answer, prompt = ([*self.scores.answer], [*self.scores.prompt]) if self.scores is not None else ([], [])
        logprobs = [each.logprob for each in answer]
        if self.request.returns_logprobs and self.tokens:
            logprobs = (self._answer.logprobs or [[]])[0][: len(self.tokens)]
        timestamps = list(self.timestamps) if self.request.record_timestamps else None
        return Output(
            self.request_id, self.prompt, list(self.tokens), logprobs, self.error, self.status, self.created_time,
            self.lifespan, timestamps, self.finish_reason, self.speculation, self.first_token_time, answer, prompt,
            self.error_status, self.error_field,
        )  # fmt: skip

    def _set_status(self, status: RequestStatus) -> None:
        now = time.perf_counter()
        if self.status is RequestStatus.PENDING:
            self.lifespan = (now, -1)
        if status >= RequestStatus.FINISHED:
            self.lifespan = (self.lifespan[0], now)
        self.status = status


class _WatchedCriteria(StoppingCriteriaList):
    """Criteria of one row that remember if one of them was met, other than a limit of tokens."""

    are_met = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self:
            met = criterion(input_ids, scores, **kwargs)
            self.are_met |= type(criterion).__name__ != "MaxLengthCriteria" and bool(torch.as_tensor(met).any())
            ends = ends | met
        return ends


@dataclass
class FollowerRequest:
    """A sequence that enters, as far as the other ranks need it. Only the first rank has requests: before each round it
    says which of them enter and leave, and the others run the same rounds on their own parts of the model.

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
        request = Request(
            int(told.numbers["max_lengths"]), eos=told.eos, most_nodes=int(told.numbers["most_nodes"]),
            references=[torch.tensor(ids, dtype=torch.int64) for ids in told.references], share_text=told.share_text,
        )  # fmt: skip
        super().__init__(
            request, told.prompt, tokens=told.tokens, request_id=told.request_id, pages=told.pages,
            settings=told.settings,
        )  # fmt: skip
        self._told = told

    def numbers(self) -> dict[str, int | float]:
        return self._told.numbers

    @property
    def needs_scores(self) -> bool:
        return self._told.needs_scores

    @property
    def is_on_host(self) -> bool:
        return self._told.is_on_host

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
