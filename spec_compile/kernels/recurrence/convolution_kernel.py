"""Kernels of short convolutions: the windows of a tree's nodes or of a prompt's tokens, and the commit of a path.

    out_i = weight[:, w - 1] * x_i + weight[:, w - 2] * x_parent(i) + ...    (w terms, see `convolution`)

Import this module only where Triton is installed. A window is summed from its node upwards, so a token has the same
bits in any tree and in a prompt's chunk of any size.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def convolution_kernel(
    x_ptr, weight_ptr,  # [B, tokens, CHANNELS] by its strides, [CHANNELS, WIDTH]
    state_ptr,  # [B, WIDTH, CHANNELS]
    walk_ptr,  # [B, COLUMNS, tokens] of trees; only the last column is read, the parents
    stash_ptr, out_ptr,  # [B, MAX_NODES, CHANNELS] of trees and float32 [B, tokens, CHANNELS], written
    stride_xb, stride_xn, tokens, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MAX_NODES: tl.constexpr, COLUMNS: tl.constexpr, IS_TREE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A node of a tree or a token of a chunk, and BLOCK channels, a program. Grid (tokens, blocks of channels, B)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    node, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    x_ptr += row * stride_xb
    state_ptr += row * WIDTH * CHANNELS
    if IS_TREE:
        walk_ptr += (row * COLUMNS + COLUMNS - 1) * tokens

    # The node's own input, which is also stashed.
    x = tl.load(x_ptr + node * stride_xn + channel, mask=mask, other=0.0)
    if IS_TREE:
        tl.store(stash_ptr + (row * MAX_NODES + node) * CHANNELS + channel, x, mask=mask)
    total = x.to(tl.float32) * tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)

    # Its predecessors: first ancestors, then the state from its end on; `before` counts the inputs read of the state.
    before = 0
    for tap in tl.static_range(1, WIDTH):
        parent = node - 1
        if IS_TREE:
            parent = tl.load(walk_ptr + tl.maximum(node, 0))
        before += tl.where(node < 0, 1, 0)
        node = tl.where(node < 0, -1, parent)
        above, old = tl.where(node < 0, 0, CHANNELS), tl.where(node < 0, CHANNELS, 0)  # one load is masked out
        value = tl.load(x_ptr + node * stride_xn + channel, mask=channel < above, other=0.0)
        value += tl.load(state_ptr + (WIDTH - 1 - before) * CHANNELS + channel, mask=channel < old, other=0.0)
        factor = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - tap, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(value.to(tl.float32), factor, total)
    tl.store(out_ptr + (row * tokens + tl.program_id(0)) * CHANNELS + channel, total, mask=mask)


@triton.jit(do_not_specialize=["nodes", "batch"])
def convolution_commit_kernel(
    table_ptr,  # [layers, 2] int64: addresses of a state [B, HISTORY, CHANNELS] and of its stash
    path_ptr, gained_ptr,  # [B, nodes] int64, [B] int64
    nodes, batch, DTYPE: tl.constexpr, CHANNELS: tl.constexpr, HISTORY: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, MAX_NODES: tl.constexpr,
):  # fmt: skip
    """Move the path's inputs into the states of all layers. Grid (blocks of channels, B, layers).

    HISTORY = 4, state [q, r, s, t], a path with inputs [a, b] and gained = 2 give [s, t, a, b]. DTYPE: an integer
    of the size of the states' elements.
    """
    row = tl.program_id(1).to(tl.int64)
    table_ptr += tl.program_id(2) * 2
    gained = tl.load(gained_ptr + row).to(tl.int32)
    if gained == 0:
        return
    state_ptr = tl.multiple_of(tl.load(table_ptr).to(tl.pointer_type(DTYPE)), 16) + row * HISTORY * CHANNELS
    stash_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(tl.pointer_type(DTYPE)), 16) + row * MAX_NODES * CHANNELS
    entry = tl.arange(0, BLOCK_H)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (entry < HISTORY)[:, None] & (channel < CHANNELS)[None, :]
    # Entry e of the new state is entry e + gained of the old state followed by the path.
    source = entry + gained
    is_old = source < HISTORY
    node = tl.load(path_ptr + row * nodes + tl.maximum(source - HISTORY, 0), mask=(entry < HISTORY) & ~is_old, other=0)
    old = tl.load(state_ptr + source[:, None] * CHANNELS + channel[None, :], mask=mask & is_old[:, None], other=0)
    new = tl.load(stash_ptr + node[:, None] * CHANNELS + channel[None, :], mask=mask & ~is_old[:, None], other=0)
    tl.debug_barrier()  # an entry may be both source and target: every load before any store
    value = tl.where(is_old[:, None], old, new)
    tl.store(state_ptr + entry[:, None] * CHANNELS + channel[None, :], value, mask=mask)
