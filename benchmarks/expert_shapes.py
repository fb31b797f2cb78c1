"""Published shapes of mixtures of experts, see `shapes.SHAPES`, and how many experts a round reads."""

import torch
from torch import Tensor, fx

from spec_compile.kernels import experts
from spec_compile.tree import ancestry

EXPERTS = {
    "qwen3-30b-a3b": ("qwen3_moe", dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True,
                                        max_position_embeddings=40960,
                                        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
    "mixtral-8x7b": ("mixtral", dict(max_position_embeddings=32768)),
}  # fmt: skip
"""Sizes that are not named are transformers' own."""


class ExpertCounter(fx.Interpreter):
    """Runs a graph and counts the experts that its tokens choose: `counts` has a number for each mixture."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.counts: list[int] = []

    def call_function(self, target, args, kwargs):
        if target == experts.DOWN:
            self.counts.append(len(args[1].unique()))
        return super().call_function(target, args, kwargs)


def chosen_experts(runtime, state, nodes: int) -> list[int]:
    """How many experts of each mixture of a model the first `nodes` nodes of the pending trees choose."""
    tree, counter = state.tree(nodes), ExpertCounter(runtime.verify.gm)
    ancestors, depth = ancestry(tree.parents)
    counter.run(tree.tokens, state.positions(depth), state.lengths, ancestors, state.cache, 128)
    return counter.counts


def unlike_tokens(state) -> Tensor:
    """Tokens for all nodes [B, 64] that differ, because equal ones would choose the same experts."""
    batch, nodes = state.tree_tokens.shape
    tokens = torch.arange(1, batch * nodes + 1, device=state.tokens.device).view(batch, nodes)
    return tokens * (state.is_eos.shape[1] // (batch * nodes + 1))
