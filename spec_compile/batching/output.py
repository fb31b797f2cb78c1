"""What a request delivers: transformers' output, and what speculation did for it."""

from dataclasses import dataclass, field

from transformers.generation.continuous_batching.requests import GenerationOutput


@dataclass
class RequestSpeculation:
    """Counters of one request.

    steps: rounds that it took part in. drafted: draft tokens that were verified, roots left out. accepted: those of
    them that were accepted. per_step_drafted, per_step_accepted, per_step_tokens: the same and the tokens gained, a
    number for each step. accepted_per_position[d]: how often a node at depth d + 1 was accepted. reused_prompt_tokens:
    prompt tokens whose keys and values another request had left.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_tokens: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    reused_prompt_tokens: int = 0

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count a step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.per_step_drafted.append(drafted)
        self.per_step_accepted.append(accepted)
        self.per_step_tokens.append(tokens)
        add_depths(self.accepted_per_position, accepted)


def add_depths(counts: list[int], depth: int) -> None:
    """Add 1 to the first `depth` of `counts`, which grows as needed."""
    counts += [0] * (depth - len(counts))
    for index in range(depth):
        counts[index] += 1


@dataclass
class Output(GenerationOutput):
    """The tokens of a request so far.

    finish_reason: None until it is finished; then "stop" (an end-of-sequence token, a stop string, a criterion),
    "length", "cancelled" or "error". speculation: its counters, which grow until it is finished. first_token_time: as
    `created_time`; None before.
    """

    finish_reason: str | None = None
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    first_token_time: float | None = None
