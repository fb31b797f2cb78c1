"""Times of captured rounds on a GPU, and the experts that a round of a mixture reads."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from benchmarks.rounds.shapes import TEXT_TREE, text_tokens
from benchmarks.timers import median_ms
from spec_compile.graph import calls
from spec_compile.kernels import experts
from spec_compile.runtime.compiled_steps import build_compiled
from spec_compile.runtime.session import StepKind
from spec_compile.tree import ancestry


class ExpertCounter(fx.Interpreter):
    """Runs a graph and counts the experts that its tokens choose; `counts` has a number for each mixture."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.counts: list[int] = []

    def call_function(self, target, args, kwargs):
        if target in (experts.DOWN, experts.TO_STREAM):
            self.counts.append(len(args[1].unique()))
        return super().call_function(target, args, kwargs)


def chosen_experts(runtime, state, nodes: int) -> list[int]:
    """The number of experts that the first `nodes` nodes of the pending trees choose, for each mixture."""
    tree, counter = state.tree(nodes), ExpertCounter(runtime.verify.gm)
    ancestors, depth = ancestry(tree.parents)
    counter.run(tree.tokens, state.positions(depth), state.lengths, ancestors, state.cache, 128)
    return counter.counts


def unlike_tokens(state) -> Tensor:
    """Different tokens for all nodes [B, 64]; equal ones would choose the same experts."""
    batch, nodes = state.tree_tokens.shape
    tokens = torch.arange(1, batch * nodes + 1, device=state.tokens.device).view(batch, nodes)
    return tokens * (state.is_eos.shape[1] // (batch * nodes + 1))


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
    fast.speculation.options.ranks.meet()
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
