"""`RecurrenceKind`: the meaning of a recurrence's inputs, and its computation over chains and trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]


@dataclass(frozen=True)
class RecurrenceKind:
    """A layer's recurrence, S_i = f(S_parent(i), inputs of token i), with an output for each token.

    Its inputs are a list of tensors [B, T, ...] with an entry for each token, except the constants. Linear attention
    has [q, k, v, g] and kept = (1, 2, 3), because k, v and g change the state and q only reads it.

    name: its key in `KINDS`.
    kept: numbers of the inputs that change the state; a commit reads them from a stash.
    constants: numbers of the inputs that are weights, without rows and tokens.
    output: number of the input that has the shape of the output; the output is float32.
    state: ``state(inputs)`` is the shape of a row's state, and its dtype.
    chunk: ``chunk(inputs, state, valid)`` is the outputs [B, T, ...] of a chain of T tokens after `state` [B, ...], and
        the state after the first valid[b] tokens. Outputs of later tokens mean nothing. If the inputs that are not kept
        are None, the outputs are None.
    tree: ``tree(inputs, state, ancestors)`` is the outputs of the nodes of a tree after `state`, which is not written.
    """

    name: str
    kept: tuple[int, ...]
    constants: tuple[int, ...]
    output: int
    state: Callable[[Inputs], tuple[tuple[int, ...], torch.dtype]]
    chunk: Callable[[Inputs, Tensor, Tensor], tuple[Tensor | None, Tensor]]
    tree: Callable[[Inputs, Tensor, Tensor], Tensor]


def is_ancestor(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N, N] bool: True at [b, i, j] if node j is node i or an ancestor of it.

    [0b1, 0b11, 0b101] gives [[1, 0, 0], [1, 1, 0], [1, 0, 1]].
    """
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ((ancestors[:, :, None] >> nodes) & 1).bool()


def parents_of(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N] int64: the parent of each node, -1 for the root.

    [0b1, 0b11, 0b101] gives [-1, 0, 0].
    """
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    above = is_ancestor(ancestors) & (nodes[:, None] > nodes)
    return torch.where(above, nodes, -1).amax(dim=2)
