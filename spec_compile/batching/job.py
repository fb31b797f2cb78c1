"""`Job`: one request, from its admission to its last output."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.continuous_batching.requests import RequestStatus

from ..capture.loras import NO_ADAPTER, Loaded
from ..errors import RequestError, check_int
from ..runtime.accept import Route, make_acceptor
from ..runtime.accept.draw import RowSettings
from ..runtime.accept.host import HostAcceptor
from ..tree import MAX_NODES
from .logprobs import Scores
from .output import Output, RequestSpeculation
from .prepare import Prepared


@dataclass(eq=False, repr=False)
class Job:
    """A request and what it has gained so far.

    prompt: token ids. prepared: what it asks for. number: of its sequence among those of one call, see
    `random_numbers.uniform`. seed: of its random numbers. most_nodes: see `flights.Rider`. share_text, references: see
    `Drafter.enter`. scores: the log-probabilities that it asks for. adapter: the name of its LoRA adapter; None: rows
    of this model choose none. returns_logprobs: whether `Output.logprobs` has the log-probabilities of the processed
    scores. cache_salt: keys and values are shared with requests that have the same one. client: who takes turns with
    others.
    """

    request_id: str
    prompt: list[int]
    prepared: Prepared
    seed: int
    number: int = 0
    streaming: bool = False
    record_timestamps: bool = False
    share_text: bool | str = True
    most_nodes: int = MAX_NODES
    references: list[Tensor] = field(default_factory=list)
    scores: Scores | None = None
    adapter: str | None = None
    returns_logprobs: bool = False
    cache_salt: str = ""
    client: str = ""
    loaded: Loaded = NO_ADAPTER
    """The adapter in its slot, from the admission to the end."""
    passed: int = 0
    """Later requests with an adapter that were let in while it waited for a slot for its own."""
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
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
    """True if its row has ended by itself, with no tokens but those of the answer."""
    weights: int = -1
    """The number that `Texts.weights` had when its prompt was begun."""
    row: int = -1
    """Where it lies among the rows that decode, or before that among those of prompts."""
    count: int | None = None
    hint: int | None = None
    """Real nodes of its pending tree and the drafter's confidence in it; None if only the GPU knows them yet."""
    settings: RowSettings | None = None
    """How tokens are drawn in the round; None if the likeliest is taken or the host chooses."""
    failure: Exception | None = None
    """The error of its acceptor in a round that is still under way."""
    acceptor: HostAcceptor | None = None
    """Accepts its tokens on the host; None if the round does."""

    def admit(self) -> None:
        """Make what is needed once the request has a row."""
        ask = self.prepared.ask.from_now()
        route = Route.ON_HOST if self.returns_logprobs else ask.route
        self._set_status(RequestStatus.PREFILLING)
        self.eos, self._criteria = ask.eos, None
        if ask.criteria is not None:
            ask.criteria = self._criteria = _Watched(ask.criteria)
        self._answer = ask.answer(torch.tensor([self.prompt]), keep_logprobs=self.returns_logprobs)
        if route is Route.DRAW_IN_ROUND:
            self.settings = RowSettings.of(ask.processors)
            route = route if self.settings else Route.ON_HOST
        if route is Route.ON_HOST:
            seed = self.seed if ask.config.do_sample else None
            self.acceptor = make_acceptor(route, self._answer, ask.processors, seed)
            self.acceptor.first_row = self.number

    @property
    def scope(self) -> bytes:
        """Texts of the same scope share keys and values: those of one version of an adapter and one salt."""
        return self.loaded.version.to_bytes(8) + self.cache_salt.encode("utf-8", "surrogatepass")  # guard: salts

    @property
    def has_pictures(self) -> bool:
        """True if the model's own forward processes its prompt, whose ids do not say all."""
        return self.prepared is not None and self.prepared.process is not None

    @property
    def scores_prompt(self) -> bool:
        """True if it asks for log-probabilities of its prompt."""
        return self.scores is not None and self.scores.prompt_top is not None

    @property
    def needs_all_tokens(self) -> bool:
        """True if keys and values that another request has left do not serve it."""
        return self.has_pictures or self.scores_prompt

    @property
    def is_on_host(self) -> bool:
        """True if its rounds hand the target's logits to the host, to accept tokens or to tell log-probabilities."""
        return self.acceptor is not None or self.scores is not None

    @property
    def length(self) -> int:
        """Tokens that the row has for sure, less one; as `State.lengths` counts."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens that it may still gain."""
        return self.prepared.ask.longest - self.length - 1

    @property
    def adapter_number(self) -> int:
        """See `Loaded`."""
        return self.loaded.number

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def numbers(self) -> dict[str, int | float]:
        """For the buffers of a `State`."""
        ask, config = self.prepared.ask, self.prepared.ask.config
        numbers = {
            "min_lengths": ask.shortest, "max_lengths": ask.longest, "seed": self.seed,
            "numbers": self.number, "temperature": (config.temperature or 1.0) if config.do_sample else 0.0,
            "most_nodes": self.most_nodes,
        }  # fmt: skip
        return numbers | (self.settings or RowSettings()).numbers()

    def gain(self, tokens: list[int]) -> bool:
        """Take tokens that a round has given to the row; returns whether the request is over."""
        self.status = RequestStatus.DECODING
        before = len(self.tokens)
        if self.acceptor is not None:  # it has given them to the answer
            self.tokens = self._answer.rows[0][: self._answer.columns]
        elif self._criteria is not None:
            self._answer.take([tokens])
            self.tokens = self._answer.rows[0][: self._answer.columns]
        else:
            self.tokens.extend(tokens)
        if self.scores is not None:
            self.scores.take(len(self.tokens))
        if self.record_timestamps:
            self.timestamps += [time.perf_counter()] * (len(self.tokens) - before)
        if self.first_token_time is None and self.tokens:
            self.first_token_time = time.perf_counter()
        is_met = self._criteria is not None and self._criteria.are_met
        if self.tokens and (is_met or self.tokens[-1] in self._answer.eos):
            self.finish("stop")  # also at the last token that it may have
        elif len(self.tokens) + len(self.prompt) >= self.prepared.ask.longest:
            self.finish("length")
        return self.is_over

    def finish(self, reason: str) -> None:
        """End the request: "stop", "length" or "cancelled"."""
        self.finish_reason = reason
        self._set_status(RequestStatus.FINISHED)

    def fail(self, error: BaseException) -> None:
        """End the request by an error."""
        if isinstance(error, OverflowError):  # raised by transformers' processors, such as a steep length penalty
            name = "generation_config"
            error = RequestError(f"{name}: numbers of a setting grow beyond float64; weaken it", field=name)
        self.error, self.finish_reason = str(error) or type(error).__name__, "error"
        if isinstance(error, RequestError):
            self.error_status, self.error_field = error.status, error.field
        self._set_status(RequestStatus.FAILED)

    def output(self) -> Output:
        """The output that it delivers now."""
        answer, prompt = ([*self.scores.answer], [*self.scores.prompt]) if self.scores is not None else ([], [])
        logprobs = [each.logprob for each in answer]
        if self.returns_logprobs and self.tokens:
            logprobs = self._answer.logprobs[0][: len(self.tokens)]
        return Output(
            self.request_id, self.prompt, list(self.tokens), logprobs, self.error,
            self.status, self.created_time, self.lifespan, list(self.timestamps) if self.record_timestamps else None,
            self.finish_reason, self.speculation, self.first_token_time, answer, prompt,
            self.error_status, self.error_field,
        )  # fmt: skip

    def _set_status(self, status: RequestStatus) -> None:
        now = time.perf_counter()
        if self.status is RequestStatus.PENDING:
            self.lifespan = (now, -1)
        if status >= RequestStatus.FINISHED:
            self.lifespan = (self.lifespan[0], now)
        self.status = status


class _Watched(StoppingCriteriaList):
    """Criteria of one row that remember if one of them was met, other than a limit of tokens."""

    are_met = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self:
            met = criterion(input_ids, scores, **kwargs)
            self.are_met |= type(criterion).__name__ != "MaxLengthCriteria" and bool(torch.as_tensor(met).any())
            ends = ends | met
        return ends


def seed_of(seed: int | None) -> int:
    """The seed that ``generate()`` has after ``torch.manual_seed(seed)``; None: as it would have now. TypeError or
    ValueError if torch takes no such seed."""
    if seed is not None:
        check_int("seed", seed, -(1 << 63), (1 << 64) - 1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return int(torch.randint((1 << 63) - 1, (), generator=generator))
