"""Kernels of linear attention with decay: a walk over a tree from a state, a chunk of a prompt, and a path's commit.

    written = v                               (decay)
    written = beta * (v - e^g S^T k)          (delta)
    out = e^g S^T q + (q . k) * written       S' = e^g S + k written^T

Import this module only where Triton is installed. All update a state token by token with the same code (`read`,
`lead`), so a token has the bits that single steps would give it, in any tree and in a prompt's chunk of any size.

A program has a head and BLOCK_DV columns of its state, a tile [BLOCK_DK, BLOCK_DV] in the registers of one warp. So a
sum over BLOCK_DK needs no barrier, and 32 heads of 128 x 128 are 512 programs. For each token it multiplies its tile by
k and q at once, and if a token follows from the state, updates the tile. Cost: the state is read once, and written once
by a chunk or a commit. A token takes 2 instructions for each number of the state, or 4 with the update, and each
program of a head reads k and q from the L1 or L2 cache. Tokens are computed one after the other, a fraction of a
microsecond each. So their time is latency, and the inputs of a token are loaded during the step of the token before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .walk import keep, resume


@triton.jit
def read(tile, k, q, v, g, beta, DELTA: tl.constexpr):
    """`written` and `out` of a token, both [BLOCK_DV], and its decay e^g [BLOCK_DK].

    tile [BLOCK_DK, BLOCK_DV]: the state before it. k, q [BLOCK_DK]; v [BLOCK_DV]; g [BLOCK_DK] or a number.
    """
    decay = tl.broadcast_to(tl.exp(g), k.shape)
    written = v
    if DELTA:
        written = beta * (v - tl.sum(tile * (k * decay)[:, None], 0))
    return written, tl.fma(tl.sum(q * k, 0), written, tl.sum(tile * (q * decay)[:, None], 0)), decay


@triton.jit
def lead(tile, k, written, decay):
    """The state after a token; decay [BLOCK_DK]."""
    return tl.fma(k[:, None], written[None, :], tile * decay[:, None])


@triton.jit
def load_token(pointers, strides, token, dk, dv, DK: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr):
    """The q, k [BLOCK_DK], v [BLOCK_DV], g [BLOCK_DK] or a number, and beta of a token: pointers to the inputs of a
    head, and their strides over tokens."""
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = pointers
    stride_q, stride_k, stride_v, stride_g, stride_beta = strides
    q = tl.load(q_ptr + token * stride_q + dk, mask=dk < DK, other=0.0)
    k = tl.load(k_ptr + token * stride_k + dk, mask=dk < DK, other=0.0)
    v = tl.load(v_ptr + token * stride_v + dv, mask=dv < DV, other=0.0)
    beta = tl.load(beta_ptr + token * stride_beta)
    if CHANNELS:
        g = tl.load(g_ptr + token * stride_g + dk, mask=dk < DK, other=0.0)
    else:
        g = tl.load(g_ptr + token * stride_g)
    return q, k, v, g, beta


@triton.jit
def stash_token(
    k_ptr, v_ptr, g_ptr, beta_ptr, k, v, g, beta, place, head, dk, dv, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store what a commit needs of a token. place: number of the token in the stash of all rows.

    Several programs share g, beta and k, so one of them stores these.
    """
    tl.store(v_ptr + (place * HEADS + head) * DV + dv, v, mask=dv < DV)
    if tl.program_id(0) == 0:
        if CHANNELS:
            tl.store(g_ptr + (place * HEADS + head) * DK + dk, g, mask=dk < DK)
        else:
            tl.store(g_ptr + place * HEADS + head, g)
        if DELTA:
            tl.store(beta_ptr + place * HEADS + head, beta)
        if head % GROUP == 0:
            tl.store(k_ptr + (place * (HEADS // GROUP) + head // GROUP) * DK + dk, k, mask=dk < DK)


@triton.jit(do_not_specialize=["tokens"])
def linear_attention_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, tokens, HEADS / GROUP, DK] (q and k), [B, tokens, HEADS, DV]
    g_ptr, beta_ptr,  # [B, tokens, HEADS] or with CHANNELS [B, tokens, HEADS, DK], [B, tokens, HEADS]
    state_ptr, kept_ptr,  # [B, HEADS, DK, DV], written by a chunk; [programs, SLOTS, BLOCK_DK, BLOCK_DV]
    walk_ptr, valid_ptr,  # [B, COLUMNS, tokens] of trees, [B] of a chunk
    k_stash_ptr, v_stash_ptr, g_stash_ptr, beta_stash_ptr, out_ptr,  # as the inputs, of MAX_NODES; as v; written
    stride_qb, stride_qn, stride_kb, stride_kn, stride_vb, stride_vn, stride_gb, stride_gn, stride_bb, stride_bn,
    tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    MAX_NODES: tl.constexpr, COLUMNS: tl.constexpr, IS_TREE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of the nodes of a tree in the order of the `walk`, and their stash; or outputs of a chunk of a prompt,
    whose first valid[b] tokens update the state. Grid (blocks of DV, HEADS, B)."""
    if EARLY:
        gdc_launch_dependents()
    # This program's head, row of the batch and columns of Dv.
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, program = head // GROUP, (row * HEADS + head) * tl.num_programs(0) + tl.program_id(0)
    dk, dv = tl.arange(0, BLOCK_DK), tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV)

    # The committed state. Only commits and prompts write it, and they are done long before the launch of a tree.
    state_ptr += (row * HEADS + head) * DK * DV
    inside = (dk < DK)[:, None] & (dv < DV)[None, :]
    at = dk[:, None] * DV + dv[None, :]
    tile = tl.load(state_ptr + at, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()

    # This head's part of the inputs and of the output.
    q_ptr, k_ptr = q_ptr + row * stride_qb + key_head * DK, k_ptr + row * stride_kb + key_head * DK
    v_ptr, g_ptr = v_ptr + row * stride_vb + head * DV, g_ptr + row * stride_gb + head * (DK if CHANNELS else 1)
    beta_ptr += row * stride_bb + head
    out_ptr += row * tokens * HEADS * DV + head * DV
    valid = tokens
    if IS_TREE:
        kept_at = kept_ptr + (program * SLOTS * BLOCK_DK + dk[:, None]) * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
        walk_ptr += row * COLUMNS * tokens
    else:
        valid = tl.load(valid_ptr + row).to(tl.int32)

    # Begin with the root of a tree, or a chunk's first token: node 0.
    node = tokens - tokens
    pointers = q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr
    strides = stride_qn, stride_kn, stride_vn, stride_gn, stride_bn
    q, k, v, g, beta = load_token(pointers, strides, node, dk, dv, DK, DV, CHANNELS)
    for step in range(tokens):
        # Load the inputs of the next token while this one is computed; resume the parent's state if a slot keeps it.
        next_node = tl.minimum(step + 1, tokens - 1)
        if IS_TREE:
            next_node = tl.load(walk_ptr + next_node)
            tile = resume(tile, walk_ptr, kept_at, tokens, step, BLOCK_DK * BLOCK_DV)
        following = load_token(pointers, strides, next_node, dk, dv, DK, DV, CHANNELS)

        # Read the state. Update it if the node has children, or if the token counts.
        written, out, decay = read(tile, k, q, v, g, beta, DELTA)
        tl.store(out_ptr + node.to(tl.int64) * HEADS * DV + dv, out, mask=dv < DV)
        leads = valid > step  # guard: tokens-that-count
        if IS_TREE:
            leads = tl.load(walk_ptr + 2 * tokens + step) != 0
        if leads:
            tile = lead(tile, k, written, decay)

        if IS_TREE:  # keep the state for a later child, and stash the inputs for a commit
            keep(tile, walk_ptr, kept_at, tokens, step, BLOCK_DK * BLOCK_DV)
            stash_token(
                k_stash_ptr, v_stash_ptr, g_stash_ptr, beta_stash_ptr, k, v, g, beta, row * MAX_NODES + node, head,
                dk, dv, HEADS, GROUP, DK, DV, DELTA, CHANNELS,
            )  # fmt: skip
        node = next_node
        q, k, v, g, beta = following
    if not IS_TREE:
        tl.store(state_ptr + at, tile, mask=inside)


@triton.jit(do_not_specialize=["nodes", "batch"])
def linear_commit_kernel(
    table_ptr,  # [layers, PARTS] int64: addresses of a state, and of its stash k, v, g and with DELTA beta
    path_ptr, gained_ptr,  # [B, nodes] int64, [B] int64
    nodes, batch, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    MAX_NODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Update the states of all layers by gained[b] nodes of the path. Grid (blocks of DV, HEADS, layers * B)."""
    head, row = tl.program_id(1), (tl.program_id(2) % batch).to(tl.int64)
    table_ptr += tl.program_id(2) // batch * PARTS
    gained = tl.load(gained_ptr + row).to(tl.int32)
    if gained == 0:
        return

    # This head's part of the state and of the stash.
    GATES: tl.constexpr = DK if CHANNELS else 1
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    state_ptr = tl.multiple_of(tl.load(table_ptr).to(FLOATS), 16) + (row * HEADS + head) * DK * DV
    k_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(FLOATS), 16)
    v_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(FLOATS), 16) + (row * MAX_NODES * HEADS + head) * DV
    g_ptr = tl.multiple_of(tl.load(table_ptr + 3).to(FLOATS), 16) + (row * MAX_NODES * HEADS + head) * GATES
    beta_ptr = tl.load(table_ptr + PARTS - 1).to(FLOATS) + row * MAX_NODES * HEADS + head  # without DELTA: g, unused
    k_ptr += (row * MAX_NODES * (HEADS // GROUP) + head // GROUP) * DK
    path_ptr += row * nodes

    # The columns of the state that this program updates.
    dk, dv = tl.arange(0, BLOCK_DK), tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    inside = (dk < DK)[:, None] & (dv < DV)[None, :]
    at = dk[:, None] * DV + dv[None, :]
    tile = tl.load(state_ptr + at, mask=inside, other=0.0)

    # One step for each accepted node.
    pointers, KEYS = (k_ptr, k_ptr, v_ptr, g_ptr, beta_ptr), HEADS // GROUP * DK
    for step in range(gained):
        node = tl.load(path_ptr + step).to(tl.int32)
        strides = KEYS, KEYS, HEADS * DV, HEADS * GATES, HEADS
        _, k, v, g, beta = load_token(pointers, strides, node, dk, dv, DK, DV, CHANNELS)
        written, _, decay = read(tile, k, k, v, g, beta, DELTA)
        tile = lead(tile, k, written, decay)
    tl.store(state_ptr + at, tile, mask=inside)
