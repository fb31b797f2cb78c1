"""Layers with a state, of which no function can be replaced by `capture.recurrences`, and convolutions over tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UnsupportedModelError
from ...kernels import HALF
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


# Recurrences.


DECAYS = ("query_decay", "key_decay", "diagonal_decay")
"""Tables of lightning attention: exp(-slope_rate * n) for distances n up to a block, [H, ...]."""


def lightning(module: nn.Module, attend: Attend) -> None:
    """Lightning attention (MiniMax): linear attention whose decay is a constant of each head.

    The decay is that of the model's cached steps, exp(-slope_rate). Its forward without a cache reads powers of it from
    tables, which are rounded to 16 bits in a model of 16 bits (`unrounded_decays`).
    """

    def forward(hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(2, (module.num_attention_heads, -1))
        q, k, v = qkv.float().chunk(3, dim=3)
        decay = (-module.slope_rate.float().flatten()).expand(q.shape[:3])
        out = recurrence("decay", [q, k, v, decay]).flatten(2).to(hidden_states.dtype)
        return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * module.norm(out)), None

    module.forward = forward


@contextmanager
def unrounded_decays(model: nn.Module) -> Iterator[None]:
    """A context in which `DECAYS` of a model of 16 bits are float32 and follow from its `slope_rate`.

    UnsupportedModelError if a table differs from that by more than its dtype rounds: then the model's own prompts and
    steps have other decays, and no recurrence is both.
    """
    before = []
    try:
        for part in model.modules():
            if not hasattr(part, "decay_factors") or part.slope_rate.dtype not in HALF:
                continue
            exact = part.decay_factors(part.slope_rate.float().cpu())  # before transformers 5.24 only on a CPU
            for name, table in zip(DECAYS, exact, strict=True):
                rounded = getattr(part, name)
                if (table - rounded.float().cpu()).abs().max() > torch.finfo(rounded.dtype).eps:
                    raise UnsupportedModelError(
                        f"model: {name} of its lightning attention does not follow from slope_rate; load the model "
                        "again, or compute both anew"
                    )
                before.append((part, name, rounded))
                setattr(part, name, table.to(rounded.device))
        yield
    finally:
        for part, name, rounded in before:
            setattr(part, name, rounded)


def griffin(block: nn.Module, attend: Attend) -> None:
    """The recurrent block of Griffin (RecurrentGemma): a short convolution and a gated linear unit, RG-LRU."""
    convolution, unit = block.conv_1d, block.rg_lru

    def forward(input_states: Tensor, position_ids: Tensor, *_, **__) -> tuple[Tensor, None]:
        gate = block.act_fn(block.linear_y(input_states))
        x = recurrence("convolution", [block.linear_x(input_states), convolution.weight[:, 0]])
        x = (x + convolution.bias.float()).to(input_states.dtype)
        return block.linear_out(unit(x, position_ids) * gate), None

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, **_) -> tuple[Tensor, None]:
        # Without the reset at position 0, where the state is 0 already.
        return recurrence("gated", [hidden_states.float(), recurrent_gate.float()]).to(hidden_states.dtype), None

    block.forward, unit._rnn_scan = forward, scan


def rwkv(module: nn.Module, attend: Attend) -> None:
    """Both halves of a layer of RWKV: their shift to the token before is a convolution with the weights 1, 0."""
    shift = module.time_shift
    taps = torch.tensor([1.0, 0.0], device=module.key.weight.device).repeat(module.key.in_features, 1)
    shift.register_buffer("taps", taps, persistent=False)

    def forward(hidden: Tensor) -> Tensor:
        return recurrence("convolution", [hidden, shift.taps]).to(hidden.dtype)

    shift.forward = forward
