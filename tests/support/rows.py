"""Sequences in the rows of a `State`."""


def begin_rows(state, prompts, limits, eos=()):
    """Let prompts enter the rows of a `State`, each with its limit of tokens, as a generate() does."""
    for row, (prompt, limit) in enumerate(zip(prompts, limits)):
        numbers = {"lengths": 0, "min_lengths": 0, "max_lengths": limit, "numbers": row, "most_nodes": 64}
        state.enter(row, prompt, [*eos], **numbers)
    state.finished.zero_()
