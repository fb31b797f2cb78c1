"""Kernels of the selective scan, of channelwise recurrences and of short convolutions.

Each kind has a kernel for the nodes of a tree or the tokens of a prompt's chunk, and one that commits a path. All
update and read a state token by token with the same code, so a token has the same bits in any tree and in a chunk of
any size.
Import this module only where Triton is installed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import sum_in_pairs
from .walk import keep, resume

LOWEST = tl.constexpr(-1e38)

# The selective scan:
#
#     h' = e^(dt a) h + (dt x) b^T        y = h' c
#
# A program has BLOCK_D channels and all BLOCK_N entries of their states.


@triton.jit
def lead(tile, b, x, dt, a):
    """The state [BLOCK_D, BLOCK_N] after a token: b [BLOCK_N], x, dt [BLOCK_D], a [BLOCK_D, BLOCK_N]."""
    return tl.fma((dt * x)[:, None], b[None, :], tl.exp(dt[:, None] * a) * tile)


@triton.jit
def read(tile, c, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """The output [BLOCK_D] of the state after a token. Products are rounded before they are added, because the state
    of a tree and of a chunk may lie in other threads, and a compiler could fuse a product and a sum in one of them."""
    products = tl.fma(tile, c[None, :] + tl.zeros_like(tile), tl.zeros_like(tile))
    return sum_in_pairs(products, BLOCK_D, BLOCK_N)


@triton.jit
def load_token(pointers, strides, token, channel, entry, D: tl.constexpr, N: tl.constexpr):
    """The c, b [BLOCK_N], x, dt [BLOCK_D] of a token: pointers to a row of the batch, and their strides over tokens."""
    c_ptr, b_ptr, x_ptr, dt_ptr = pointers
    stride_c, stride_b, stride_x, stride_dt = strides
    c = tl.load(c_ptr + token * stride_c + entry, mask=entry < N, other=0.0)
    b = tl.load(b_ptr + token * stride_b + entry, mask=entry < N, other=0.0)
    x = tl.load(x_ptr + token * stride_x + channel, mask=channel < D, other=0.0)
    dt = tl.load(dt_ptr + token * stride_dt + channel, mask=channel < D, other=0.0)
    return c, b, x, dt


@triton.jit(do_not_specialize=["tokens"])
def selective_kernel(
    c_ptr, b_ptr, x_ptr, dt_ptr, a_ptr,  # [B, tokens, N] (c and b), [B, tokens, D] (x and dt), [D, N]
    state_ptr, kept_ptr,  # [B, D, N], written by a chunk; [programs, SLOTS, BLOCK_D, BLOCK_N]
    walk_ptr, valid_ptr,  # [B, COLUMNS, tokens] of trees, [B] of a chunk
    b_stash_ptr, x_stash_ptr, dt_stash_ptr, out_ptr,  # as the inputs, of MAX_NODES; [B, tokens, D]; written
    stride_cb, stride_cn, stride_bb, stride_bn, stride_xb, stride_xn, stride_db, stride_dn,
    tokens, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    MAX_NODES: tl.constexpr, COLUMNS: tl.constexpr, IS_TREE: tl.constexpr,
):  # fmt: skip
    """Outputs of the nodes of a tree in the order of the `walk`, and their stash; or outputs of a chunk of a prompt,
    whose first valid[b] tokens update the state. Grid (blocks of D, B)."""
    # This program's part of the state, of the inputs, of the stash and of the output.
    row = tl.program_id(1).to(tl.int64)
    program = row * tl.num_programs(0) + tl.program_id(0)
    channel, entry = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    inside = (channel < D)[:, None] & (entry < N)[None, :]
    at = channel[:, None] * N + entry[None, :]
    state_ptr += row * D * N
    tile = tl.load(state_ptr + at, mask=inside, other=0.0)
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    kept_at = kept_ptr + program * SLOTS * BLOCK_D * BLOCK_N + tl.arange(0, BLOCK_D)[:, None] * BLOCK_N + entry[None, :]
    c_ptr, b_ptr = c_ptr + row * stride_cb, b_ptr + row * stride_bb
    x_ptr, dt_ptr = x_ptr + row * stride_xb, dt_ptr + row * stride_db
    out_ptr += row * tokens * D
    valid = tokens
    if IS_TREE:
        walk_ptr += row * COLUMNS * tokens
        b_stash_ptr += row * MAX_NODES * N
        x_stash_ptr += row * MAX_NODES * D
        dt_stash_ptr += row * MAX_NODES * D
    else:
        valid = tl.load(valid_ptr + row).to(tl.int32)

    # Begin with the root of a tree, or a chunk's first token: node 0.
    node = tokens - tokens
    pointers, strides = (c_ptr, b_ptr, x_ptr, dt_ptr), (stride_cn, stride_bn, stride_xn, stride_dn)
    c, b, x, dt = load_token(pointers, strides, node, channel, entry, D, N)
    for step in range(tokens):
        # Load the inputs of the next token while this one is computed; resume the parent's state if a slot keeps it.
        next_node = tl.minimum(step + 1, tokens - 1)
        if IS_TREE:
            next_node = tl.load(walk_ptr + next_node)
            tile = resume(tile, walk_ptr, kept_at, tokens, step, BLOCK_D * BLOCK_N)
        following = load_token(pointers, strides, next_node, channel, entry, D, N)

        # The state after this token becomes the program's if the node has children, or if the token counts.
        after = lead(tile, b, x, dt, a)
        out = read(after, c, BLOCK_D, BLOCK_N)
        tl.store(out_ptr + node.to(tl.int64) * D + channel, out, mask=channel < D)
        if IS_TREE:
            leads = tl.load(walk_ptr + 2 * tokens + step) != 0
        else:
            leads = valid > step
        if leads:
            tile = after

        # Keep the state for a later child, and stash the inputs for a commit.
        if IS_TREE:
            keep(tile, walk_ptr, kept_at, tokens, step, BLOCK_D * BLOCK_N)
            tl.store(x_stash_ptr + node * D + channel, x, mask=channel < D)
            tl.store(dt_stash_ptr + node * D + channel, dt, mask=channel < D)
            if tl.program_id(0) == 0:
                tl.store(b_stash_ptr + node * N + entry, b, mask=entry < N)
        node = next_node
        c, b, x, dt = following
    if not IS_TREE:
        tl.store(state_ptr + at, tile, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def selective_commit_kernel(
    table_ptr,  # [layers, 5] int64: addresses of a state, and of its stash b, x, dt and a
    path_ptr, gained_ptr,  # [B, nodes] int64, [B] int64
    nodes, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MAX_NODES: tl.constexpr,
):  # fmt: skip
    """Update the states of all layers by the first gained[b] nodes of the path. Grid (blocks of D, B, layers)."""
    row = tl.program_id(1).to(tl.int64)
    table_ptr += tl.program_id(2) * 5
    gained = tl.load(gained_ptr + row).to(tl.int32)
    if gained == 0:
        return

    # This row's part of the layer's state and stash.
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    state_ptr = tl.multiple_of(tl.load(table_ptr).to(FLOATS), 16) + row * D * N
    b_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(FLOATS), 16) + row * MAX_NODES * N
    x_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(FLOATS), 16) + row * MAX_NODES * D
    dt_ptr = tl.multiple_of(tl.load(table_ptr + 3).to(FLOATS), 16) + row * MAX_NODES * D
    a_ptr = tl.multiple_of(tl.load(table_ptr + 4).to(FLOATS), 16)

    channel, entry = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    inside = (channel < D)[:, None] & (entry < N)[None, :]
    at = channel[:, None] * N + entry[None, :]
    tile = tl.load(state_ptr + at, mask=inside, other=0.0)
    a = tl.load(a_ptr + at, mask=inside, other=0.0)

    # One step for each accepted node.
    for step in range(gained):
        node = tl.load(path_ptr + row * nodes + step).to(tl.int32)
        _, b, x, dt = load_token((b_ptr, b_ptr, x_ptr, dt_ptr), (N, N, D, D), node, channel, entry, D, N)
        tile = lead(tile, b, x, dt, a)
    tl.store(state_ptr + at, tile, mask=inside)


# Channelwise recurrences:
#
#     gated:  n' = a n + x                                              y = n'
#     wkv:    n' = e^w n + e^k v,  d' = e^w d + e^k                     y = (n + e^(u + k) v) / (d + e^(u + k))
#
# A program has BLOCK channels. It writes the state after every node of a tree to memory, because a state is as small as
# the inputs of a few tokens. Each lane reads only what it has written. n and d are held divided by e^m, see `kinds`.


@triton.jit
def read_channels(n, d, m, k, v, w, u, WKV: tl.constexpr):
    """The output of a token; all [BLOCK]. Without WKV: x and a in place of k and v."""
    if WKV:
        top = tl.maximum(m, u + k)
        old, new = tl.exp(m - top), tl.exp(u + k - top)
        return tl.fma(old, n, new * v) / tl.fma(old, d, new)
    else:
        return tl.fma(v, n, k)


@triton.jit
def lead_channels(n, d, m, k, v, w, WKV: tl.constexpr):
    """The state after a token, its three parts [BLOCK]. Without WKV only the first changes."""
    if WKV:
        top = tl.maximum(m + w, k)
        old, new = tl.exp(m + w - top), tl.exp(k - top)
        return tl.fma(old, n, new * v), tl.fma(old, d, new), top
    else:
        return tl.fma(v, n, k), d, m


@triton.jit
def load_state(state_ptr, channel, mask, C: tl.constexpr, WKV: tl.constexpr):
    """The three parts [BLOCK] of a state; a sum of no weights has the lowest exponent."""
    n = tl.load(state_ptr + channel, mask=mask, other=0.0)
    if WKV:
        d = tl.load(state_ptr + C + channel, mask=mask, other=0.0)
        m = tl.load(state_ptr + 2 * C + channel, mask=mask, other=0.0)
        return n, d, tl.where(d > 0, m, LOWEST)
    else:
        return n, n, n


@triton.jit
def store_state(state_ptr, n, d, m, channel, mask, C: tl.constexpr, WKV: tl.constexpr):
    tl.store(state_ptr + channel, n, mask=mask)
    if WKV:
        tl.store(state_ptr + C + channel, d, mask=mask)
        tl.store(state_ptr + 2 * C + channel, m, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def channelwise_kernel(
    k_ptr, v_ptr, w_ptr, u_ptr,  # [B, tokens, C] by their strides; [C] with WKV
    state_ptr, after_ptr,  # [B, PARTS, C], written by a chunk; [B, tokens, PARTS, C] of a tree, written
    walk_ptr, valid_ptr,  # [B, COLUMNS, tokens] of trees, only the last column is read, the parents; [B] of a chunk
    k_stash_ptr, v_stash_ptr, out_ptr,  # [B, MAX_NODES, C] of trees, [B, tokens, C]; written
    stride_kb, stride_kn, stride_vb, stride_vn, tokens, C: tl.constexpr, BLOCK: tl.constexpr, MAX_NODES: tl.constexpr,
    COLUMNS: tl.constexpr, WKV: tl.constexpr, IS_TREE: tl.constexpr,
):  # fmt: skip
    """Outputs of the nodes of a tree and their stash, or of a chunk, whose first valid[b] tokens update the state. Grid
    (blocks of C, B)."""
    # The committed state of this program's channels, and the constants of wkv.
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < C
    PARTS: tl.constexpr = 3 if WKV else 1
    state_ptr += row * PARTS * C
    n, d, m = load_state(state_ptr, channel, mask, C, WKV)
    w, u = n, n
    if WKV:
        w, u = tl.load(w_ptr + channel, mask=mask, other=0.0), tl.load(u_ptr + channel, mask=mask, other=0.0)

    # This row of the walk, of the memory for states and of the stash; or how many tokens of a chunk count.
    valid = tokens
    if IS_TREE:
        walk_ptr += (row * COLUMNS + COLUMNS - 1) * tokens
        after_ptr += row * tokens * PARTS * C
        k_stash_ptr += row * MAX_NODES * C
        v_stash_ptr += row * MAX_NODES * C
    else:
        valid = tl.load(valid_ptr + row).to(tl.int32)

    # One token after the other. A node follows from the state after its parent.
    for token in range(tokens):
        k = tl.load(k_ptr + row * stride_kb + token * stride_kn + channel, mask=mask, other=0.0)
        v = tl.load(v_ptr + row * stride_vb + token * stride_vn + channel, mask=mask, other=0.0)
        if IS_TREE:
            parent = tl.load(walk_ptr + token)
            if parent >= 0:  # only the root has none, and it comes first  # guard: state-of-the-root
                n, d, m = load_state(after_ptr + parent * PARTS * C, channel, mask, C, WKV)
        tl.store(out_ptr + (row * tokens + token) * C + channel, read_channels(n, d, m, k, v, w, u, WKV), mask=mask)
        next_n, next_d, next_m = lead_channels(n, d, m, k, v, w, WKV)
        if IS_TREE:  # keep the state for the children, and stash the inputs for a commit
            store_state(after_ptr + token * PARTS * C, next_n, next_d, next_m, channel, mask, C, WKV)
            tl.store(k_stash_ptr + token * C + channel, k, mask=mask)
            tl.store(v_stash_ptr + token * C + channel, v, mask=mask)
        elif token < valid:
            n, d, m = next_n, next_d, next_m
    if not IS_TREE:
        store_state(state_ptr, n, d, m, channel, mask, C, WKV)


@triton.jit(do_not_specialize=["nodes"])
def channelwise_commit_kernel(
    table_ptr,  # [layers, TENSORS] int64: addresses of a state, and of its stash k, v and with WKV w
    path_ptr, gained_ptr,  # [B, nodes] int64, [B] int64
    nodes, C: tl.constexpr, BLOCK: tl.constexpr, MAX_NODES: tl.constexpr, TENSORS: tl.constexpr, WKV: tl.constexpr,
):  # fmt: skip
    """Update the states of all layers by gained[b] nodes of the path. Grid (blocks of C, B, layers)."""
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < C
    table_ptr += tl.program_id(2) * TENSORS
    gained = tl.load(gained_ptr + row).to(tl.int32)
    if gained == 0:
        return

    # This row's part of the layer's state and stash.
    PARTS: tl.constexpr = 3 if WKV else 1
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    state_ptr = tl.multiple_of(tl.load(table_ptr).to(FLOATS), 16) + row * PARTS * C
    k_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(FLOATS), 16) + row * MAX_NODES * C
    v_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(FLOATS), 16) + row * MAX_NODES * C
    n, d, m = load_state(state_ptr, channel, mask, C, WKV)
    w = n
    if WKV:
        w = tl.load(tl.load(table_ptr + 3).to(FLOATS) + channel, mask=mask, other=0.0)

    # One step for each accepted node.
    for step in range(gained):
        node = tl.load(path_ptr + row * nodes + step).to(tl.int32)
        k = tl.load(k_ptr + node * C + channel, mask=mask, other=0.0)
        v = tl.load(v_ptr + node * C + channel, mask=mask, other=0.0)
        n, d, m = lead_channels(n, d, m, k, v, w, WKV)
    store_state(state_ptr, n, d, m, channel, mask, C, WKV)


# Short convolutions:
#
#     out_i = weight[:, w - 1] * x_i + weight[:, w - 2] * x_parent(i) + ...    (w terms, see `kinds`)
#
# A window is summed from its node upwards.


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
    # This program's node, and its row of the inputs, of the state and of the walk.
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
