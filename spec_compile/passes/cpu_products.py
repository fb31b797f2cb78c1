"""fuse_cpu_products: on a CPU products of bfloat16 take what stands around them, and one another, into one op."""

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels import linear
from ..kernels.linear.cpu_products import CPU_PRODUCTS, entries, products_of, supports
from ..kernels.linear.product import Gate, Product, RmsNorm
from ..kernels.ops import arguments_of
from .apply import comes_after, drop_unread, replace_node
from .fuse_norms import Norm, adds_rows, match_norm
from .linears import halves

aten = torch.ops.aten


@comes_after("use_linear_forms", "fuse_swiglu", "fuse_norms")
def fuse_cpu_products(graph: ModelGraph, settings) -> str:
    """Put `cpu_products` where a product of bfloat16 has a gate after it, or an RMSNorm before it that only the product
    reads, with the addition before that; and where products follow one another, of which at least one adds.

    Not in graphs of ``torch.compile(backend="spec")``.
    """
    gates = norms = sums = chains = links = 0
    if settings.purpose != "forward" and graph.dtype == torch.bfloat16 and graph.device.type == "cpu":
        # Gates and norms join the products that they stand around.
        for node in calls(graph.gm, aten.mul.Tensor):
            gates += _join_gate(graph, node)
        for node in calls(graph.gm, aten.rsqrt.default):
            norm = match_norm(graph, node)
            if norm is not None and len(norm.out.users) == 1:  # guard: norm-read-by-others
                joined = _join_norm(graph, norm, next(iter(norm.out.users)))
                norms += joined is not None
                sums += bool(joined)
        # Products that follow one another, now that nothing else reads their results.
        drop_unread(graph.gm.graph)
        taken: set[fx.Node] = set()
        for node in calls(graph.gm):
            if node not in taken and (chain := _chain_from(graph, node)) is not None:
                taken.update(chain.nodes)
                _replace(graph, chain)
                chains, links = chains + 1, links + len(chain.nodes)
    return (
        f"{gates} gates, {norms} norms and {sums} additions joined to products; {links} products follow one another in "
        f"{chains} chains"
    )


def arguments_of_product(graph: ModelGraph, node: fx.Node, gated: bool = False) -> tuple | None:
    """The arguments with which `CPU_PRODUCTS` has the second result that a product has, which the kernel takes; None
    for any other node."""
    scales, kind = None, ""
    if node.target is linear.CPU_GEMM.op and linear.weight_of(node) is not None:
        weight, bias = node.args[1], linear.bias_of(node)
    elif node.target == linear.QUANTISED and len(arguments_of(node)["parts"]) == 2:
        _, (weight, scales), bias, kind = arguments_of(node).values()
    else:
        return None
    parts = [attribute(graph.gm, part.target) for part in (weight, scales) if part is not None]
    if not supports(graph.dtype, parts, kind):
        return None
    layer = Product(node.args[0], weight, bias, scales, kind, after=Gate() if gated else None)
    return node.args[0], None, *entries(layer)


def _put(graph: ModelGraph, before: fx.Node, arguments: tuple, meta: dict) -> tuple[fx.Node, fx.Node]:
    """Put the op ahead of a node; returns its two results. meta: of the node that it replaces. Nodes of parameters are
    made anew, because they may come later."""
    gm = graph.gm

    def anew(node):
        return gm.graph.get_attr(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else node

    with gm.graph.inserting_before(before):
        x, residual, tensors, layers = arguments
        both = gm.graph.call_function(CPU_PRODUCTS, (x, residual, [*map(anew, tensors)], layers))
        both.meta = {name: value for name, value in meta.items() if name != "val"}
        stream, out = (gm.graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    return stream, out


def _join_gate(graph: ModelGraph, product: fx.Node) -> bool:
    """Join ``silu(a) * b`` to the product of which a and b are the halves, if it is that."""
    for activated, up in (product.args, product.args[::-1]):
        source = halves(activated, up)
        if source is None or (arguments := arguments_of_product(graph, source, True)) is None:
            continue
        gate = activated.args[0]
        if any(len(node.users) > 1 for node in (gate, up, source)):
            continue
        stream, out = _put(graph, product, arguments, source.meta)
        out.meta = {**source.meta, "val": product.meta["val"]}
        product.replace_all_uses_with(out)
        for node in (stream, product, activated, gate, up, gate.args[0], source):  # so that the norm has one reader
            graph.gm.graph.erase_node(node)
        return True
    return False


def _join_norm(graph: ModelGraph, norm: Norm, reader: fx.Node) -> bool | None:
    """Join a norm to the product that reads it. Returns True if the addition before it joined, too; None if nothing
    did."""
    is_joined = reader.target == CPU_PRODUCTS
    arguments = reader.args if is_joined else arguments_of_product(graph, reader)
    if arguments is None or arguments[0] is not norm.out or (layer := products_of(*arguments)[0]).before is not None:
        return None
    x, residual = norm.x, None
    adds = adds_rows(graph, norm.x)
    if adds:
        x, residual = norm.x.args
    at = norm.x if adds else reader  # other readers of the sum may come before the product
    both = entries(replace(layer, before=RmsNorm(norm.weight, norm.eps, norm.offset)))
    stream, out = _put(graph, at, (x, residual, *both), reader.meta)
    product = next(iter(reader.users)) if is_joined else reader
    out.meta = dict(product.meta)
    product.replace_all_uses_with(out)
    for node in dict.fromkeys((product, reader)):
        graph.gm.graph.erase_node(node)
    if adds:
        replace_node(norm.x, stream)
    else:
        graph.gm.graph.erase_node(stream)
    return adds


# Chains of products.


@dataclass
class Chain:
    """Products of which each reads only the result of the one before it.

    nodes: the products.
    arguments: what the op that replaces them gets.
    stream, out: the nodes of its results; the stream is None before the first addition, or if nothing reads it.
    """

    nodes: list[fx.Node]
    arguments: tuple
    stream: fx.Node | None
    out: fx.Node

    def readers(self) -> list[fx.Node]:
        """The nodes that read the stream so far."""
        return [] if self.stream is None else list(self.stream.users)


def _chain_from(graph: ModelGraph, node: fx.Node) -> Chain | None:
    """The longest chain that begins with a node; None if that has fewer than two products, or none that adds."""
    chain = _link(graph, node)
    # A product that adds may only follow another one.
    if chain is None or products_of(*chain.arguments)[0].before is not None:
        return None
    while len(chain.out.users) == 1 and (link := _link(graph, next(iter(chain.out.users)))) is not None:
        following = _joined(chain, link)
        if following is None:
            break
        chain = following
    return chain if len(chain.nodes) > 1 and chain.arguments[1] is not None else None


def _link(graph: ModelGraph, node: fx.Node) -> Chain | None:
    """A product as a chain of one; None if the node is none that the kernel takes."""
    if node.target != CPU_PRODUCTS:
        arguments = arguments_of_product(graph, node)
        return arguments and Chain([node], arguments, None, node)
    results = {each.args[1]: each for each in node.users}
    return Chain([node], node.args, results.get(0), results[1]) if 1 in results else None


def _joined(chain: Chain, link: Chain) -> Chain | None:
    """A chain and the product after it; None if that cannot follow."""
    x, residual, *products = link.arguments
    node, adds = link.nodes[0], residual is not None
    if adds:
        x, residual = (x, residual) if x is chain.out else (residual, x)
        if chain.arguments[1] is not None and residual is not chain.stream:
            return None
        if len(chain.readers()) > 1:  # guard: stream-read-by-others
            return None
    elif products_of(*link.arguments)[0].before is not None or any(reader < node for reader in chain.readers()):
        return None  # the op stands where its last product does
    if x is not chain.out:
        return None
    begin, before, *others = chain.arguments
    both = begin, residual if adds and before is None else before, *map(operator.add, others, products)
    return Chain([*chain.nodes, node], both, link.stream if adds else chain.stream, link.out)


def _replace(graph: ModelGraph, chain: Chain) -> None:
    """Put the op in the place of a chain's products."""
    last = chain.nodes[-1]
    for old, new in zip((chain.stream, chain.out), _put(graph, last, chain.arguments, last.meta)):
        if old is not None:
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
    for node in reversed(chain.nodes):
        for result in list(node.users):
            graph.gm.graph.erase_node(result)
        graph.gm.graph.erase_node(node)
