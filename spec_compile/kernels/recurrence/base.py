"""What a kind of recurrence is: the meaning of its inputs, and its three forms over a state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]


@dataclass(frozen=True)
class Kind:
    """A layer's recurrence, S_i = f(S_parent(i), inputs of token i), with an output for each token.

    Inputs are [B, T, ...] with an entry for each token, but for those numbered in `constants`. kept: numbers of the
    inputs that lead from a state to the next one; a commit reads them from a stash. The others only read the state.
    state: shape of a row's state, and its dtype, from the inputs. output: number of the input that has the output's
    shape; the output is float32.
    chunk(inputs, state, valid): outputs [B, T, ...] of a chain of T tokens behind `state` [B, ...], and the state
    behind the first valid[b] of them; the other outputs mean nothing. Where the inputs are None that are not `kept`,
    there are no outputs.
    tree(inputs, state, ancestors): outputs of the nodes of a tree behind `state`, which is not written.
    """

    name: str
    kept: tuple[int, ...]
    constants: tuple[int, ...]
    output: int
    state: Callable[[Inputs], tuple[tuple[int, ...], torch.dtype]]
    chunk: Callable[[Inputs, Tensor, Tensor], tuple[Tensor | None, Tensor]]
    tree: Callable[[Inputs, Tensor, Tensor], Tensor]


def is_ancestor(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N, N] bool: whether node j is node i or above it."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ((ancestors[:, :, None] >> nodes) & 1).bool()


def parents_of(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N] int64: the parent of each node; -1 for the root."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    above = is_ancestor(ancestors) & (nodes[:, None] > nodes)
    return torch.where(above, nodes, -1).amax(dim=2)
