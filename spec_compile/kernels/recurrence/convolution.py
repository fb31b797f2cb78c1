"""Short depthwise convolution over a token and its predecessors, with the last w committed inputs as its state.

    out_i = weight[:, w - 1] * x_i + weight[:, w - 2] * x_parent(i) + ...    (w terms)

Inputs: x [B, T, C]; weight [C, w]. State [B, w, C] of x's dtype, the oldest input first. No window reaches the oldest;
it is kept because caches of transformers have it. With w = 4 and the state [q, r, s, t], a root a with children b and c
has the windows [r, s, t, a], [s, t, a, b] and [s, t, a, c].
"""

import torch
from torch import Tensor

from .kinds import Inputs, RecurrenceKind, parents_of


def _state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    x, weight = inputs
    return (weight.shape[1], x.shape[2]), x.dtype


def shifted(state: Tensor, x: Tensor, valid: Tensor) -> Tensor:
    """The state [B, w, C] after the first valid[b] inputs of x [B, T, C]: the last of the state and of these.

    Entry e is entry e + valid of [state, x]. w = 4, the state [q, r, s, t] and x [a, b, c] give [s, t, a, b] if valid
    is 2.
    """
    history = state.shape[1]
    source = (valid[:, None] + torch.arange(history, device=x.device))[:, :, None].expand_as(state)
    old = state.gather(1, source.clamp(max=history - 1))
    new = x.gather(1, (source - history).clamp(min=0)).to(state.dtype)
    return torch.where(source < history, old, new)


def _chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    x, weight = inputs
    after = shifted(state, x, valid)
    if weight is None:
        return None, after
    known = torch.cat([state[:, 1:], x.to(state.dtype)], dim=1)
    columns = weight.float().unbind(1)
    return sum(known[:, tap : tap + x.shape[1]].float() * column for tap, column in enumerate(columns)), after


def _tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    """`known` has the state and then the nodes; each of its entries has a predecessor among them.

    w = 4, parents [-1, 0, 0]: known = [r, s, t, a, b, c], predecessor = [0, 0, 1, 2, 3, 3]; the first entry has none,
    and no window reaches beyond it.
    """
    x, weight = inputs
    history, nodes = state.shape[1] - 1, x.shape[1]
    known = torch.cat([state[:, 1:], x.to(state.dtype)], dim=1)
    parents = parents_of(ancestors)
    before = torch.arange(-1, history - 1, device=x.device).expand(len(x), -1)
    predecessor = torch.cat([before, parents + history], dim=1).clamp(min=0)
    entry = torch.arange(history, history + nodes, device=x.device).expand(len(x), -1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in reversed(weight.float().unbind(1)):
        out = out + known.gather(1, entry[:, :, None].expand(-1, -1, x.shape[2])).float() * column
        entry = predecessor.gather(1, entry)
    return out


KIND = RecurrenceKind("convolution", kept=(0,), constants=(1,), output=0, state=_state, chunk=_chunk, tree=_tree)
