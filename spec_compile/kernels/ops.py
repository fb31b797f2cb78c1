"""The plain-PyTorch meaning of every op, which also runs (under Inductor) on a CPU.

Shapes: B rows, N tree nodes or chunk tokens, H query heads, Hkv key-value heads, G = H / Hkv, S slots of a page of the
cache, which is all of a row unless a table says otherwise, D head size.
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from .launching import LIBRARY, new_op, op_with_kernel


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls an op, by the names of the op's schema, defaults included."""
    schema = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in schema), node.args)), **node.kwargs}


def empty_heads(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the result of attention [B, N, H, Dv], of q's dtype: q [B, H, N, Dk], v [..., Dv]."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@new_op("attention", lambda q, k, v, *_, **__: empty_heads(q, v))
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int | None, softcap: float | None,
    layer: int, chunk: int | None = None, slopes: Tensor | None = None, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention over a whole sequence, which capture puts in place of a model's own attention.

    q [B, H, T, Dk], k [B, Hkv, T, Dk], v [B, Hkv, T, Dv] -> [B, T, H, Dv]. `layer` only labels the node. The others
    are as in `attention.base.AttentionCall`.
    """
    batch, heads, tokens, _ = q.shape
    positions = torch.arange(tokens, device=q.device).expand(batch, -1)
    seen = positions, positions.new_zeros(batch), None, tokens, window, heads // k.shape[1], q.dtype
    mask = tree_mask(*seen, chunk, slopes)
    mask = mask if chosen is None else only_chosen(mask, chosen)
    return masked_attention(q, k, v, mask, sinks, scale, softcap).contiguous()


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(softcap(q k^T * scale) + mask, over keys and sinks) v -> [B, N, H, Dv].

    q [B, H, N, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv], mask [B, 1 or Hkv, G * N, S] with G = H / Hkv: the query
    heads of one KV head are stacked as rows, so keys and values are read once and never repeated.
    """
    # The query heads of a KV head as rows.
    batch, heads, nodes, key_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    group = heads // kv_heads
    q = q.reshape(batch, kv_heads, group * nodes, key_dim)

    # PyTorch's fused attention where it means the same.
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
    positions: Tensor, lengths: Tensor, ancestors: Tensor | None, max_kv_len: int, window: int | None, group: int,
    dtype: torch.dtype, chunk: int | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The mask of a block's nodes over the cache, [B, 1, group * N, max_kv_len]: 0 for visible slots, else minus
    infinity. With slopes it is their `distance_biases` in place of 0, [B, H / group, group * N, max_kv_len].

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

    # Windows and chunks go by positions: a committed slot is its position, another has its node's.
    slot_position = torch.where(slot < lengths[:, None], slot, positions.gather(1, index))
    if window is not None:
        visible = visible & (positions[:, :, None] - slot_position[:, None, :] < window)  # guard: window
    if chunk is not None:
        visible = visible & (positions[:, :, None] // chunk == slot_position[:, None, :] // chunk)
    bias = None if slopes is None else distance_biases(slopes, positions, slot_position)
    return additive(visible, group, dtype, bias)


def append_block(
    key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, k: Tensor, v: Tensor, lengths: Tensor,
    table: Tensor | None = None,
) -> None:  # fmt: skip
    """`append` k and v [B, Hkv, N, D*] to the caches, `over_scale` if these have scales."""
    if scales is not None:
        (k, key_scale), (v, value_scale) = over_scale(k), over_scale(v)
        append(scales, torch.cat([key_scale, value_scale], dim=3), lengths, table)
    append(key_cache, k, lengths, table)
    append(value_cache, v, lengths, table)


def as_read(
    key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, slots: int, dtype: torch.dtype,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values in the first slots of the rows [B, Hkv, slots, D*], times their scales, in a dtype; zeros in the
    scratch page, where anything may lie and 0 * NaN is NaN."""
    keys, values = first_slots(key_cache, slots, table), first_slots(value_cache, slots, table)
    if scales is not None:
        key_scale, value_scale = first_slots(scales, slots, table).split(1, dim=3)
        keys, values = keys.float() * key_scale, values.float() * value_scale
    keys, values = keys.to(dtype), values.to(dtype)
    if is_paged(table):
        pages, _, _ = places(key_cache, torch.arange(slots, device=table.device).expand(table.shape[0], -1), table)
        keys, values = (x.masked_fill(pages[..., None] == 0, 0.0) for x in (keys, values))
    return keys, values


def over_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """-> x [..., D] in float32 over its rows' scales, and the scales [..., 1].

    With its scale the largest number of a row becomes the largest of float8_e4m3fn.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST_FP8
    scale = torch.where(scale > 0, scale, 1.0)
    return wide / scale, scale


def append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    """Write new [B, Hkv, N, D], as `stored`, into cache [P, Hkv, S, D] at the slots lengths[b] .. lengths[b] + N."""
    slots = lengths[:, None] + torch.arange(new.shape[2], device=new.device)
    cache.index_put_(places(cache, slots, table), stored(new, cache.dtype))


def is_paged(table: Tensor | None) -> TypeGuard[Tensor]:
    """True if rows have several pages; without, page b is row b."""
    return table is not None and table.shape[1] > 1


def places(cache: Tensor, slots: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The indices of the slots [B, R] of each row in cache [P, Hkv, S, D]: pages [B, 1, R or 1], heads and slots.

    table: [B, n] int32, as in `AttentionCall`. With S = 64 and table = [[3, 7]], slot 65 is slot 1 of page 7.
    """
    slots = slots.to(cache.device)
    head = torch.arange(cache.shape[1], device=slots.device)[None, :, None]
    if not is_paged(table):
        return torch.arange(slots.shape[0], device=slots.device)[:, None, None], head, slots[:, None, :]
    size = cache.shape[2]
    return table.to(slots).gather(1, slots // size)[:, None, :], head, (slots % size)[:, None, :]


def first_slots(cache: Tensor, slots: int, table: Tensor | None = None) -> Tensor:
    """The first slots of each row in cache [P, Hkv, S, D], [B, Hkv, slots, D]."""
    if not is_paged(table):
        return cache[:, :, :slots]
    return cache[places(cache, torch.arange(slots, device=cache.device).expand(table.shape[0], -1), table)]


@op_with_kernel("pack_pages", lambda pools, packed, pages, to_pages: None, writes=("pools", "packed"))
def pack_pages(pools: list[Tensor], packed: Tensor, pages: Tensor, to_pages: bool) -> None:
    """Copy pages [n] of every pool to packed memory, or from there to the pages.

    pools: [P, Hkv, S, D] each, of one dtype; Hkv and D may differ.
    packed: [n, units or more]; a page of every pool, one pool after the other. Pools of 2 heads with 64 slots of 16
        numbers and of 1 head with 64 slots of 2 have 2,048 + 128 units.
    """
    sizes = [pool[0].numel() for pool in pools]
    for pool, part in zip(pools, packed[:, : sum(sizes)].split(sizes, dim=1)):
        if to_pages:
            pool[pages] = part.view(-1, *pool.shape[1:])
        else:
            part.copy_(pool[pages].flatten(1))


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


def _empty_trees(tokens: Tensor, committed: Tensor, streams: Tensor, handle: Tensor, num_nodes: int) -> tuple:
    """Memory for the results of `ngram_propose`."""
    tree, count = tokens.new_empty(tokens.shape[0], num_nodes), torch.empty_like(committed)
    return tree, torch.empty_like(tree), count, torch.empty_like(count)


def ngram_propose(
    tokens: Tensor, committed: Tensor, streams: Tensor, handle: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tell the trie what each row has gained, and ask it for a tree that continues each row's end.

    tokens [B, S] int64 of which the first committed[b] of row b are text; streams [B]: the trie's stream of each row;
    handle [1]: a key of `NGRAM_HOMES`. -> tokens, parents [B, num_nodes], count [B], longest match [B], all int64.
    """
    out = _empty_trees(tokens, committed, streams, handle, num_nodes)
    NGRAM_HOMES[int(handle)](streams, tokens, committed, *out)
    return out


LIBRARY.define("ngram_propose" + torch.library.infer_schema(ngram_propose, mutates_args=()))
LIBRARY.impl("ngram_propose", ngram_propose, "CompositeExplicitAutograd")
torch.library.register_fake("spec_compile::ngram_propose", _empty_trees)

# Masks: the slots of a cache that a node sees, and numbers that are added to its scores, in plain PyTorch.
#
# Shapes: B rows, N tree nodes or chunk tokens, H query heads, Hkv key-value heads, G = H / Hkv, S cache slots.


def visible_slots(
    positions: Tensor, lengths: Tensor, ancestors: Tensor | None, max_kv_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """True where a node sees a slot [B, N, max_kv_len], the slots, and their numbers in the block (`ops.tree_mask`)."""
    nodes = positions.shape[1]
    slot = torch.arange(max_kv_len, device=positions.device)
    index = slot - lengths[:, None]  # a slot's number in the block; negative: committed
    inside = (index >= 0) & (index < nodes)
    index = index.clamp(0, nodes - 1)
    if ancestors is None:
        seen = index[:, None, :] <= torch.arange(nodes, device=positions.device)[:, None]
    else:
        seen = ((ancestors[:, :, None] >> index[:, None, :]) & 1).bool()  # guard: ancestors-are-seen
    return (slot < lengths[:, None])[:, None, :] | (inside[:, None, :] & seen), slot, index


def only_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """`ops.tree_mask`'s result [B, M, G * N, S], with minus infinity for slots that are not among chosen [B, N, K].

    chosen = [[[2, 5, -1]]] hides all slots but 2 and 5; -1 stands for none.
    """
    batch, nodes, _ = chosen.shape
    slots = mask.shape[3]
    hidden = torch.ones(batch, nodes, slots + 1, dtype=torch.bool, device=mask.device)
    hidden = hidden.scatter(2, torch.where(chosen < 0, slots, chosen).long(), False)[:, None, :, :slots]
    return mask.masked_fill(hidden.repeat(1, 1, mask.shape[2] // nodes, 1), -math.inf)


def distance_biases(slopes: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
    """The biases by distance that `AttentionCall.slopes` are, in float32: positions [B, N] of queries, key_positions
    [B, S] -> [B, H, N, S]. ALiBi rounds key positions to the dtype of its slopes, because Falcon does."""
    if slopes.dim() == 1:
        rounded = key_positions.to(slopes.dtype).float()
        distance = rounded[:, None, :] - positions[:, :, None].float()
        return slopes.float()[:, None, None] * distance[:, None]
    distance = (positions[:, :, None] - key_positions[:, None, :]).clamp(0, slopes.shape[-1] - 1)
    tables = slopes.float().expand(*distance.shape[:2], -1, -1).transpose(1, 2)  # [B, H, N, D]
    return tables.gather(3, distance[:, None].expand(-1, tables.shape[1], -1, -1))


def additive(visible: Tensor, group: int, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """visible [B, N, S] -> [B, 1, group * N, S] of 0 and minus infinity; of bias [B, H, N, S] in place of 0, and at
    least in float32, [B, H / group, group * N, S]."""
    batch, nodes, max_kv_len = visible.shape
    if bias is not None:
        bias = bias.to(torch.promote_types(dtype, torch.float32)).masked_fill(~visible[:, None], -math.inf)
        return bias.reshape(batch, -1, group * nodes, max_kv_len)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)
    return mask[:, None].expand(batch, group, nodes, max_kv_len).reshape(batch, 1, group * nodes, max_kv_len)
