"""Masks: the slots of a cache that a node sees, and numbers that are added to its scores, in plain PyTorch.

Shapes: B rows, N tree nodes or chunk tokens, H query heads, Hkv key-value heads, G = H / Hkv, S cache slots.
"""

import math

import torch
from torch import Tensor


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


def alibi(slopes: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
    """Linear biases of attention (Press et al. 2021, section 3): slope * (key position - query position), in float32.

    slopes [H]; key positions are rounded to their dtype, because Falcon's are. positions [B, N] of queries,
    key_positions [B, S] -> [B, H, N, S].
    """
    rounded = key_positions.to(slopes.dtype).float()
    distance = rounded[:, None, :] - positions[:, :, None].float()
    return slopes.float()[:, None, None] * distance[:, None]


def additive(visible: Tensor, group: int, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """visible [B, N, S] -> [B, 1, group * N, S] of 0 and minus infinity; of bias [B, H, N, S] in place of 0, and at
    least in float32, [B, H / group, group * N, S]."""
    batch, nodes, max_kv_len = visible.shape
    if bias is not None:
        bias = bias.to(torch.promote_types(dtype, torch.float32)).masked_fill(~visible[:, None], -math.inf)
        return bias.reshape(batch, -1, group * nodes, max_kv_len)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)
    return mask[:, None].expand(batch, group, nodes, max_kv_len).reshape(batch, 1, group * nodes, max_kv_len)
