"""Recurrences whose channels do not mix: the gated linear unit RG-LRU (RecurrentGemma), and WKV (RWKV 4).

    gated:  h_i = a_i h_parent(i) + x_i                            out_i = h_i
    wkv:    n_i = e^w n_parent(i) + e^k_i v_i                      out_i = (n_parent(i) + e^(u + k_i) v_i)
            d_i = e^w d_parent(i) + e^k_i                                / (d_parent(i) + e^(u + k_i))

Inputs, all float32: of gated x, a [B, T, C] (De et al. 2024, "Griffin", section 2.4); of wkv k, v [B, T, C] and the
weights w, u [C] (Peng et al. 2023, "RWKV", section 3.1). State of gated [B, C]. State of wkv [B, 3, C]: n and d divided
by e^m, and m, the largest exponent so far, so that nothing overflows. d is 0 before the first token and at least 1
after it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Inputs, RecurrenceKind, parents_of

LOWEST = -1e38
"""The largest exponent of no token."""


def _gated_state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    return (inputs[0].shape[2],), torch.float32


def _wkv_state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    return (3, inputs[0].shape[2]), torch.float32


def _gated_step(state: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Output and next state [B, C] of a token."""
    state = a * state + x
    return state, state


def _wkv_step(state: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Output [B, C] and next state [B, 3, C] of a token. u: None if only the state is asked for."""
    n, d, m = state.unbind(1)
    m, out = torch.where(d > 0, m, LOWEST), None
    if u is not None:
        top = torch.maximum(m, u + k)
        old, new = (m - top).exp(), (u + k - top).exp()
        out = (old * n + new * v) / (old * d + new)
    top = torch.maximum(m + w, k)
    old, new = (m + w - top).exp(), (k - top).exp()
    return out, torch.stack([old * n + new * v, old * d + new, top], dim=1)


STEPS: dict[str, Callable[..., tuple[Tensor | None, Tensor]]] = {"gated": _gated_step, "wkv": _wkv_step}


def _chunk(kind: str) -> Callable[[Inputs, Tensor, Tensor], tuple[Tensor | None, Tensor]]:
    def chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
        first, second, *weights = inputs
        outputs = []
        for token in range(first.shape[1]):
            out, after = STEPS[kind](state, first[:, token], second[:, token], *weights)
            state = torch.where((token < valid).view(-1, *[1] * (state.dim() - 1)), after, state)
            outputs.append(out)
        return (None if outputs[0] is None else torch.stack(outputs, dim=1)), state

    return chunk


@torch.library.custom_op("spec_compile::channelwise_tree", mutates_args=())
def channelwise_tree(kind: str, inputs: list[Tensor], state: Tensor, ancestors: Tensor) -> Tensor:
    """Outputs [B, N, C] of the nodes of a tree. An op, because a compiled loop would have a fixed number of nodes."""
    first, second, *weights = inputs
    rows, before = torch.arange(len(first), device=first.device), parents_of(ancestors) + 1
    states, outputs = [state], []
    for node in range(first.shape[1]):
        parent = torch.stack(states)[before[:, node], rows]
        out, after = STEPS[kind](parent, first[:, node], second[:, node], *weights)
        states.append(after)
        outputs.append(out)
    return torch.stack(outputs, dim=1)


@channelwise_tree.register_fake
def _(kind, inputs, state, ancestors):
    return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)


def _tree(kind: str) -> Callable[[Inputs, Tensor, Tensor], Tensor]:
    def tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
        return torch.ops.spec_compile.channelwise_tree(kind, inputs, state, ancestors)

    return tree


GATED = RecurrenceKind(
    "gated", kept=(0, 1), constants=(), output=0, state=_gated_state, chunk=_chunk("gated"), tree=_tree("gated")
)
WKV = RecurrenceKind(
    "wkv", kept=(0, 1, 2), constants=(2, 3), output=0, state=_wkv_state, chunk=_chunk("wkv"), tree=_tree("wkv")
)
