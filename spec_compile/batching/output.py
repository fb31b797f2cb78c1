"""The output of a request: transformers' fields, and counters of its speculation."""

from dataclasses import dataclass, field

from transformers.generation.continuous_batching.requests import GenerationOutput

from .logprobs import TokenScore


@dataclass
class RequestSpeculation:
    """Counters of one request.

    per_step_drafted: for each round that it took part in, the draft tokens that were verified, roots left out.
    per_step_accepted, per_step_tokens: those of them that were accepted, and the tokens gained. reused_prompt_tokens:
    prompt tokens whose keys and values another request had left.
    """

    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_tokens: list[int] = field(default_factory=list)
    reused_prompt_tokens: int = 0

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count a step."""
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
