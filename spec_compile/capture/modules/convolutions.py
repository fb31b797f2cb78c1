"""Changes of modules with convolutions over tokens, so that past inputs come from the marker of short convolutions."""

import torch
from torch import Tensor, nn

from ...kernels.recurrence import recurrence
from .attention import Attend, heads_of


def zaya(module: nn.Module, attend: Attend) -> None:
    """Compressed convolutional attention (arXiv:2510.04476): queries and keys pass a depthwise convolution and one by
    heads, and half of each value is that of the token before.

    The marker only delays inputs: its weights are 0 and 1. With two taps in either convolution, [0, 1, 0] gives the
    projections of the token before, and [1, 0, 0] those of the one before that. Before the text both have zeros.
    """
    depthwise, by_heads, past = module.conv_qk_depthwise, module.conv_qk_grouped, module.conv_kernel_size
    sizes = [depthwise.in_channels] * past + [module.hidden_size]
    delays = module.q_proj.weight.new_zeros(sum(sizes), max(past, 1) + 1)
    for delay, rows in zip([*range(past, 0, -1), 1], delays.split(sizes)):
        rows[:, -1 - delay] = 1
    module.register_buffer("delays", delays, persistent=False)

    def forward(hidden_states: Tensor, *_, **__) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (project(hidden_states) for project in (module.q_proj, module.k_proj))
        qk = torch.cat([q, k], dim=-1)
        delayed = recurrence("convolution", [torch.cat([qk] * past + [hidden_states], dim=-1), module.delays])
        *before, previous = delayed.to(qk.dtype).split(sizes, dim=-1)
        mixed = _by_heads(by_heads, _depthwise(depthwise, [*before, qk]))
        mixed_q, mixed_k = mixed.split([q.shape[2], k.shape[2]], dim=2)
        q, k, mixed_q, mixed_k = (heads_of(x, module.head_dim) for x in (q, k, mixed_q, mixed_k))
        q = (q + k.repeat_interleave(module.num_key_value_groups, dim=1)) * 0.5
        k = q.unflatten(1, (-1, module.num_key_value_groups)).mean(dim=2)
        v = torch.cat([module.v_proj_current(hidden_states), module.v_proj_delayed(previous)], dim=-1)
        return tuple(x.transpose(1, 2) for x in (mixed_q + q, mixed_k + k, heads_of(v, module.head_dim)))

    module.forward = forward


def _depthwise(convolution: nn.Conv1d, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a depthwise convolution of w taps, w - 1 fewer than the inputs; all [B, T, C], the oldest first.

    Inputs at delays of 2, 1 and 0 tokens and two taps give outputs at delays of 1 and 0.
    """
    columns = convolution.weight[:, 0].unbind(1)
    windows = (inputs[first : first + len(columns)] for first in range(len(inputs) - len(columns) + 1))
    return [sum(x * column for x, column in zip(window, columns)) + convolution.bias for window in windows]


def _by_heads(convolution: nn.Conv1d, inputs: list[Tensor]) -> Tensor:
    """The output [B, T, C] of a convolution whose groups are heads. inputs: of its taps, [B, T, C], oldest first."""
    heads = convolution.weight.unflatten(0, (convolution.groups, -1)).flatten(2)  # [G, D, D * w]
    x = torch.stack(inputs, dim=-1).unflatten(2, (convolution.groups, -1)).flatten(3)  # [B, T, G, D * w]
    return torch.einsum("btgi,goi->btgo", x, heads).flatten(2) + convolution.bias
