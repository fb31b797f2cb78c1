"""Recurrences: layers that read a state of fixed size in place of keys and values. A kind is an entry here.

Capture sees the op `recurrence`, a function of a whole sequence. The graphs of the runtime call `advance_or_look`: it
updates a state by a chunk of a prompt, or computes the nodes of a tree after a state without updating it. `commit`
updates the state by the accepted path. A state is read and written only there. In reading order: `kinds` (the meaning
and the plain forms), `walk`, `linear_kernel` and `scan_kernels`, `launch`.
"""

import torch
from torch import Tensor

from ...tree import MAX_NODES
from ..launching import new_op
from . import launch
from .kinds import CONVOLUTION, DECAY, DELTA, GATED, SELECTIVE, WKV, RecurrenceKind
from .walk import tree_walk

KINDS: dict[str, RecurrenceKind] = {kind.name: kind for kind in (CONVOLUTION, DECAY, DELTA, SELECTIVE, GATED, WKV)}


def _empty_output(kind: str, inputs: list[Tensor], *_) -> Tensor:
    x = inputs[KINDS[kind].output]
    return x.new_empty(x.shape, dtype=torch.float32)


@new_op("recurrence", _empty_output)
def recurrence(kind: str, inputs: list[Tensor]) -> Tensor:
    """A recurrence over a whole sequence, from a state of zeros; capture puts it in place of a model's own.

    kind, inputs: see `kinds`. -> [B, T, ...] float32, contiguous.
    """
    state = initial_state(kind, inputs, len(inputs[0]))
    tokens = torch.full((len(inputs[0]),), inputs[0].shape[1], device=inputs[0].device)
    return recurrence_advance(kind, inputs, state, tokens)


@new_op("clamp_prompt", lambda x, low, high: torch.empty_like(x))
def clamp_prompt(x: Tensor, low: float, high: float) -> Tensor:
    """x [B, T, ...] clamped; the marker of `clamp_in_prompt`.

    Only prompts are clamped: transformers' forward over one generated token has no clamp (Nemotron-H, Zamba2).
    """
    return x.clamp(low, high)


def clamp_in_prompt(x: Tensor, low: float, high: float, positions: Tensor, prompt_lengths: Tensor) -> Tensor:
    """x [B, T, H] clamped where positions [B, T] are below prompt_lengths [B]."""
    return torch.where((positions < prompt_lengths[:, None])[:, :, None], x.clamp(low, high), x)


def initial_state(kind: str, inputs: list[Tensor], batch: int) -> Tensor:
    """The state of `batch` rows before their first token."""
    shape, dtype = KINDS[kind].state(inputs)
    return torch.zeros(batch, *shape, dtype=dtype, device=inputs[0].device)


def stash_shapes(kind: str, inputs: list[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """For each input that is kept: the shape without the batch, the dtype, and True if all rows share it."""
    shapes = []
    for number in KINDS[kind].kept:
        x, is_constant = inputs[number], number in KINDS[kind].constants
        shapes.append((tuple(x.shape) if is_constant else (MAX_NODES, *x.shape[2:]), x.dtype, is_constant))
    return shapes


def walk_of(ancestors: Tensor | None) -> Tensor | None:
    """The `tree_walk` of trees, which all recurrences of a graph share; None for a chunk of a prompt."""
    return None if ancestors is None else tree_walk(ancestors)


@torch.fx.node.has_side_effect
def advance_or_look(
    kind: str, inputs: list[Tensor], state: Tensor, stash: list[Tensor], valid: Tensor, ancestors: Tensor | None,
    walk: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A recurrence over a block of N tokens after `state`. -> [B, N, ...] float32.

    kind, inputs: see `kinds`.
    state: [B, ...]; updated by a chunk of a prompt, only read by a tree.
    stash: tensors of `stash_shapes`; a tree writes the inputs that `commit` needs.
    valid: [B]; how many tokens of a chunk update the state.
    ancestors: [B, N] int64, the bits of a tree as `AttentionCall` has them; None: a chunk of a prompt.
    walk: the `tree_walk` of `ancestors`, if it was computed before.
    """
    if ancestors is None:
        return torch.ops.spec_compile.recurrence_advance(kind, inputs, state, valid)
    if launch.supports(kind, state):
        walk = tree_walk(ancestors) if walk is None else walk
        return torch.ops.spec_compile.recurrence_tree(kind, inputs, state, stash, walk)

    # In plain PyTorch: keep the inputs for a commit, then compute all nodes.
    for buffer, number in zip(stash, KINDS[kind].kept):
        if number in KINDS[kind].constants:
            buffer.copy_(inputs[number])
        else:
            buffer[:, : inputs[number].shape[1]] = inputs[number]
    return KINDS[kind].tree(inputs, state, ancestors)


@new_op("recurrence_advance", _empty_output, writes=("state",))
def recurrence_advance(kind: str, inputs: list[Tensor], state: Tensor, valid: Tensor) -> Tensor:
    """Outputs of a chunk, whose first valid[b] tokens update the state in place.

    An op, because the number of blocks is not fixed.
    """
    if launch.supports(kind, state):
        return launch.run(kind, inputs, state, None, None, valid)
    out, after = KINDS[kind].chunk(inputs, state, valid)
    state.copy_(after)
    return out.contiguous()


@new_op("recurrence_tree", _empty_output, writes=("stash",))
def recurrence_tree(kind: str, inputs: list[Tensor], state: Tensor, stash: list[Tensor], walk: Tensor) -> Tensor:
    """`advance_or_look` over the nodes of trees by a kernel."""
    return launch.run(kind, inputs, state, stash, walk, None)


@torch.library.custom_op("spec_compile::recurrence_commit", mutates_args=("states",))
def commit(kind: str, states: list[Tensor], stashes: list[Tensor], path: Tensor, gained: Tensor) -> None:
    """Update states of one shape by the first gained[b] nodes of the path [B, N] int64.

    A row that gained none keeps the bits of its state. stashes: the stash of the first state, then of the second, ...
    """
    if launch.supports(kind, states[0]):
        return launch.commit(kind, states, stashes, path, gained)

    # In plain PyTorch: a chunk of the kept inputs along the path, layer by layer.
    parts, rows = len(stashes) // len(states), torch.arange(len(path), device=path.device)[:, None]
    for number, state in enumerate(states):
        inputs: list[Tensor | None] = [None] * (max(KINDS[kind].kept + KINDS[kind].constants) + 1)
        for buffer, each in zip(stashes[number * parts :], KINDS[kind].kept):
            inputs[each] = buffer if each in KINDS[kind].constants else buffer[rows, path]
        after = KINDS[kind].chunk(inputs, state, gained)[1]
        state.copy_(torch.where((gained > 0).view(-1, *[1] * (state.dim() - 1)), after, state))
