"""Backend "sdpa": plain PyTorch, the reference. On a GPU it reads the whole capacity of the cache."""

import torch
from torch import Tensor, fx

from ...graph import ModelGraph
from .. import HALF, ops
from ..masks import only_chosen
from .base import ALL, Backend
from .call import AttentionCall, attention_calls, attention_function


@attention_function
def attention(call: AttentionCall, mask: Tensor | None = None) -> Tensor:
    """The call. -> [B, N, H, Dv]. Shapes depend on no value, so a CUDA graph can hold it.

    Values in unseen slots are multiplied by 0, so they must be finite.

    mask: an `ops.tree_mask` of the first slots; None: the call makes one of all slots.
    """
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    if mask is None:
        group = q.shape[1] // k.shape[1]
        seen = (positions, lengths, ancestors, key_cache.shape[2], window, group, q.dtype)
        mask = ops.tree_mask(*seen, call.chunk, call.slopes)
    if call.chosen is not None:
        mask = only_chosen(mask, call.chosen)
    return ops.append_and_attend(q, k, v, key_cache, value_cache, lengths, mask, sinks, scale, softcap, call.scales)


def prepare(graph: ModelGraph) -> str:
    """On a CPU, compute masks once: one `ops.tree_mask` of `max_kv_len` slots for all layers that see the same keys.

    On a GPU every call makes its own mask of all slots, because no shape may depend on a value there.
    """
    if graph.device.type != "cpu":
        return ""
    (max_kv_len,) = (node for node in graph.gm.graph.nodes if node.op == "placeholder" and node.target == "max_kv_len")
    masks: dict[tuple, fx.Node] = {}
    for node, layer in zip(attention_calls(graph), graph.layers):
        chunk, slopes = (node.kwargs.get(name) for name in ("chunk", "slopes"))
        seen, group = (node.kwargs["ancestors"], layer.window, chunk, slopes), layer.heads // layer.kv_heads
        if (seen, group) not in masks:
            block = (node.kwargs[name] for name in ("positions", "lengths", "ancestors"))
            with graph.gm.graph.inserting_before(node):
                mask = graph.gm.graph.call_function(
                    ops.tree_mask, (*block, max_kv_len, layer.window, group, graph.dtype, chunk, slopes)
                )
            masks[seen, group] = mask
        node.update_kwarg("mask", masks[seen, group])
    return f", {len(masks)} masks"


BACKEND = Backend(
    "sdpa",
    lambda use: attention,
    frozenset({"cpu", "cuda"}),
    frozenset({*HALF, torch.float32, torch.float64}),
    causal=ALL,
    trees=ALL,
    captured=ALL,
    scaled=True,
    prepare=prepare,
)
