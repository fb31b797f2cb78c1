"""Launches of the kernels of recurrences, which compute what `chunk` and `tree` of a `RecurrenceKind` compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tree import MAX_NODES
from .. import dependent_launch
from . import walk as walks
from .convolution import shifted

try:
    import triton
    import triton.language as tl

    from .channelwise_kernel import channelwise_commit_kernel, channelwise_kernel
    from .convolution_kernel import convolution_commit_kernel, convolution_kernel
    from .linear_kernel import linear_attention_kernel, linear_commit_kernel
    from .selective_kernel import selective_commit_kernel, selective_kernel
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
    return triton is not None and kind in TREES


def serves(kind: str, state: Tensor) -> bool:
    """True if kernels compute this kind of recurrence over this state."""
    return state.is_cuda and has_kernels(kind) and state.dtype != torch.float64


def tree(kind: str, inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor], walk: Tensor) -> Tensor:
    """Outputs [B, N, ...] float32 of the nodes of trees after `state`; the inputs that a commit needs go to the stash.

    inputs, state, stash: see `advance_or_look`.
    walk: [B, 5, N] int32; see `walk.tree_walk`.
    """
    return TREES[kind](inputs, state, stash, walk)


def commit(kind: str, states: Sequence[Tensor], stashes: Sequence[Tensor], path: Tensor, gained: Tensor) -> None:
    """Update the states of all layers of one shape by their paths, in one launch."""
    COMMITS[kind](states, stashes, path.contiguous(), gained)


_tables: dict[tuple[int, ...], Tensor] = {}
"""Tables of the addresses of states and stashes, on the device. They are kept because captured graphs read them."""


def _table(states: Sequence[Tensor], stashes: Sequence[Tensor]) -> Tensor:
    """The addresses of each layer's state and stash, [layers, 1 + parts] int64."""
    parts, device = len(stashes) // len(states), states[0].device
    rows = [[state, *stashes[n * parts : (n + 1) * parts]] for n, state in enumerate(states)]
    key = tuple(tensor.data_ptr() for row in rows for tensor in row)
    if key not in _tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("recurrence_commit must run once with these states before a graph is captured")
        _tables[key] = torch.tensor(key, dtype=torch.int64, device=device).view(len(states), -1)
    return _tables[key]


def _tokens(x: Tensor) -> Tensor:
    """x [B, N, ...], copied if the numbers of a token are not contiguous."""
    return x if x[:1, :1].is_contiguous() else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _linear_tree(inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor], walk: Tensor) -> Tensor:
    return _linear_attention(inputs, state, stash, walk, None, dependent_launch.available(state))


def linear_chunk(inputs: Sequence[Tensor], state: Tensor, valid: Tensor) -> Tensor:
    """Outputs [B, T, H, Dv] of a chunk of a prompt, whose first valid[b] tokens update the state in place."""
    return _linear_attention(inputs, state, [None] * 4, None, valid, False)


def _linear_attention(inputs, state, stash, walk, valid, early: bool) -> Tensor:
    q, k, v, g, *beta = map(_tokens, inputs)
    batch, tokens = v.shape[:2]
    sizes, grid = _linear(state, inputs[1:]), _linear_grid(state)
    slots = 0 if walk is None else walks.slots(tokens)
    kept = state.new_empty(batch * grid[0] * grid[1] * slots, sizes["BLOCK_DK"] * sizes["BLOCK_DV"])
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    beta = beta[0] if beta else g
    linear_attention_kernel[(*grid, batch)](
        q, k, v, g, beta, state, kept, walk, valid, *stash[:3], stash[-1], out, *_strides(q, k, v, g, beta), tokens,
        **sizes, SLOTS=slots, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None, EARLY=early, num_warps=1,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def _linear_commit(states, stashes, path, gained) -> None:
    grid, parts = _linear_grid(states[0]), len(stashes) // len(states)
    linear_commit_kernel[(*grid, len(states) * len(path))](
        _table(states, stashes), path, gained, path.shape[1], len(path), **_linear(states[0], stashes[:parts]),
        PARTS=1 + parts, num_warps=1,
    )  # fmt: skip


def _linear(state: Tensor, kept: Sequence[Tensor]) -> dict:
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


def _convolution_tree(inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor], walk: Tensor) -> Tensor:
    return _convolution(inputs, state, stash[0], walk, dependent_launch.available(state))


def convolution_chunk(inputs: Sequence[Tensor], state: Tensor, valid: Tensor) -> Tensor:
    """Outputs [B, T, C] of a chunk of a prompt, whose first valid[b] tokens update the state in place."""
    out = _convolution(inputs, state, None, None, False)
    state.copy_(shifted(state, inputs[0], valid))  # all windows are summed
    return out


def _convolution(inputs, state, stash, walk, early: bool) -> Tensor:
    x, weight = _tokens(inputs[0].to(state.dtype)), inputs[1].contiguous()
    batch, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    convolution_kernel[(tokens, triton.cdiv(channels, CHANNELS), batch)](
        x, weight, state, walk, stash, out, *_strides(x), tokens, CHANNELS=channels, WIDTH=weight.shape[1],
        BLOCK=CHANNELS, MAX_NODES=MAX_NODES, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None, EARLY=early, num_warps=2,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def _convolution_commit(states, stashes, path, gained) -> None:
    batch, history, channels = states[0].shape
    convolution_commit_kernel[(triton.cdiv(channels, CHANNELS), batch, len(states))](
        _table(states, stashes), path, gained, path.shape[1], batch, DTYPE=getattr(tl, f"int{8 * states[0].itemsize}"),
        CHANNELS=channels, HISTORY=history, BLOCK_H=triton.next_power_of_2(history), BLOCK=CHANNELS,
        MAX_NODES=MAX_NODES, num_warps=2,
    )  # fmt: skip


def _selective_tree(inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor], walk: Tensor) -> Tensor:
    stash[3].copy_(inputs[4])
    return _selective(inputs, state, stash, walk, None)


def selective_chunk(inputs: Sequence[Tensor], state: Tensor, valid: Tensor) -> Tensor:
    """Outputs [B, T, d] of a chunk of a prompt, whose first valid[b] tokens update the state in place."""
    return _selective(inputs, state, [None] * 3, None, valid)


def _selective(inputs, state, stash, walk, valid) -> Tensor:
    c, b, x, dt = map(_tokens, inputs[:4])
    batch, tokens, size = x.shape
    blocks, slots = _selective_blocks(state), 0 if walk is None else walks.slots(tokens)
    grid = (triton.cdiv(size, blocks["BLOCK_D"]), batch)
    kept = state.new_empty(grid[0] * batch * slots, blocks["BLOCK_D"] * blocks["BLOCK_N"])
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    selective_kernel[grid](
        c, b, x, dt, inputs[4].contiguous(), state, kept, walk, valid, *stash[:3], out, *_strides(c, b, x, dt), tokens,
        **blocks, SLOTS=slots, COLUMNS=walks.COLUMNS, IS_TREE=walk is not None, num_warps=1,
    )  # fmt: skip
    return out


def _selective_commit(states, stashes, path, gained) -> None:
    blocks = _selective_blocks(states[0])
    selective_commit_kernel[(triton.cdiv(blocks["D"], blocks["BLOCK_D"]), len(path), len(states))](
        _table(states, stashes), path, gained, path.shape[1], **blocks, num_warps=1
    )


def _selective_blocks(state: Tensor) -> dict:
    size, entries = state.shape[1:]
    block = triton.next_power_of_2(entries)
    return {"D": size, "N": entries, "BLOCK_D": max(NUMBERS // block, 1), "BLOCK_N": block, "MAX_NODES": MAX_NODES}


def _channelwise_tree(inputs: Sequence[Tensor], state: Tensor, stash: Sequence[Tensor], walk: Tensor) -> Tensor:
    for buffer, weight in zip(stash[2:], inputs[2:]):  # of wkv, the decay
        buffer.copy_(weight)
    return _channelwise(inputs, state, stash, walk, None)


def channelwise_chunk(inputs: Sequence[Tensor], state: Tensor, valid: Tensor) -> Tensor:
    """Outputs [B, T, C] of a chunk of a prompt, whose first valid[b] tokens update the state in place."""
    return _channelwise(inputs, state, [None] * 2, None, valid)


def _channelwise(inputs, state, stash, walk, valid) -> Tensor:
    first, second = map(_tokens, inputs[:2])
    weights = [weight.contiguous() for weight in inputs[2:]] or [None, None]
    batch, tokens, channels = first.shape
    out = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    after = None if walk is None else state.new_empty(batch, tokens, *state.shape[1:])
    channelwise_kernel[(triton.cdiv(channels, LANES), batch)](
        first, second, *weights, state, after, walk, valid, *stash[:2], out, *_strides(first, second), tokens,
        C=channels, BLOCK=LANES, MAX_NODES=MAX_NODES, COLUMNS=walks.COLUMNS, WKV=state.dim() == 3,
        IS_TREE=walk is not None, num_warps=1,
    )  # fmt: skip
    return out


def _channelwise_commit(states, stashes, path, gained) -> None:
    channels = states[0].shape[-1]
    channelwise_commit_kernel[(triton.cdiv(channels, LANES), len(path), len(states))](
        _table(states, stashes), path, gained, path.shape[1], C=channels, BLOCK=LANES, MAX_NODES=MAX_NODES,
        TENSORS=1 + len(stashes) // len(states), WKV=states[0].dim() == 3, num_warps=1,
    )  # fmt: skip


CHUNKS = {
    "convolution": convolution_chunk, "decay": linear_chunk, "delta": linear_chunk, "selective": selective_chunk,
    "gated": channelwise_chunk, "wkv": channelwise_chunk,
}  # fmt: skip
TREES = {
    "convolution": _convolution_tree, "decay": _linear_tree, "delta": _linear_tree, "selective": _selective_tree,
    "gated": _channelwise_tree, "wkv": _channelwise_tree,
}  # fmt: skip
COMMITS = {
    "convolution": _convolution_commit, "decay": _linear_commit, "delta": _linear_commit,
    "selective": _selective_commit, "gated": _channelwise_commit, "wkv": _channelwise_commit,
}  # fmt: skip
