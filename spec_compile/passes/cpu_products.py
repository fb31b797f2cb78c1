"""On a CPU what stands around a product of bfloat16 joins it, and products that follow one another become one op.

`fuse_around` joins the addition and the norm before a product and the gate after it. `chain_products` joins the
products between two calls of attention.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels import linear
from ..kernels.linear import around
from ..kernels.linear.chain import CHAIN, Link
from ..kernels.ops import arguments_of
from .apply import comes_after, replace_node
from .fuse_norms import Norm, adds_rows, match_norm
from .linears import halves

aten = torch.ops.aten


@comes_after("use_small_m_linears", "fuse_swiglu", "fuse_norms")
def fuse_around(graph: ModelGraph, settings) -> str:
    """Put `around_product` where a product of bfloat16 has a gate after it, or an RMSNorm before it that only the
    product reads, and `add_around_product` if the norm is of a sum.

    Not in graphs of ``torch.compile(backend="spec")``.
    """
    gates = norms = sums = 0
    if serves(graph, settings):
        for node in calls(graph.gm, aten.mul.Tensor):
            gates += _join_gate(graph, node)
        for node in calls(graph.gm, aten.rsqrt.default):
            norm = match_norm(graph, node)
            if norm is not None and len(norm.out.users) == 1:  # guard: norm-read-by-others
                joined = _join_norm(graph, norm, next(iter(norm.out.users)))
                norms += joined is not None
                sums += bool(joined)
    return f"{gates} gates, {norms} norms and {sums} additions joined to products"


def serves(graph: ModelGraph, settings) -> bool:
    """True if products of a graph take what stands around them."""
    return settings.purpose != "forward" and graph.dtype == torch.bfloat16 and graph.device.type == "cpu"


def _join_gate(graph: ModelGraph, product: fx.Node) -> bool:
    """Join ``silu(a) * b`` to the product of which a and b are the halves, if it is that."""
    for activated, up in (product.args, product.args[::-1]):
        source = halves(activated, up)
        if source is None or not (call := product_taken(graph, source)):
            continue
        gate = activated.args[0]
        if any(len(node.users) > 1 for node in (gate, up, source)):
            continue
        with graph.gm.graph.inserting_before(product):
            fused = graph.gm.graph.call_function(around.AROUND, (source.args[0], None, 0.0, None, *call, True))
        fused.meta = {**source.meta, "val": product.meta["val"]}
        product.replace_all_uses_with(fused)
        for node in (product, activated, gate, up, gate.args[0], source):  # so that the norm has one reader
            graph.gm.graph.erase_node(node)
        return True
    return False


def _join_norm(graph: ModelGraph, norm: Norm, product: fx.Node) -> bool | None:
    """Join a norm to the product that reads it. Returns True if the addition before it joined, too; None if nothing
    did."""
    gm, is_gated = graph.gm, False
    if product.target == around.AROUND and product.args[1] is None:
        call, is_gated = product.args[4:7], product.args[7]
    else:
        call = product_taken(graph, product)
    if not call or product.args[0] is not norm.out:
        return None
    adds, new = adds_rows(graph, norm.x), gm.graph.call_function
    with gm.graph.inserting_before(norm.x if adds else product):  # other readers of the sum may come before the product
        tail = *_parameters(gm, norm, *call), is_gated
        if adds:
            both = new(around.ADD_AROUND, (*norm.x.args, *tail))
            stream, fused = (new(operator.getitem, (both, place)) for place in (0, 1))
            both.meta = {name: value for name, value in product.meta.items() if name != "val"}
            stream.meta = dict(norm.x.meta)
            norm.x.replace_all_uses_with(stream)
        else:
            fused = new(around.AROUND, (norm.x, *tail))
    replace_node(product, fused)
    return adds


def _parameters(gm: fx.GraphModule, norm: Norm, parts: list, bias: fx.Node | None, kind: str) -> tuple:
    """The arguments of the ops for a norm and a product. Nodes of parameters are made anew."""
    weight, *parts = (gm.graph.get_attr(part.target) for part in (norm.weight, *parts))
    return weight, norm.eps, norm.offset, parts, None if bias is None else gm.graph.get_attr(bias.target), kind


def product_taken(graph: ModelGraph, node: fx.Node) -> tuple | None:
    """Parts, bias and kind of a product that the kernel takes; None for any other node."""
    if node.target is linear.FEW_ROWS.op and linear.weight_of(node) is not None:
        parts, bias, kind = [node.args[1]], linear.bias_of(node), ""
    elif node.target == linear.QUANTISED:
        call = arguments_of(node)
        parts, bias, kind = call["parts"], call["bias"], call["kind"]
    else:
        return None
    tensors = [attribute(graph.gm, part.target) for part in parts]
    return (parts, bias, kind) if around.serves(graph.dtype, tensors, kind) else None


# Chains of products.


@dataclass
class Chain:
    """Products of which each reads only the result of the one before it.

    nodes: of the products. links, norms, eps, parts, biases: of the op. residual: of the first addition.
    stream, out: the results so far; the stream is None before the first addition.
    """

    x: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    norms: list[fx.Node] = field(default_factory=list)
    eps: list[float] = field(default_factory=list)
    parts: list[fx.Node] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)
    residual: fx.Node | None = None
    stream: fx.Node | None = None
    out: fx.Node | None = None


@comes_after("fuse_around")
def chain_products(graph: ModelGraph, settings) -> str:
    """Put `chain_products` where products of bfloat16 follow one another, at least one of which adds to the stream."""
    chains = links = 0
    if serves(graph, settings):
        taken: set[fx.Node] = set()
        for node in calls(graph.gm):
            if node not in taken and (chain := _chain_from(graph, node)) is not None:
                taken.update(chain.nodes)
                _replace(graph, chain)
                chains, links = chains + 1, links + len(chain.links)
    return f"{links} products in {chains} chains"


def _chain_from(graph: ModelGraph, node: fx.Node) -> Chain | None:
    """The longest chain that begins with a node; None if that has fewer than two products, or none that adds."""
    chain, now = Chain(node.args[0] if node.args else node), node
    while now is not None and _extended(graph, chain, now):
        users = [] if chain.out is None else list(chain.out.users)
        now = users[0] if len(users) == 1 else None
    return chain if len(chain.nodes) > 1 and chain.stream is not None else None


def _extended(graph: ModelGraph, chain: Chain, node: fx.Node) -> bool:
    """Add the product of a node to a chain, if it is one that can follow."""
    norm, eps, offset, is_gated, stream, out = None, 0.0, None, False, chain.stream, node
    if node.target == around.ADD_AROUND:
        one, other, norm, eps, offset, parts, bias, kind, is_gated = node.args
        x, residual = (one, other) if one is chain.out else (other, one)
        halves = {each.args[1]: each for each in node.users if each.target is operator.getitem}
        if chain.out is None or 1 not in halves or (stream is not None and residual is not stream):
            return False
        if stream is not None and len(_readers(chain)) > 1:  # guard: stream-read-by-others
            return False
        chain.residual = residual if stream is None else chain.residual
        stream, out = halves.get(0, node), halves[1]
    elif node.target == around.AROUND and node.args[1] is None:
        x, _, _, _, parts, bias, kind, is_gated = node.args
    else:
        call = product_taken(graph, node)
        if call is None:
            return False
        x, (parts, bias, kind) = node.args[0], call
    if chain.out is not None and x is not chain.out:
        return False
    if norm is None and any(reader < node for reader in _readers(chain)):  # the op stands where its last product does
        return False
    chain.nodes.append(node)
    chain.links.append(Link(kind, len(parts), norm is not None, bias is not None, is_gated, offset))
    chain.parts += parts
    chain.norms += [] if norm is None else [norm]
    chain.eps += [] if norm is None else [eps]
    chain.biases += [] if bias is None else [bias]
    chain.stream, chain.out = stream, out
    return True


def _readers(chain: Chain) -> list[fx.Node]:
    """The nodes that read the stream so far; none if the product itself stands for it."""
    return [] if chain.stream is None or chain.stream in chain.nodes else list(chain.stream.users)


def _replace(graph: ModelGraph, chain: Chain) -> None:
    """Put the op in the place of a chain's products."""
    new, text = graph.gm.graph.call_function, ";".join(link.text for link in chain.links)
    last = chain.nodes[-1]
    with graph.gm.graph.inserting_before(last):
        both = new(
            CHAIN, (chain.x, chain.residual, chain.norms, chain.eps, chain.parts, chain.biases, text)
        )  # fmt: skip
        both.meta = {name: value for name, value in last.meta.items() if name != "val"}
        stream, out = (new(operator.getitem, (both, place)) for place in (0, 1))
    for old, fresh in ((chain.stream, stream), (chain.out, out)):
        if old not in chain.nodes or old is chain.out:
            fresh.meta = dict(old.meta)
            old.replace_all_uses_with(fresh)
    for node in reversed(chain.nodes):
        for half in list(node.users):
            graph.gm.graph.erase_node(half)
        graph.gm.graph.erase_node(node)
