"""Layers with a state, without a function for their recurrence that `capture.recurrences` could replace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UnsupportedModelError
from ...kernels import HALF
from ...kernels.recurrence import recurrence
from .attention import Attend

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
