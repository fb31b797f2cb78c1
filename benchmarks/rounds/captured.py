"""Times of captured rounds on a GPU."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.rounds.experts import chosen_experts, unlike_tokens
from benchmarks.rounds.shapes import TEXT_TREE, text_tokens
from benchmarks.timers import alone, median_ms
from spec_compile.graph import calls
from spec_compile.kernels import experts
from spec_compile.runtime.compiled_steps import build_compiled
from spec_compile.runtime.session import StepKind


def filling(fast, state) -> Callable[[int], None]:
    """A function that fills the pending trees for a round over a given number of nodes.

    N-grams propose nothing after random tokens, so their trees get the form of one in real text. With n-grams and in
    mixtures all tokens differ.
    """
    is_ngram = fast.speculation.engine.name == "ngram"
    takes_tokens = is_ngram or bool(calls(fast.speculation.engine.runtime.verify.gm, experts.UP))
    tokens, parents = unlike_tokens(state), torch.tensor(TEXT_TREE, device=state.tokens.device)

    def fill(nodes: int) -> None:
        if takes_tokens:
            state.tree_tokens.copy_(tokens)
        if is_ngram:
            state.tree_parents.copy_(parents)
            state.tree_count.fill_(nodes)

    return fill


def rounds(
    fast, context: int, batch: int, sizes: list[int], repeats: int = 30, counts: dict[int, list[int]] | None = None
) -> dict[int, float]:
    """Median milliseconds of a captured round at each size, with `context` tokens committed in every row.

    The host's launch does not count, because generate() launches rounds ahead. All parts are compiled before, because
    the thread that traces them would run models on the same GPU.
    counts: filled with the `chosen_experts` of each size, if the model is a mixture.
    """
    engine = fast.speculation.engine
    session = engine.session(batch)
    with engine.turns, torch.no_grad():
        build_compiled(engine.runtime, lambda: session.make([(StepKind.ROUND, nodes) for nodes in sizes]))
    _rounds(fast, context, batch, sizes, 1, counts)  # captures
    with alone(fast.speculation.options.ranks.meet):
        return _rounds(fast, context, batch, sizes, repeats)


def _rounds(
    fast, context: int, batch: int, sizes: list[int], repeats: int, counts: dict[int, list[int]] | None = None
) -> dict[int, float]:
    speculation = fast.speculation
    engine = speculation.engine
    session = engine.session(batch)
    state = session.state
    ids = text_tokens(context, engine.runtime.verify.vocab_size).tolist()
    fill, out = filling(fast, state), {}
    for nodes in sizes:
        with torch.no_grad():
            step = session.get(StepKind.ROUND, nodes)
            for row in range(batch):
                state.enter(row, ids, [], lengths=0, min_lengths=0, max_lengths=state.capacity - 1000, most_nodes=64)
            state.finished.zero_()
            session.drafter.start(state, [ids] * batch, [])
            state.lengths.copy_(state.prompt_lengths - 1)
            state.root()
            session.drafter.propose(state, 128)
            if counts is not None and calls(engine.runtime.verify.gm, experts.UP):
                fill(nodes)
                counts[nodes] = chosen_experts(engine.runtime, state, nodes)
            out[nodes] = median_ms(partial(step, 128), repeats, before=partial(fill, nodes))
            session.drafter.finish([])
    return out
