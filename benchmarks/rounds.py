"""Times of captured rounds on a GPU."""

from functools import partial

import torch
from expert_shapes import chosen_experts, unlike_tokens
from shapes import TEXT_TREE, text_tokens
from timers import alone, median_ms

from spec_compile.graph import calls
from spec_compile.kernels import experts


def rounds(
    fast, context: int, batch: int, sizes: list[int], repeats: int = 30, counts: dict[int, list[int]] | None = None
) -> dict[int, float]:
    """Median milliseconds of a captured round at each size, with `context` tokens committed in every row. counts: gets
    the `chosen_experts` of each size, if the model is a mixture."""
    _rounds(fast, context, batch, sizes, 1, counts)  # compiles and captures
    with alone():
        return _rounds(fast, context, batch, sizes, repeats)


def _rounds(
    fast, context: int, batch: int, sizes: list[int], repeats: int, counts: dict[int, list[int]] | None = None
) -> dict[int, float]:
    speculation = fast.speculation
    engine = speculation.engine
    session = engine.session(batch)
    state = session.state
    ids = text_tokens(context, engine.runtime.verify.vocab_size).tolist()
    is_sparse = bool(calls(engine.runtime.verify.gm, experts.UP))
    spread, parents, out = unlike_tokens(state), torch.tensor(TEXT_TREE, device=state.tokens.device), {}
    for nodes in sizes:
        with torch.no_grad():
            step = session.step("round", nodes)
            state.reset([ids] * batch, [0] * batch, [state.capacity - 1000] * batch, [])
            session.drafter.start(state, [ids] * batch, [])
            state.lengths.copy_(state.prompt_lengths - 1)
            state.root()
            session.drafter.propose(state, 128)

            def fill(nodes=nodes):
                if is_sparse or speculation.algorithm == "ngram":
                    state.tree_tokens.copy_(spread)
                if speculation.algorithm == "ngram":  # which propose nothing behind random tokens
                    state.tree_parents.copy_(parents)
                    state.tree_count.fill_(nodes)

            if is_sparse and counts is not None:
                fill()
                counts[nodes] = chosen_experts(engine.runtime, state, nodes)
            out[nodes] = median_ms(partial(step, 128), repeats, before=fill)
            session.drafter.finish([])
    return out
