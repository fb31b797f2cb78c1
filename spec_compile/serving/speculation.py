"""Figures of a request's speculation, in the fields that benchmark clients read."""

from typing import Any


def speculation_fields(output: Any, num_spec_tokens: int) -> dict:
    """The field `metrics` of an answer, as vLLM has it.

    output: a finished output of the manager
    num_spec_tokens: draft tokens that a step verifies at most

    All nodes of a tree but the root count as drafted. The histogram counts steps by their number of accepted draft
    tokens, which is the depth of the accepted path.
    """
    steps, drafted = output.speculation.per_step_accepted, output.speculation.per_step_drafted
    accepted, offered = sum(steps), sum(drafted)
    summary = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / offered if offered else None,
        "acceptance_histogram": [steps.count(length) for length in range(num_spec_tokens + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": num_spec_tokens,
    }
    return {"speculative_decoding": summary | {"per_step_accepted": steps, "per_step_drafted": drafted}}
