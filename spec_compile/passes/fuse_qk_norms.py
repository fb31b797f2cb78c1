"""fuse_qk_norms: on a GPU the RMSNorm of every query and key head joins tree attention, as its rotation did before."""

import torch
from torch import fx

from ..graph import ModelGraph, calls
from .apply import comes_after
from .fuse_norms import Norm, match_norm
from .fuse_rotary import taking
from .nodes import swaps_heads

aten = torch.ops.aten


@comes_after("fuse_rotary")
def fuse_qk_norms(graph: ModelGraph, settings) -> str:
    """Hand q and k that tree attention rotates to it as they were before their norms, with the norms' weights."""
    joined = 0
    norms = {norm.out: norm for root in calls(graph.gm, aten.rsqrt.default) if (norm := match_norm(graph, root))}
    for node in taking("q_norm", graph) if norms else ():
        q, k = (_norm_of(node.kwargs[name], norms) for name in ("q", "k"))
        if "cos" in node.kwargs and q and k and (q.eps, q.offset) == (k.eps, k.offset):
            edits = {"eps": q.eps, "offset": q.offset}
            with graph.gm.graph.inserting_before(node):
                for name, norm in (("q", q), ("k", k)):
                    edits[name] = _before(node.kwargs[name], norm)
                    edits[f"{name}_norm"] = graph.gm.graph.get_attr(norm.weight.target)
            node.kwargs = {**node.kwargs, **edits}
            joined += 1
    return f"{joined} layers norm queries and keys where they attend"


def _norm_of(x: fx.Node, norms: dict[fx.Node, Norm]) -> Norm | None:
    """The norm over the last dimension that x [B, H, T, D] comes out of, maybe before heads and tokens were swapped."""
    return norms.get(x.args[0] if swaps_heads(x) else x)


def _before(x: fx.Node, norm: Norm) -> fx.Node:
    """x as it would be without the norm."""
    if not swaps_heads(x):
        return norm.x
    swap = x.graph.call_function(x.target, (norm.x, *x.args[1:]))
    swap.meta = dict(x.meta)
    return swap
