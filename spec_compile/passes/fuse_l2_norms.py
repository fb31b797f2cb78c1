"""fuse_l2_norms: on a GPU the L2 norms of the delta rule's queries and keys become one small kernel."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels.recurrence import advance_or_look
from .apply import comes_after, takes_kernels
from .fuse_norms import CASTS

aten = torch.ops.aten


@comes_after("use_states")
def fuse_l2_norms(graph: ModelGraph, settings) -> str:
    """Replace the norms of q and k that a recurrence of kind "delta" reads by `spec_compile::l2_norms`.

    Only in a graph of 16 bits.
    """
    fused = 0
    if takes_kernels(graph, settings):
        for node in calls(graph.gm, advance_or_look):
            if node.kwargs["kind"] == "delta":
                fused += _fuse(graph.gm.graph, *node.kwargs["inputs"][:2])
    return f"{fused} pairs of L2 norms fused"


def _fuse(graph: fx.Graph, q: fx.Node, k: fx.Node) -> bool:
    """Put the kernel's op in the place of both norms. Returns True if they are norms that it computes."""
    scale, normed = _scaled(q)
    norms = [_match(each) for each in (normed, k)]
    if None in norms or norms[0][1] != norms[1][1] or norms[0][0].meta["val"].shape != norms[1][0].meta["val"].shape:
        return False
    (before_q, eps), (before_k, _) = norms
    with graph.inserting_before(max(q, k)):
        both = graph.call_function(torch.ops.spec_compile.l2_norms.default, (before_q, before_k, eps, scale))
        parts = [graph.call_function(operator.getitem, (both, number)) for number in (0, 1)]
    both.meta = {key: value for key, value in q.meta.items() if key != "val"}
    both.meta["val"] = (q.meta["val"], k.meta["val"])
    for part, old in zip(parts, (q, k)):
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)
    return True


def _scaled(q: fx.Node) -> tuple[float, fx.Node]:
    """The number by which q is multiplied, and what it multiplies."""
    if q.target == aten.mul.Tensor and isinstance(q.args[1], float):
        return q.args[1], q.args[0]
    return 1.0, q


def _match(product: fx.Node) -> tuple[fx.Node, float] | None:
    """x and eps of ``x * rsqrt(sum(x * x) + eps)`` in float32; x as it is before its cast."""
    if product.target != aten.mul.Tensor or not all(isinstance(each, fx.Node) for each in product.args):
        return None
    wide, root = product.args
    shifted = root.args[0] if root.target == aten.rsqrt.default else None
    total, eps = shifted.args if shifted is not None and shifted.target == aten.add.Tensor else (None, None)
    if total is None or total.target != aten.sum.dim_IntList or total.args[1:] != ([-1], True):
        return None
    square = total.args[0]
    if square.target != aten.mul.Tensor or square.args != (wide, wide) or wide.meta["val"].dtype != torch.float32:
        return None
    return (wide.args[0] if wide.target in CASTS else wide), eps
