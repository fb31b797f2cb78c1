"""Short depthwise convolution over a token and its predecessors, with the last w - 1 committed inputs as its state.

Inputs: x [B, T, C]; weight [C, w], whose last column is of the token itself. State [B, w - 1, C] of x's dtype.
"""

import torch
from torch import Tensor

from .base import Inputs, Kind, parents_of


def _state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    x, weight = inputs
    return (weight.shape[1] - 1, x.shape[2]), x.dtype


def _chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    x, weight = inputs
    known = torch.cat([state, x.to(state.dtype)], dim=1)
    last = valid[:, None] + torch.arange(state.shape[1], device=x.device)
    after = known.gather(1, last[:, :, None].expand(-1, -1, x.shape[2]))
    if weight is None:
        return None, after
    columns = weight.float().unbind(1)
    return sum(known[:, tap : tap + x.shape[1]].float() * column for tap, column in enumerate(columns)), after


def _tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    """The predecessor of the root is the last committed input, whose predecessors are those before it."""
    x, weight = inputs
    history, nodes = state.shape[1], x.shape[1]
    known = torch.cat([state, x.to(state.dtype)], dim=1)
    parents = parents_of(ancestors)
    before = torch.arange(-1, history - 1, device=x.device).expand(len(x), -1)
    predecessor = torch.cat([before, parents + history], dim=1).clamp(min=0)  # of each entry of `known`
    entry = torch.arange(history, history + nodes, device=x.device).expand(len(x), -1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in reversed(weight.float().unbind(1)):
        out = out + known.gather(1, entry[:, :, None].expand(-1, -1, x.shape[2])).float() * column
        entry = predecessor.gather(1, entry)
    return out


KIND = Kind("convolution", kept=(0,), constants=(1,), output=0, state=_state, chunk=_chunk, tree=_tree)
