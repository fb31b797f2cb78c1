"""Launches of the kernels of recurrences, which compute what `chunk` and `tree` of a `RecurrenceKind` compute.

A kind has one function for trees and chunks of prompts, and one for commits, in `KERNELS`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tree import MAX_NODES
from ..card import launches_early
from ..launching import address_table
from . import walk as walks
from .kinds import shifted

try:
    import triton
    import triton.language as tl

    from .linear_kernel import linear_attention_kernel, linear_commit_kernel
    from .scan_kernels import (
        channelwise_commit_kernel,
        channelwise_kernel,
        convolution_commit_kernel,
        convolution_kernel,
        selective_commit_kernel,
        selective_kernel,
    )
except ImportError:  # no GPU
    triton = None

COLUMNS = 8
"""Columns of a head's state in a program of linear attention: 32 bytes, the unit in which a GPU reads memory."""
CHANNELS = 256
"""Channels in a program of a convolution."""
LANES = 64
"""Channels in a program of a channelwise recurrence."""
NUMBERS = 512
"""Numbers of a state in a program of the selective scan: channels times entries."""


def has_kernels(kind: str) -> bool:
    """True if kernels compute this kind of recurrence on a GPU."""
    return triton is not None and kind in KERNELS


def supports(kind: str, state: Tensor) -> bool:
    """True if kernels compute this kind of recurrence over this state."""
    return state.is_cuda and has_kernels(kind) and state.dtype != torch.float64


def run(
    kind: str, inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor] | None, walk: Tensor | None,
    valid: Tensor | None,
) -> Tensor:  # fmt: skip
    """Outputs [B, N, ...] float32 of the nodes of trees, or of a chunk of a prompt, after `state`.

    inputs, state: see `advance_or_look`.
    stash: for trees, see `advance_or_look`; the inputs that a commit needs are written to it.
    walk: for trees, [B, 5, N] int32; see `walk.tree_walk`.
    valid: for a chunk, [B]; its first valid[b] tokens update the state in place.
    """
    return KERNELS[kind][0](inputs, state, stash, walk, valid)


def commit(kind: str, states: Sequence[Tensor], stashes: Sequence[Tensor], path: Tensor, gained: Tensor) -> None:
    """Update the states of all layers of one shape by their paths, in one launch."""
    parts = len(stashes) // len(states)
    rows = [[state, *stashes[n * parts : (n + 1) * parts]] for n, state in enumerate(states)]
    addresses = [tuple(tensor.data_ptr() for tensor in row) for row in rows]
    table = address_table("recurrence_commit", states[0].device, addresses)  # [layers, 1 + parts]
    KERNELS[kind][1](table, states, stashes[:parts], path.contiguous(), gained)


def _tokens(x: Tensor) -> Tensor:
    """x [B, N, ...], copied if the numbers of a token are not contiguous."""
    return x if x[:1, :1].is_contiguous() else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """The strides over rows and tokens of each tensor [B, N, ...]."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


# Linear attention: a program has a head and COLUMNS columns of its state.


def _run_linear(inputs, state, stash, walk, valid) -> Tensor:
    # A program keeps states of a tree in `slots` places of `kept`.
    q, k, v, g, *beta = map(_tokens, inputs)
    batch, tokens = v.shape[:2]
    sizes, grid = _linear_sizes(state, inputs[1:]), _linear_grid(state)
    slots = 0 if walk is None else walks.slots(tokens)
    kept = state.new_empty(batch * grid[0] * grid[1] * slots, sizes["BLOCK_DK"] * sizes["BLOCK_DV"])
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)

    # A tree may begin before the kernel ahead of it is done. Without the delta rule nothing reads `beta`.
    beta, stash = beta[0] if beta else g, stash or [None] * 4
    early = walk is not None and launches_early(state.device)
    linear_attention_kernel[(*grid, batch)](
        q, k, v, g, beta, state, kept, walk, valid, *stash[:3], stash[-1], out, *_strides(q, k, v, g, beta), tokens,
        **sizes, SLOTS=slots, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None, EARLY=early, launch_pdl=early,
        num_warps=1,
    )  # fmt: skip
    return out


def _commit_linear(table, states, stash, path, gained) -> None:
    linear_commit_kernel[(*_linear_grid(states[0]), len(states) * len(path))](
        table, path, gained, path.shape[1], len(path), **_linear_sizes(states[0], stash), PARTS=1 + len(stash),
        num_warps=1,
    )  # fmt: skip


def _linear_sizes(state: Tensor, kept: Sequence[Tensor]) -> dict:
    """The constants of both kernels of linear attention. They depend neither on the batch nor on the tokens.

    kept: the inputs that are kept, or their stash.
    """
    (_, heads, dk, dv), key_heads = state.shape, kept[0].shape[2]
    return {
        "HEADS": heads, "GROUP": heads // key_heads, "DK": dk, "DV": dv, "BLOCK_DK": triton.next_power_of_2(dk),
        "BLOCK_DV": COLUMNS, "DELTA": len(kept) == 4, "CHANNELS": kept[2].dim() == 4, "MAX_NODES": MAX_NODES,
    }  # fmt: skip


def _linear_grid(state: Tensor) -> tuple[int, int]:
    return triton.cdiv(state.shape[3], COLUMNS), state.shape[1]


# Convolutions: a program has CHANNELS channels of a token.


def _run_convolution(inputs, state, stash, walk, valid) -> Tensor:
    x, weight = _tokens(inputs[0].to(state.dtype)), inputs[1].contiguous()
    batch, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    early = walk is not None and launches_early(state.device)
    convolution_kernel[(tokens, triton.cdiv(channels, CHANNELS), batch)](
        x, weight, state, walk, stash[0] if stash else None, out, *_strides(x), tokens, CHANNELS=channels,
        WIDTH=weight.shape[1], BLOCK=CHANNELS, MAX_NODES=MAX_NODES, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None,
        EARLY=early, launch_pdl=early, num_warps=2,
    )  # fmt: skip
    if walk is None:
        state.copy_(shifted(state, inputs[0], valid))  # all windows are summed
    return out


def _commit_convolution(table, states, stash, path, gained) -> None:
    batch, history, channels = states[0].shape
    convolution_commit_kernel[(triton.cdiv(channels, CHANNELS), batch, len(states))](
        table, path, gained, path.shape[1], batch, DTYPE=getattr(tl, f"int{8 * states[0].itemsize}"),
        CHANNELS=channels, HISTORY=history, BLOCK_H=triton.next_power_of_2(history), BLOCK=CHANNELS,
        MAX_NODES=MAX_NODES, num_warps=2,
    )  # fmt: skip


# The selective scan: a program has NUMBERS numbers of the state, all entries of some channels.


def _run_selective(inputs, state, stash, walk, valid) -> Tensor:
    if stash:
        stash[3].copy_(inputs[4])  # the constant a, which a commit reads, too
    c, b, x, dt = map(_tokens, inputs[:4])
    batch, tokens, size = x.shape
    blocks, slots = _selective_blocks(state), 0 if walk is None else walks.slots(tokens)
    grid = (triton.cdiv(size, blocks["BLOCK_D"]), batch)
    kept = state.new_empty(grid[0] * batch * slots, blocks["BLOCK_D"] * blocks["BLOCK_N"])
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    selective_kernel[grid](
        c, b, x, dt, inputs[4].contiguous(), state, kept, walk, valid, *(stash[:3] if stash else [None] * 3), out,
        *_strides(c, b, x, dt), tokens, **blocks, SLOTS=slots, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None,
        num_warps=1,
    )  # fmt: skip
    return out


def _commit_selective(table, states, stash, path, gained) -> None:
    blocks = _selective_blocks(states[0])
    selective_commit_kernel[(triton.cdiv(blocks["D"], blocks["BLOCK_D"]), len(path), len(states))](
        table, path, gained, path.shape[1], **blocks, num_warps=1
    )


def _selective_blocks(state: Tensor) -> dict:
    """The constants of both kernels of the selective scan."""
    size, entries = state.shape[1:]
    block = triton.next_power_of_2(entries)
    return {"D": size, "N": entries, "BLOCK_D": max(NUMBERS // block, 1), "BLOCK_N": block, "MAX_NODES": MAX_NODES}


# Channelwise recurrences: a program has LANES channels.


def _run_channelwise(inputs, state, stash, walk, valid) -> Tensor:
    for buffer, weight in zip(stash[2:] if stash else [], inputs[2:]):  # the decay of wkv
        buffer.copy_(weight)
    first, second = map(_tokens, inputs[:2])
    weights = [weight.contiguous() for weight in inputs[2:]] or [None, None]
    batch, tokens, channels = first.shape
    out = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    after = None if walk is None else state.new_empty(batch, tokens, *state.shape[1:])
    channelwise_kernel[(triton.cdiv(channels, LANES), batch)](
        first, second, *weights, state, after, walk, valid, *(stash[:2] if stash else [None] * 2), out,
        *_strides(first, second), tokens, C=channels, BLOCK=LANES, MAX_NODES=MAX_NODES, COLUMNS=walks.COLUMNS,
        WKV=state.dim() == 3, IS_TREE=walk is not None, num_warps=1,
    )  # fmt: skip
    return out


def _commit_channelwise(table, states, stash, path, gained) -> None:
    channels = states[0].shape[-1]
    channelwise_commit_kernel[(triton.cdiv(channels, LANES), len(path), len(states))](
        table, path, gained, path.shape[1], C=channels, BLOCK=LANES, MAX_NODES=MAX_NODES, TENSORS=1 + len(stash),
        WKV=states[0].dim() == 3, num_warps=1,
    )  # fmt: skip


LINEAR, CHANNELWISE = (_run_linear, _commit_linear), (_run_channelwise, _commit_channelwise)
KERNELS = {
    "convolution": (_run_convolution, _commit_convolution), "decay": LINEAR, "delta": LINEAR,
    "selective": (_run_selective, _commit_selective), "gated": CHANNELWISE, "wkv": CHANNELWISE,
}  # fmt: skip
