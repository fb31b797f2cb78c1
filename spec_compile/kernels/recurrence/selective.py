"""Selective scan (Mamba-1), whose decay differs between channels and entries of the state.

    h_i = e^(dt_i a) h_parent(i) + (dt_i x_i) b_i^T        y_i = h_i c_i

Inputs, all float32: c, b [B, T, n]; x, dt [B, T, d]; a [d, n], negative. State h [B, d, n] float32. Nodes of a tree
share no decays, so each is computed from the state after its parent.
"""

import torch
from torch import Tensor

from .base import Inputs, RecurrenceKind, parents_of


def _state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(inputs[4].shape), torch.float32


def _step(state: Tensor, b: Tensor, x: Tensor, dt: Tensor, a: Tensor) -> Tensor:
    """The state [B, d, n] after one token: b [B, n], x, dt [B, d]."""
    return (dt[:, :, None] * a).exp() * state + (dt * x)[:, :, None] * b[:, None]


def _chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    c, b, x, dt, a = inputs
    counts = torch.arange(x.shape[1], device=x.device) < valid[:, None]
    dt = torch.where(counts[:, :, None], dt, 0)
    outputs = []
    for token in range(x.shape[1]):
        state = _step(state, b[:, token], x[:, token], dt[:, token], a)
        if c is not None:
            outputs.append((state @ c[:, token, :, None])[:, :, 0])
    return (None if c is None else torch.stack(outputs, dim=1)), state


@torch.library.custom_op("spec_compile::selective_tree", mutates_args=())
def selective_tree(
    c: Tensor, b: Tensor, x: Tensor, dt: Tensor, a: Tensor, state: Tensor, ancestors: Tensor
) -> Tensor:  # fmt: skip
    """Outputs [B, N, d] of the nodes of a tree. An op, because a compiled loop would have a fixed number of nodes."""
    rows = torch.arange(len(x), device=x.device)
    before = parents_of(ancestors) + 1
    states = state.new_empty(len(x), x.shape[1] + 1, *state.shape[1:])
    states[:, 0] = state
    for node in range(x.shape[1]):
        states[:, node + 1] = _step(states[rows, before[:, node]], b[:, node], x[:, node], dt[:, node], a)
    return (states[:, 1:] @ c[..., None])[..., 0]


@selective_tree.register_fake
def _(c, b, x, dt, a, state, ancestors):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    return torch.ops.spec_compile.selective_tree(*inputs, state, ancestors)


KIND = RecurrenceKind("selective", kept=(1, 2, 3, 4), constants=(4,), output=2, state=_state, chunk=_chunk, tree=_tree)
