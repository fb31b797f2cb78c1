"""Kernels of the selective scan: a walk over a tree from a state, a chunk of a prompt, and the commit of a path.

    h' = e^(dt a) h + (dt x) b^T        y = h' c

Import this module only where Triton is installed. All update and read a state token by token with the same code
(`lead`, `read`), so a token has the same bits in any tree and chunk. A program has BLOCK_D channels and all BLOCK_N
entries of their states.
"""

import triton
import triton.language as tl

from ..primitives import sum_in_pairs
from .walk import keep, resume


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
def load_token(
    c_ptr, b_ptr, x_ptr, dt_ptr, stride_c, stride_b, stride_x, stride_dt, token, channel, entry,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The c, b [BLOCK_N], x, dt [BLOCK_D] of a token. Pointers point to a row of the batch."""
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
    c, b, x, dt = load_token(
        c_ptr, b_ptr, x_ptr, dt_ptr, stride_cn, stride_bn, stride_xn, stride_dn, node, channel, entry, D, N
    )
    for step in range(tokens):
        # Load the inputs of the next token while this one is computed; resume the parent's state if a slot keeps it.
        next_node = tl.minimum(step + 1, tokens - 1)
        if IS_TREE:
            next_node = tl.load(walk_ptr + next_node)
            tile = resume(tile, walk_ptr, kept_at, tokens, step, BLOCK_D * BLOCK_N)
        next_c, next_b, next_x, next_dt = load_token(
            c_ptr, b_ptr, x_ptr, dt_ptr, stride_cn, stride_bn, stride_xn, stride_dn, next_node, channel, entry, D, N
        )

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
        node, c, b, x, dt = next_node, next_c, next_b, next_x, next_dt
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
    for step in range(gained):
        node = tl.load(path_ptr + row * nodes + step).to(tl.int32)
        _, b, x, dt = load_token(b_ptr, b_ptr, x_ptr, dt_ptr, N, N, D, D, node, channel, entry, D, N)
        tile = lead(tile, b, x, dt, a)
    tl.store(state_ptr + at, tile, mask=inside)
