"""The experts that a round of a mixture reads."""

import torch
from torch import Tensor, fx

from spec_compile.kernels import experts
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
