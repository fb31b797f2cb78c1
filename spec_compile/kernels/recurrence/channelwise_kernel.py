"""Kernels of `channelwise` recurrences: the nodes of a tree or a chunk of a prompt, and the commit of a path.

Import this module only where Triton is installed. All update a state token by token with the same code (`read`,
`lead`), so a node has the same bits in any tree. A program has BLOCK channels. It writes the state after every node of
a tree to memory, because a state is as small as the inputs of a few tokens. Each lane reads only what it has written.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e38)


@triton.jit
def read(n, d, m, k, v, w, u, WKV: tl.constexpr):
    """The output of a token; all [BLOCK]. Without WKV: x and a in place of k and v."""
    if WKV:
        top = tl.maximum(m, u + k)
        old, new = tl.exp(m - top), tl.exp(u + k - top)
        return tl.fma(old, n, new * v) / tl.fma(old, d, new)
    else:
        return tl.fma(v, n, k)


@triton.jit
def lead(n, d, m, k, v, w, WKV: tl.constexpr):
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
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < C
    PARTS: tl.constexpr = 3 if WKV else 1
    state_ptr += row * PARTS * C
    n, d, m = load_state(state_ptr, channel, mask, C, WKV)
    w, u = n, n
    if WKV:
        w, u = tl.load(w_ptr + channel, mask=mask, other=0.0), tl.load(u_ptr + channel, mask=mask, other=0.0)
    valid = tokens
    if IS_TREE:
        walk_ptr += (row * COLUMNS + COLUMNS - 1) * tokens
        after_ptr += row * tokens * PARTS * C
        k_stash_ptr += row * MAX_NODES * C
        v_stash_ptr += row * MAX_NODES * C
    else:
        valid = tl.load(valid_ptr + row).to(tl.int32)
    for token in range(tokens):
        k = tl.load(k_ptr + row * stride_kb + token * stride_kn + channel, mask=mask, other=0.0)
        v = tl.load(v_ptr + row * stride_vb + token * stride_vn + channel, mask=mask, other=0.0)
        if IS_TREE:
            parent = tl.load(walk_ptr + token)
            if parent >= 0:  # only the root has none, and it comes first  # guard: state-of-the-root
                n, d, m = load_state(after_ptr + parent * PARTS * C, channel, mask, C, WKV)
        tl.store(out_ptr + (row * tokens + token) * C + channel, read(n, d, m, k, v, w, u, WKV), mask=mask)
        next_n, next_d, next_m = lead(n, d, m, k, v, w, WKV)
        if IS_TREE:
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
    PARTS: tl.constexpr = 3 if WKV else 1
    FLOATS: tl.constexpr = tl.pointer_type(tl.float32)
    state_ptr = tl.multiple_of(tl.load(table_ptr).to(FLOATS), 16) + row * PARTS * C
    k_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(FLOATS), 16) + row * MAX_NODES * C
    v_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(FLOATS), 16) + row * MAX_NODES * C
    n, d, m = load_state(state_ptr, channel, mask, C, WKV)
    w = n
    if WKV:
        w = tl.load(tl.load(table_ptr + 3).to(FLOATS) + channel, mask=mask, other=0.0)
    for step in range(gained):
        node = tl.load(path_ptr + row * nodes + step).to(tl.int32)
        k = tl.load(k_ptr + node * C + channel, mask=mask, other=0.0)
        v = tl.load(v_ptr + node * C + channel, mask=mask, other=0.0)
        n, d, m = lead(n, d, m, k, v, w, WKV)
    store_state(state_ptr, n, d, m, channel, mask, C, WKV)
