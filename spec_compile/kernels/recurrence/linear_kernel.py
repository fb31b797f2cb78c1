"""Kernels of linear attention with decay: a walk over a tree from a state, and the commit of a path.

    written = v                               (decay)
    written = beta * (v - e^g S^T k)          (delta)
    out = e^g S^T q + (q . k) * written       S' = e^g S + k written^T

Import this module only where Triton is installed. Both kernels update a state token by token with the same code
(`read`, `lead`), so a node has the bits that single steps would give it, in any tree.

A program has a head and BLOCK_DV columns of its state, a tile [BLOCK_DK, BLOCK_DV] in the registers of one warp. So a
sum over BLOCK_DK needs no barrier, and 32 heads of 128 x 128 are 512 programs. For each node it multiplies its tile by
k and q at once, and if the node has children, updates the tile. Cost: the state is read once, and written once by a
commit. A node takes 2 instructions for each number of the state, or 4 if it has children, and each program of a head
reads k and q from the L1 or L2 cache. Nodes are computed one after the other, a fraction of a microsecond each.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def read(tile, k, q, v, decay, beta, DELTA: tl.constexpr):
    """`written` and `out` of a token, both [BLOCK_DV].

    tile [BLOCK_DK, BLOCK_DV]: the state before it. k, q [BLOCK_DK]; v [BLOCK_DV]; decay [BLOCK_DK]: e^g.
    """
    written = v
    if DELTA:
        written = beta * (v - tl.sum(tile * (k * decay)[:, None], 0))
    return written, tl.fma(tl.sum(q * k, 0), written, tl.sum(tile * (q * decay)[:, None], 0))


@triton.jit
def lead(tile, k, written, decay):
    """The state after a token; decay [BLOCK_DK]."""
    return tl.fma(k[:, None], written[None, :], tile * decay[:, None])


@triton.jit
def load_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, stride_q, stride_k, stride_v, stride_g, stride_beta, token, dk, dv,
    DK: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The q, k [BLOCK_DK], v [BLOCK_DV], g [BLOCK_DK] or a number, and beta of a token. Pointers point to a head."""
    q = tl.load(q_ptr + token * stride_q + dk, mask=dk < DK, other=0.0)
    k = tl.load(k_ptr + token * stride_k + dk, mask=dk < DK, other=0.0)
    v = tl.load(v_ptr + token * stride_v + dv, mask=dv < DV, other=0.0)
    beta = tl.load(beta_ptr + token * stride_beta)
    if CHANNELS:
        g = tl.load(g_ptr + token * stride_g + dk, mask=dk < DK, other=0.0)
    else:
        g = tl.load(g_ptr + token * stride_g)
    return q, k, v, g, beta


@triton.jit(do_not_specialize=["nodes"])
def linear_tree_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, N, HEADS / GROUP, DK] (q and k), [B, N, HEADS, DV]
    g_ptr, beta_ptr,  # [B, N, HEADS] or with CHANNELS [B, N, HEADS, DK], [B, N, HEADS]
    state_ptr, kept_ptr, walk_ptr,  # [B, HEADS, DK, DV], [programs, SLOTS, BLOCK_DK, BLOCK_DV], [B, COLUMNS, N]
    k_stash_ptr, v_stash_ptr, g_stash_ptr, beta_stash_ptr, out_ptr,  # as the inputs, of MAX_NODES; [B, N, HEADS, DV]
    stride_qb, stride_qn, stride_kb, stride_kn, stride_vb, stride_vn, stride_gb, stride_gn, stride_bb, stride_bn,
    nodes, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    MAX_NODES: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of all nodes in the order of the `walk`, and their stash. Grid (blocks of DV, HEADS, B)."""
    if EARLY:
        gdc_launch_dependents()
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, program = head // GROUP, (row * HEADS + head) * tl.num_programs(0) + tl.program_id(0)
    dk, dv = tl.arange(0, BLOCK_DK), tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV)

    # The committed state. Only commits and prompts write it, and they are done long before this launch.
    state_ptr += (row * HEADS + head) * DK * DV
    inside = (dk < DK)[:, None] & (dv < DV)[None, :]
    tile = tl.load(state_ptr + dk[:, None] * DV + dv[None, :], mask=inside, other=0.0)
    kept_ptr += program * SLOTS * BLOCK_DK * BLOCK_DV
    kept_at = dk[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    if EARLY:
        gdc_wait()

    # This head's part of the inputs, of the stash and of the output.
    GATES: tl.constexpr = DK if CHANNELS else 1
    q_ptr, k_ptr = q_ptr + row * stride_qb + key_head * DK, k_ptr + row * stride_kb + key_head * DK
    v_ptr, g_ptr = v_ptr + row * stride_vb + head * DV, g_ptr + row * stride_gb + head * GATES
    beta_ptr += row * stride_bb + head
    k_stash_ptr += row * MAX_NODES * (HEADS // GROUP) * DK + key_head * DK
    v_stash_ptr += row * MAX_NODES * HEADS * DV + head * DV
    g_stash_ptr += row * MAX_NODES * HEADS * GATES + head * GATES
    beta_stash_ptr += row * MAX_NODES * HEADS + head
    out_ptr += row * nodes * HEADS * DV + head * DV
    walk_ptr += row * COLUMNS * nodes

    # Walk over the nodes.
    node = tl.load(walk_ptr)
    q, k, v, g, beta = load_token(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, stride_qn, stride_kn, stride_vn, stride_gn, stride_bn, node, dk, dv,
        DK, DV, CHANNELS,
    )  # fmt: skip
    for step in range(nodes):
        # Load the inputs of the next node while this one is computed.
        next_node = tl.load(walk_ptr + tl.minimum(step + 1, nodes - 1))
        next_q, next_k, next_v, next_g, next_beta = load_token(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, stride_qn, stride_kn, stride_vn, stride_gn, stride_bn, next_node,
            dk, dv, DK, DV, CHANNELS,
        )  # fmt: skip

        # Resume the parent's state if the program does not hold it. Read it, and update it if the node has children.
        resumed, kept = tl.load(walk_ptr + nodes + step), tl.load(walk_ptr + 3 * nodes + step)
        if resumed >= 0:
            tile = tl.load(kept_ptr + resumed * BLOCK_DK * BLOCK_DV + kept_at)
        decay = tl.broadcast_to(tl.exp(g), [BLOCK_DK])
        written, out = read(tile, k, q, v, decay, beta, DELTA)
        tl.store(out_ptr + node * HEADS * DV + dv, out, mask=dv < DV)
        if tl.load(walk_ptr + 2 * nodes + step) != 0:
            tile = lead(tile, k, written, decay)
            if kept >= 0:
                tl.store(kept_ptr + kept * BLOCK_DK * BLOCK_DV + kept_at, tile)
                tl.debug_barrier()  # a lane may read what another has stored

        # Stash the inputs for a commit. Several programs share g, beta and k, so one of them stores these.
        tl.store(v_stash_ptr + node * HEADS * DV + dv, v, mask=dv < DV)
        if tl.program_id(0) == 0:
            if CHANNELS:
                tl.store(g_stash_ptr + node * HEADS * GATES + dk, g, mask=dk < DK)
            else:
                tl.store(g_stash_ptr + node * HEADS, g)
            if DELTA:
                tl.store(beta_stash_ptr + node * HEADS, beta)
            if head % GROUP == 0:
                tl.store(k_stash_ptr + node * (HEADS // GROUP) * DK + dk, k, mask=dk < DK)
        node, q, k, v, g, beta = next_node, next_q, next_k, next_v, next_g, next_beta


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

    dk, dv = tl.arange(0, BLOCK_DK), tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    inside = (dk < DK)[:, None] & (dv < DV)[None, :]
    at = dk[:, None] * DV + dv[None, :]
    tile = tl.load(state_ptr + at, mask=inside, other=0.0)

    # One step for each accepted node.
    for step in range(gained):
        node = tl.load(path_ptr + step).to(tl.int32)
        _, k, v, g, beta = load_token(
            k_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, HEADS // GROUP * DK, HEADS // GROUP * DK, HEADS * DV, HEADS * GATES,
            HEADS, node, dk, dv, DK, DV, CHANNELS,
        )  # fmt: skip
        decay = tl.broadcast_to(tl.exp(g), [BLOCK_DK])
        written, _ = read(tile, k, k, v, decay, beta, DELTA)
        tile = lead(tile, k, written, decay)
    tl.store(state_ptr + at, tile, mask=inside)
