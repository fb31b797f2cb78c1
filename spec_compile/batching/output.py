"""The output of a request: transformers' fields, counters of its speculation, and log-probabilities of its tokens by
the target's raw logits, before any processor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..errors import check_int, check_positive
from ..runtime.verify.processors import row_invariant
from ..tree import Accepted

if TYPE_CHECKING:
    from .sequence import BatchSequence

MOST_TOP = 20
"""Likeliest tokens that are told next to each token, at most, as OpenAI and vLLM bound them."""


@dataclass(frozen=True)
class TokenScore:
    """The log-probabilities, in nats, of one token and of the likeliest tokens in its place.

    token: its id
    logprob: ``log_softmax(logits / temperature)[token]``, in float32
    top: ids and log-probabilities of the likeliest tokens, the likeliest first
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int, temperature: float = 1.0) -> list[TokenScore]:
    """The scores of N tokens.

    logits: [N, V], of the target before each token
    tokens: N ids
    top: number of likeliest tokens to tell, at most V
    temperature: divides the logits, above 0

    A token that is among the likeliest has exactly the same number there. A token without a logit, of a model that
    reads more tokens than it generates, has -inf. On a GPU a row has the same bits among any others.
    """
    logits = logits.float() / temperature
    with row_invariant(logits.device, []):
        scores = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    best = logits.topk(min(top, logits.shape[-1]), dim=-1).indices
    parts = scores.gather(1, ids.clamp(max=logits.shape[-1])), scores.gather(1, best), best
    # One copy to the host. A float64 holds every float32 and every id.
    rows = torch.cat([part.double() for part in parts], dim=1).tolist()
    told, kept = [], best.shape[1]
    for token, row in zip(tokens, rows):
        values, others = row[1 : 1 + kept], row[1 + kept :]
        told.append(TokenScore(token, row[0], tuple(zip(map(int, others), values))))
    return told


@dataclass
class Scores:
    """The log-probabilities that a request asks for, and those that it has so far.

    top: likeliest tokens for each token of the answer; None: none of the answer is wanted
    prompt_top: the same of the prompt; None: none of the prompt is wanted
    temperature: see `score_tokens`
    answer: scores of the answer's tokens
    prompt: scores of the prompt's tokens from the second one on, because nothing comes before the first
    ahead: scores of the tokens of a round that is under way
    """

    top: int | None
    prompt_top: int | None
    temperature: float = 1.0
    answer: list[TokenScore] = field(default_factory=list)
    prompt: list[TokenScore] = field(default_factory=list)
    ahead: list[TokenScore] = field(default_factory=list)

    @classmethod
    def read(cls, top: Any, prompt_top: Any, temperature: Any = None) -> "Scores | None":
        """The scores that the options `logprobs` and `prompt_logprobs` ask for, at `logprobs_temperature` (None: 1.0);
        None if both are None.

        TypeError or ValueError, naming the option, unless each of the two is None or an int from 0 to `MOST_TOP`, and
        the temperature a finite number above 0.
        """
        for name, value in (("logprobs", top), ("prompt_logprobs", prompt_top)):
            if value is not None:
                check_int(name, value, 0, MOST_TOP)
        temperature = 1.0 if temperature is None else temperature
        check_positive("logprobs_temperature", temperature)
        return None if top is None and prompt_top is None else cls(top, prompt_top, temperature)

    def read_prompt(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Add the next tokens of the prompt. logits: [N, V], of the target before each of these N tokens."""
        self.prompt += score_tokens(logits, tokens, self.prompt_top or 0, self.temperature)

    def take(self, length: int) -> None:
        """The answer has `length` tokens now; those that a round gained beyond an end do not count."""
        self.answer += self.ahead[: length - len(self.answer)]


def look_ahead(sequences: "list[BatchSequence]", logits: Tensor, accepted: Accepted) -> None:
    """Keep the scores of the tokens that a round has accepted, for the requests that ask for them.

    logits: [B, N, V] of the target after every node of the verified trees

    With the path [0, 2, 5] and the tokens [7, 8, 9] the logits after nodes 0, 2 and 5 give the scores of 7, 8 and 9.
    """
    for sequence in sequences:
        scores = sequence.scores
        if scores is not None and scores.top is not None and sequence.failure is None:
            row, count = sequence.row, int(accepted.count[sequence.row])
            path = accepted.path[row, :count].to(logits.device)
            tokens = accepted.tokens[row, :count].clamp(min=0)  # -1: nothing could be drawn, and the request fails
            scores.ahead = score_tokens(logits[row, path], tokens.tolist(), scores.top, scores.temperature)


@dataclass
class RequestSpeculation:
    """Counters of one request.

    per_step_drafted: for each round that it took part in, the draft tokens that were verified, roots left out.
    per_step_accepted, per_step_tokens: how many of them were accepted, and the tokens gained.
    reused_prompt_tokens: prompt tokens whose keys and values another request had left.
    """

    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_tokens: list[int] = field(default_factory=list)
    reused_prompt_tokens: int = 0

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        self.per_step_drafted.append(drafted)
        self.per_step_accepted.append(accepted)
        self.per_step_tokens.append(tokens)

    @property
    def steps(self) -> int:
        """Rounds that it took part in."""
        return len(self.per_step_tokens)

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(self.per_step_drafted)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.per_step_accepted)

    @property
    def accepted_per_position(self) -> list[int]:
        """How often a node was accepted at depth 1, 2, and so on."""
        deepest = max(self.per_step_accepted, default=0)
        return [sum(accepted > depth for accepted in self.per_step_accepted) for depth in range(deepest)]


@dataclass
class Output(GenerationOutput):
    """The tokens of a request so far.

    finish_reason: None until it is finished; then "stop" (an end-of-sequence token, a stop string, a criterion),
    "length", "cancelled" or "error". speculation: its counters, which grow until it is finished. first_token_time: as
    `created_time`; None before. logprobs: the log-probability of each token of the answer, by the scores that it was
    chosen from if the manager's config has `return_logprobs`, else as in `scores`. scores: what the raw logits tell of
    each token of the answer, if the request has `logprobs`. prompt_scores: what they tell of each token of the prompt
    from the second one on, if it has `prompt_logprobs`. error_status, error_field: the attributes of its
    `RequestError`; None if it has no error, or one whose message is for the log.
    """

    finish_reason: str | None = None
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    first_token_time: float | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    error_status: int | None = None
    error_field: str | None = None
