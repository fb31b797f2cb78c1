"""add_adapters: linear layers add the low-rank product of the adapter that each row has chosen."""

import operator

import torch
from torch import fx

from ..errors import UnsupportedModelError
from ..graph import ModelGraph, calls, owner
from ..kernels.linear import PLAIN
from ..kernels.linear.low_rank import LowRank, add_low_rank
from .apply import comes_after
from .merge_linears import MERGED

ROOT = "model."
"""Begins the path of each module in a captured graph, because capture wraps the model under this name."""


@comes_after("merge_linears", "use_tree_attention")
def add_adapters(graph: ModelGraph, settings) -> str:
    """Put an `add_low_rank` after each linear layer of ``settings.low_rank``, or after its part of a merged product.

    The rows' adapters [B] int64 are the last entry of the input ``cache``. The added op stands between the product and
    the ops that other passes would fuse with it, so these layers' norms, gates and rotations are not fused with
    products.
    """
    if not settings.low_rank:
        return "off"
    gm = graph.gm
    cache = next(node for node in gm.graph.nodes if node.op == "placeholder" and node.target == "cache")
    *_, last_input = (node for node in gm.graph.nodes if node.op == "placeholder")
    with gm.graph.inserting_after(last_input):
        rows = gm.graph.call_function(operator.getitem, (cache, -1))
    found: dict[str, list[fx.Node]] = {path: [] for path in settings.low_rank}
    for node in calls(gm):
        path = owner(node).removeprefix(ROOT)
        if path in found and _input_of(node) is not None:
            found[path].append(node)
    for number, (path, nodes) in enumerate(found.items()):
        _add(gm, path, nodes, settings.low_rank[path], f"low_rank_{number}", rows)
    graph.has_adapters = True
    return f"{len(found)} linear layers add the low-rank product of each row's adapter"


def _input_of(node: fx.Node) -> fx.Node | None:
    """The input x of the layer whose result a node is; None for a node that is no such result."""
    product = node
    if node.target is operator.getitem and node.args[0].op != "placeholder":  # of the split of a merged product
        product = node.args[0].args[0]
    if not isinstance(product, fx.Node) or product.target is not PLAIN:
        return None
    return product.args[0] if str(product.args[1]).startswith(MERGED) == (product is not node) else None


def _add(
    gm: fx.GraphModule, path: str, nodes: list[fx.Node], part: LowRank, name: str, rows: fx.Node
) -> None:  # fmt: skip
    """Add to the one result of a layer. UnsupportedModelError if there is not exactly one, of [B, N, out]."""
    sizes = [tuple(node.meta["val"].shape[2:]) for node in nodes]
    if sizes != [(part.up.shape[1],)]:
        raise UnsupportedModelError(
            f"max_loras: the linear layer {path} is not called once for a tensor [rows, tokens, features], so its "
            "adapters cannot be chosen for each row; leave max_loras out"
        )
    (node,) = nodes
    for each in ("down", "up", "scale"):
        gm.register_buffer(f"{name}_{each}", getattr(part, each), persistent=False)
    users = [*node.users]
    with gm.graph.inserting_after(node):
        on_gpu = part.down.device.type == "cuda"
        added = gm.graph.call_function(torch.ops.spec_compile.add_low_rank.default if on_gpu else add_low_rank)
    with gm.graph.inserting_before(added):
        tensors = [gm.graph.get_attr(f"{name}_{each}") for each in ("down", "up", "scale")]
    added.args, added.meta = (node, _input_of(node), *tensors, rows), dict(node.meta)
    for user in users:
        user.replace_input_with(node, added)
