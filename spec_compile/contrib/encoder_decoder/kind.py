"""The recurrence of kind "source": attention to a source, whose keys and values are a state that no token changes.

Inputs: q [B, T, H, D], scaled; the weights example [H, S', W], a part of a row's state, and room [S], whose values mean
nothing. State [B, H, S, W] of the model's dtype, W = 2 D + 8: for each place of the source its key, its value, and
`SEEN` or `HIDDEN` (eight times, which keeps rows aligned). A row whose state is 0 has no source yet; the first chunk of
its text gives it the example.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.recurrence.kinds import Inputs, RecurrenceKind

SEEN, HIDDEN = 1.0, -1.0
"""Marks of places that tokens attend to, and of those that they do not: padding, and places after the source's end."""
MARKS = 8


def pack(keys: Tensor, values: Tensor, seen: Tensor | None, room: int) -> Tensor:
    """The state [B, H, room, 2 D + 8] of sources with keys and values [B, H, S, D].

    seen: bool [B, S], False at padding; None: all True.
    """
    batch, heads, places, _ = keys.shape
    marks = keys.new_full((batch, heads, places, MARKS), SEEN)
    if seen is not None:
        marks = marks.masked_fill(~seen[:, None, :, None], HIDDEN)
    return F.pad(torch.cat([keys, values, marks], dim=3), (0, 0, 0, room - places), value=HIDDEN)


def attend(q: Tensor, state: Tensor) -> Tensor:
    """softmax(q k^T) v over the places that are seen; [B, T, H, D] float32."""
    if not state.is_cuda:  # a GPU's host does not wait to know the longest source; room for 1,024 may hold 20
        is_seen = (state[:, 0, :, -1] >= 0).any(dim=0)
        state = state[:, :, : int(is_seen.nonzero().amax()) + 1 if is_seen.any() else 1]
    keys, values, marks = state.split([q.shape[3], q.shape[3], MARKS], dim=3)
    seen = marks[:, :1, None, :, 0] >= 0  # [B, 1, 1, S]; also in a row without a source, so that no sum is empty
    out = F.scaled_dot_product_attention(q.transpose(1, 2).to(state.dtype), keys, values, seen, scale=1.0)
    return out.transpose(1, 2).float()


def chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    q, example, room = inputs
    is_empty = state[:, :1, :1, -1:] == 0
    if state.is_cuda or is_empty.any():  # a host does not wait for a GPU
        first = F.pad(example, (0, 0, 0, len(room) - example.shape[1]), value=HIDDEN)
        state = torch.where(is_empty, first.to(state.dtype), state)
    return attend(q, state), state


def tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    return attend(inputs[0], state).contiguous()


SOURCE = RecurrenceKind(
    "source", kept=(), constants=(1, 2), output=0, chunk=chunk, tree=tree,
    state=lambda inputs: ((len(inputs[1]), len(inputs[2]), inputs[1].shape[2]), inputs[0].dtype),
)  # fmt: skip
