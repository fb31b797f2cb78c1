"""grouped_attention: attention reads each key-value head once, instead of a copy for every query head."""

import operator

import torch
from torch import fx
from torch.nn import functional as F

from ...graph import calls
from .graph import ForwardGraph, erase_unused, is_method, quiet_between, same_sizes, value

MAX_ROWS = 64
"""Query tokens up to which heads are stacked. With more, repeating the mask costs too much."""
MIN_ROWS = {"cuda": 2}
"""Query tokens from which stacking pays. For a single one CUDA has a special kernel, faster even on repeated heads."""
ALL = slice(None)
INSERTS = [(ALL, ALL, None), (ALL, ALL, None, ALL), (ALL, ALL, None, ALL, ALL), (ALL, ALL, None, ...)]
"""Indices of x[B, Hkv, S, D] that give x[B, Hkv, 1, S, D]."""


def grouped_attention(graph: ForwardGraph, settings) -> str:
    """Stack the query heads of one key-value head as rows of one attention, for `MIN_ROWS` to `MAX_ROWS` query tokens.

    ``sdpa(q[B, H, T, D], repeat(k[B, Hkv, S, D], G), repeat(v, G), mask[B or 1, 1 or H, T or 1, S] or None)`` with
    H = Hkv * G becomes ``sdpa(q[B, Hkv, G * T, D], k, v, mask[.., 1 or Hkv, G * T or 1, S])``: the same sums over the
    same numbers, and keys and values are read once.

    A call stays as it is if it is causal by flag, has dropout, lets PyTorch repeat the heads (enable_gqa), or has too
    many tokens or a symbolic number of them.
    """
    if not settings.gqa:
        return "off"
    done = sum(_rewrite(node) for node in calls(graph.gm, F.scaled_dot_product_attention))
    return f"{done} attention calls read un-repeated key-value heads"


def _rewrite(node: fx.Node) -> bool:
    """Rewrite a call of attention, if it can be. Returns whether it was."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    args = dict(zip(names, node.args)) | node.kwargs
    if args.get("is_causal", False) is not False or args.get("dropout_p", 0.0) != 0.0 or args.get("enable_gqa"):
        return False
    q, mask = args["query"], args.get("attn_mask")
    keys, values = _unrepeat(args["key"]), _unrepeat(args["value"])
    if keys is None or values is None or value(q) is None or value(q).dim() != 4:
        return False
    # The shapes must be those of repeated heads, and known as numbers.
    heads, tokens = value(q).shape[1:3]
    kv_heads = value(keys[0]).shape[1]
    if not isinstance(tokens, int) or not MIN_ROWS.get(value(q).device.type, 1) <= tokens <= MAX_ROWS:
        return False
    if value(values[0]).shape[1] != kv_heads or not isinstance(heads, int):
        return False
    if heads != kv_heads * (group := heads // kv_heads) or value(args["key"]).shape[1] != heads:
        return False
    if mask is not None and not _fits(value(mask), heads, tokens):
        return False
    # Between the repetition and the attention nothing may write to the heads that are read now without it.
    if not all(quiet_between(repeated[0], node) for repeated in (keys[1], values[1])):
        return False
    with node.graph.inserting_before(node):
        stacked = _stack(q, kv_heads, group)
        if mask is not None and (value(mask).shape[1] != 1 or value(mask).shape[2] != 1):
            mask = _stack_mask(mask, kv_heads, group)
        rest = {name: args[name] for name in args if name not in names}
        options = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": False, **rest}
        out = node.graph.call_function(node.target, (stacked, keys[0], values[0]), options)
        out = node.graph.call_method("unflatten", (out, 2, (group, tokens)))
        out = node.graph.call_method("flatten", (out, 1, 2))
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    node.graph.erase_node(node)
    erase_unused({*keys[1], *values[1]})
    return True


def _stack(x: fx.Node, kv_heads: int, group: int) -> fx.Node:
    """[B, H, T, C] -> [B, Hkv, G * T, C]."""
    return x.graph.call_method("flatten", (x.graph.call_method("unflatten", (x, 1, (kv_heads, group))), 2, 3))


def _stack_mask(mask: fx.Node, kv_heads: int, group: int) -> fx.Node:
    """[B, 1 or H, T, S] -> [B, 1 or Hkv, G * T, S]."""
    if value(mask).shape[1] == 1:
        return mask.graph.call_method("repeat", (mask, 1, 1, group, 1))
    return _stack(mask, kv_heads, group)


def _fits(mask: torch.Tensor | None, heads: int, tokens: int) -> bool:
    """True if a mask has one of the shapes that can be stacked."""
    if mask is None or mask.dim() != 4:
        return False
    return mask.shape[1:3] in ((1, 1), (1, tokens), (heads, tokens))


def _unrepeat(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(x, the calls that repeat it) if `node` is x [B, Hkv, S, D] with each head repeated, or else None."""
    if node.target is torch.repeat_interleave or is_method(node, "repeat_interleave"):
        args = dict(zip(("input", "repeats", "dim"), node.args)) | node.kwargs
        x, chain = args["input"], [node]
        if args.get("dim") != 1 or not isinstance(args.get("repeats"), int) or args.get("output_size") is not None:
            return None
    elif is_method(node, "reshape") and is_method(expand := node.args[0], "expand"):
        # transformers' repeat_kv: x[:, :, None].expand(B, Hkv, G, S, D).reshape(B, Hkv * G, S, D).
        inner = expand.args[0]
        if inner.target is not operator.getitem or tuple(inner.args[1]) not in INSERTS:
            return None
        x, chain = inner.args[0], [inner, expand, node]
    else:
        return None
    # The shapes of all steps must be those of a repetition.
    shapes = [value(each).shape if value(each) is not None else () for each in (x, *chain)]
    if len(shapes[0]) != 4 or len(shapes[-1]) != 4 or not isinstance(shapes[0][1], int):
        return None
    before, after = shapes[0], shapes[-1]
    if len(chain) == 3:
        wide = shapes[2]
        if len(wide) != 5 or not same_sizes((wide[0], wide[1], *wide[3:]), before) or after[1] != wide[1] * wide[2]:
            return None
    return (x, chain) if same_sizes((before[0], *before[2:]), (after[0], *after[2:])) else None
