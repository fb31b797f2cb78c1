"""use_grouped_attention: attention over repeated key-value heads reads each of them once."""

import torch
from torch import fx

from ...graph import calls
from ...kernels.attention import grouped
from ..nodes import calls_op, replace_node, shape_of
from .lower import ForwardGraph, is_quiet_between

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
MOST_TOKENS = 64
"""Query tokens of a rewritten attention. With more, products decide its time, and PyTorch's kernels are faster."""


def use_grouped_attention(graph: ForwardGraph, settings) -> str:
    """Put `kernels.attention.grouped` in place of ``sdpa(q, repeat(k), repeat(v), mask)`` of few tokens.

    The same sums over the same numbers: keys and values are read without the copy for every query head, and on a GPU
    only the slots that the mask shows. A call stays as it is if it is causal by flag or has dropout, and on a CPU if no
    head is repeated.
    """
    done = sum(_rewrite(node, graph.device.type) for node in calls(graph.gm, SDPA)) if settings.gqa else 0
    return f"{done} attention calls read un-repeated key-value heads" if settings.gqa else "off"


def _rewrite(node: fx.Node, device: str) -> bool:
    """Rewrite a call of attention, if it can be. Returns True if it was."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, node.args)) | node.kwargs
    if call.get("is_causal") or call.get("dropout_p"):
        return False
    q, mask, scale = call["query"], call.get("attn_mask"), call.get("scale")
    keys, first = _unrepeated(call["key"])
    values, second = _unrepeated(call["value"])
    if not _fits(q, keys, values, mask, device) or not all(is_quiet_between(x, node) for x in (first, second)):
        return False
    with node.graph.inserting_before(node):
        op = grouped.plain if device == "cpu" else grouped.GROUPED
        new = node.graph.call_function(op, (q, keys, values, mask, scale))
    replace_node(node, new)
    return True


def _fits(q: fx.Node, keys: fx.Node, values: fx.Node, mask: fx.Node | None, device: str) -> bool:
    """True if the op takes tensors of these shapes, and is worth it. Batch and slots may be symbols, whose comparison
    makes Dynamo check at every call that the result is still the same."""
    shapes = [shape_of(x) for x in (q, keys, values)]
    if any(len(shape) != 4 or not all(isinstance(shape[dim], int) for dim in (1, 3)) for shape in shapes):
        return False
    (batch, heads, tokens, _), (_, kv_heads, slots, _) = shapes[:2]
    if (
        not isinstance(tokens, int)
        or tokens > MOST_TOKENS
        or heads % kv_heads
        or (heads == kv_heads and device == "cpu")
    ):
        return False
    if list(shapes[2][:3]) != [batch, kv_heads, slots] or shapes[1][0] != batch:
        return False
    if mask is None:
        return True
    options = zip(shape_of(mask), ((1, batch), (1, heads), (1, tokens), (slots,)))
    return len(shape_of(mask)) == 4 and all(size in fits for size, fits in options)


def _unrepeated(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x [B, Hkv, S, D] if `node` is x with each head repeated, and the first call that repeats it; else `node` twice.

    transformers' repeat_kv is ``x[:, :, None].expand(B, Hkv, G, S, D).reshape(B, Hkv * G, S, D)``.
    """
    if node.target == aten.repeat_interleave.self_int and node.args[2:3] == (1,):
        return (node.args[0], node) if isinstance(node.args[1], int) else (node, node)
    if not calls_op(node, aten.reshape.default) or not calls_op(expand := node.args[0], aten.expand.default):
        return node, node
    inner = expand.args[0]
    while calls_op(inner, aten.slice.Tensor) and shape_of(inner) == shape_of(inner.args[0]):
        inner = inner.args[0]
    if not calls_op(inner, aten.unsqueeze.default) or inner.args[1] != 2 or len(shape_of(inner.args[0])) != 4:
        return node, node
    x, wide = inner.args[0], shape_of(expand)
    batch, kv_heads, slots, size = shape_of(x)
    is_repeat = [*wide[:2], *wide[3:]] == [batch, kv_heads, slots, size]
    is_repeat = is_repeat and list(shape_of(node)) == [batch, kv_heads * wide[2], slots, size]
    return (x, inner) if is_repeat else (node, node)
