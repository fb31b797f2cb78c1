"""The plain-PyTorch meaning of every op, which also runs (under Inductor) on a CPU.

Shapes: B rows, N tree nodes or chunk tokens, H query heads, Hkv key-value heads, G = H / Hkv, S cache slots, D head
size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from .masks import additive, alibi, only_chosen, visible_slots


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls an op, by the names of the op's schema, defaults included."""
    schema = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in schema), node.args)), **node.kwargs}


@torch.library.custom_op("spec_compile::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    layer: int,
    chunk: int | None = None,
    slopes: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Causal attention over a whole sequence, which capture puts in place of a model's own attention.

    q [B, H, T, Dk], k [B, Hkv, T, Dk], v [B, Hkv, T, Dv] -> [B, T, H, Dv]. `layer` only labels the node. The others
    are as in `attention.call.AttentionCall`.
    """
    steps = torch.arange(q.shape[2], device=q.device)
    distance = steps[:, None] - steps[None, :]
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if chunk is not None:
        visible = visible & (steps[:, None] // chunk == steps[None, :] // chunk)
    bias = None if slopes is None else alibi(slopes, steps[None], steps[None])
    mask = additive(visible.expand(q.shape[0], -1, -1), q.shape[1] // k.shape[1], q.dtype, bias)
    mask = mask if chosen is None else only_chosen(mask, chosen)
    return masked_attention(q, k, v, mask, sinks, scale, softcap).contiguous()


@attention.register_fake
def _(q, k, v, sinks, scale, window, softcap, layer, chunk=None, slopes=None, chosen=None):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(softcap(q k^T * scale) + mask, over keys and sinks) v -> [B, N, H, Dv].

    q [B, H, N, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv], mask [B, 1 or Hkv, G * N, S] with G = H / Hkv: the query
    heads of one KV head are stacked as rows, so keys and values are read once and never repeated.
    """
    batch, heads, nodes, key_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    group = heads // kv_heads
    q = q.reshape(batch, kv_heads, group * nodes, key_dim)
    if softcap is None and sinks is None and mask.dtype == q.dtype:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = (q @ k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.float() + mask.float()
        if sinks is not None:  # a learned logit per head that takes probability and gives no value (gpt-oss)
            sink = sinks.view(1, kv_heads, group, 1, 1).expand(batch, kv_heads, group, nodes, 1)
            scores = torch.cat([scores, sink.reshape(batch, kv_heads, group * nodes, 1).float()], dim=3)
        out = scores.softmax(dim=3)[..., : k.shape[2]].to(v.dtype) @ v
    return out.reshape(batch, heads, nodes, value_dim).transpose(1, 2)


def tree_mask(
    positions: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    max_kv_len: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    chunk: int | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """The mask of a block's nodes over the cache, [B, 1, group * N, max_kv_len]: 0 for visible slots, else minus
    infinity. With slopes [H] it is their `alibi` in place of 0, [B, H / group, group * N, max_kv_len].

    positions: [B, N]; of the block's tokens.
    lengths: [B]; committed slots of each row, all of them visible; the block lies in the slots after them.
    ancestors: [B, N] int64; bit j of node i says that i sees block token j; None means a causal chain.
    max_kv_len: slots that may hold anything visible.
    window: how far back a position sees, itself included.
    chunk: positions see those with the same position // chunk.

    lengths = [3], ancestors = [[0b001, 0b011, 0b101]] with 6 slots: node 0 sees slots 0 to 3, node 1 slots 0 to 4,
    node 2 slots 0 to 3 and 5.
    """
    visible, slot, index = visible_slots(positions, lengths, ancestors, max_kv_len)
    if window is None and chunk is None and slopes is None:
        return additive(visible, group, dtype)
    slot_position = torch.where(slot < lengths[:, None], slot, positions.gather(1, index))
    if window is not None:
        visible = visible & (positions[:, :, None] - slot_position[:, None, :] < window)  # guard: window
    if chunk is not None:
        visible = visible & (positions[:, :, None] // chunk == slot_position[:, None, :] // chunk)
    bias = None if slopes is None else alibi(slopes, positions, slot_position)
    return additive(visible, group, dtype, bias)


def append_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    scales: Tensor | None = None,
) -> Tensor:
    """`append_block` a block of keys and values to the caches, and `masked_attention` of its queries to the caches.

    The arguments are those of `attention.call.AttentionCall`, and a mask [B, 1 or Hkv, G * N, max_kv_len] from
    `tree_mask`, in place of lengths and ancestors; slots beyond max_kv_len are not read. -> [B, N, H, Dv].
    """
    max_kv_len = mask.shape[3]
    append_block(key_cache, value_cache, scales, k, v, lengths)
    keys, values = as_read(key_cache, value_cache, scales, max_kv_len, q.dtype)
    return masked_attention(q, keys, values, mask, sinks, scale, softcap)


def append_block(
    key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, k: Tensor, v: Tensor, lengths: Tensor
) -> None:
    """`append` k and v [B, Hkv, N, D*] to the caches, `over_scale` if these have scales."""
    if scales is not None:
        (k, key_scale), (v, value_scale) = over_scale(k), over_scale(v)
        append(scales, torch.cat([key_scale, value_scale], dim=3), lengths)
    append(key_cache, k, lengths)
    append(value_cache, v, lengths)


def as_read(
    key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, slots: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values in the first slots of the caches [B, Hkv, slots, D*], times their scales, in a dtype."""
    keys, values = key_cache[:, :, :slots], value_cache[:, :, :slots]
    if scales is not None:
        key_scale, value_scale = scales[:, :, :slots].split(1, dim=3)
        keys, values = keys.float() * key_scale, values.float() * value_scale
    return keys.to(dtype), values.to(dtype)


def over_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] in float32 over a scale with which the largest of a row becomes that of float8_e4m3fn, and the scales
    [..., 1]."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST_FP8
    scale = torch.where(scale > 0, scale, 1.0)
    return wide / scale, scale


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write new [B, Hkv, N, D], as `stored`, into cache [B, Hkv, S, D] at the slots lengths[b] .. lengths[b] + N."""
    batch, heads, nodes, _ = new.shape
    slots = lengths[:, None] + torch.arange(nodes, device=new.device)
    row = torch.arange(batch, device=new.device)[:, None, None]
    head = torch.arange(heads, device=new.device)[None, :, None]
    cache.index_put_((row, head, slots[:, None, :]), stored(new, cache.dtype))


def as_rows(x: Tensor) -> Tensor:
    """[..., C] -> [R, C], whose columns lie side by side."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def as_groups(x: Tensor, size: int) -> Tensor:
    """x [..., C] or [..., C / size, size] as [R, G, size], with entries side by side; a view where it can be."""
    groups = x.shape[-2] if x.shape[-1] == size and x.dim() > 2 else x.shape[-1] // size
    x = x.reshape(-1, groups, size)
    return x if x.stride(2) == 1 else x.contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, eq. 34) of halves, as Llama has it, in x's dtype.

    x [B, H, N, D], D even; cos, sin [B, N, D] -> [B, H, N, D].
    """
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` holds it: in float8_e4m3fn nothing is larger than `LARGEST_FP8`."""
    return (x.clamp(-LARGEST_FP8, LARGEST_FP8) if dtype == torch.float8_e4m3fn else x).to(dtype)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, C], rows [B, R] -> [B, R, C]: the chosen rows of each batch row."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


NGRAM_HOMES: dict[int, Callable[..., None]] = {}
"""The functions that answer `ngram_propose`, by handle: of (streams, tokens, committed, and the four outputs)."""


@torch.library.custom_op("spec_compile::ngram_propose", mutates_args=())
def ngram_propose(
    tokens: Tensor, committed: Tensor, streams: Tensor, handle: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tell the trie what each row has gained, and ask it for a tree that continues each row's end.

    tokens [B, S] int64 of which the first committed[b] of row b are text; streams [B]: the trie's stream of each row;
    handle [1]: a key of `NGRAM_HOMES`. -> tokens, parents [B, num_nodes], count [B], longest match [B], all int64.
    """
    batch = tokens.shape[0]
    out = tuple(tokens.new_empty(shape) for shape in ((batch, num_nodes), (batch, num_nodes), (batch,), (batch,)))
    NGRAM_HOMES[int(handle)](streams, tokens, committed, *out)
    return out


@ngram_propose.register_fake
def _(tokens, committed, streams, handle, num_nodes):
    batch = tokens.shape[0]
    tree, summary = tokens.new_empty((batch, num_nodes)), tokens.new_empty((batch,))
    return tree, torch.empty_like(tree), summary, torch.empty_like(summary)
