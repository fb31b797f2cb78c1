"""Regions: the graph is cut after each decoder layer, so that layers alike are compiled once."""

import operator
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ..graph import ModelGraph, attribute, is_size, owner
from ..kernels import experts, linear
from .part import PartCompiler
from .serialise import name_of

LEAST_BYTES = {"cpu": 50_000_000, "cuda": 0}
"""Least weight bytes of a compiled region. On a CPU its call costs 0.1 to 0.2 milliseconds, a few per cent of the time
to read these bytes. On a GPU one captured graph replays all regions."""
PRODUCTS = {*linear.PRODUCTS, *experts.PRODUCTS}


@dataclass
class Region:
    """A stretch of the graph.

    inputs, outputs: nodes of the original graph.
    alike: a text that is equal for regions that compute the same.
    body: a module of the inputs' values; regions alike share one object.
    """

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    alike: str
    body: fx.GraphModule


class Regions(nn.Module):
    """Computes the graph that it was cut from, one region after the other.

    `bodies` has one function for regions alike, which `compile_regions` replaces by a compiled one. Values between
    regions are numbered: the graph's inputs, then its parameters and the elements of its inputs, then the regions'
    results. With inputs (ids, cache), a parameter w, cache[0] and a result h: ids 0, cache 1, w 2, cache[0] 3, h 4. A
    value is dropped after the last region that reads it.
    """

    def __init__(self, gm: fx.GraphModule, regions: list[Region]):
        super().__init__()
        self.regions, self.bodies = regions, {region.alike: region.body.forward for region in regions}
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        results = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        numbers = {node: number for number, node in enumerate(inputs)}
        self._template: list[Tensor | None] = []
        """The values after the inputs; None except for parameters, which are known before a call."""
        self._elements: list[tuple[int, int, fx.node.Argument]] = []
        """(number, number of the input, index) of values that are elements of an input such as ``cache``."""
        for node in dict.fromkeys(node for region in regions for node in region.inputs):
            if node in numbers or not _is_given(node):
                continue
            numbers[node] = len(numbers)
            self._template.append(attribute(gm, node.target) if node.op == "get_attr" else None)
            if node.op != "get_attr":
                self._elements.append((numbers[node], numbers[node.args[0]], node.args[1]))
        given = range(len(inputs), len(numbers))
        for node in (node for region in regions for node in region.outputs):
            numbers[node] = len(numbers)
            self._template.append(None)
        self._results = [numbers[node] for node in results]
        read_later = {*self._results}
        self._plan: list[tuple[str, list[int], list[int], list[int]]] = []
        for region in reversed(regions):
            reads = [numbers[node] for node in region.inputs]
            last_reads = [number for number in dict.fromkeys(reads) if number not in read_later]
            read_later.update(last_reads)
            self._plan.insert(0, (region.alike, reads, [numbers[node] for node in region.outputs], last_reads))
        *_, (_, reads, writes, _) = self._plan
        elements = {number for number, *_ in self._elements}
        is_apart = elements.isdisjoint(reads) and {*writes}.isdisjoint(self._results[1:])
        self._of_rows = {*reads} - {*given} if is_apart else set[int]()
        """Values of each row that the last region reads, if it reads no cache and computes the first result only."""

    def forward(self, *arguments: Any, rows: int | None = None) -> tuple:
        """The graph's results. rows: the first rows of the batch for which the first result, the logits, is wanted; the
        last region computes it for these only if it can."""
        values = [*arguments, *self._template]
        for number, source, index in self._elements:
            values[number] = arguments[source][index]
        for place, (alike, reads, writes, last_reads) in enumerate(self._plan, 1):
            inputs = [values[number] for number in reads]
            if rows is not None and place == len(self._plan):
                # The first 2 of 6 rows with 4 tokens are x[:2] of x [6, 4, C], and x[:8] of x [24, C].
                share = {n: max(rows * len(values[n]) // len(arguments[0]), 1) for n in self._of_rows}
                inputs = [x[: share[n]] if n in share else x for n, x in zip(reads, inputs)]
            out = self.bodies[alike](*inputs)
            for number in last_reads:
                values[number] = None
            for number, value in zip(writes, out):
                values[number] = value
        return tuple([values[number] for number in self._results])


def compile_regions(graph: ModelGraph, compiler: PartCompiler, name: str) -> Regions:
    """`graph` in regions; regions alike share one compiled function. `name` begins the functions' names."""
    regions = cut(graph, LEAST_BYTES[graph.device.type])
    for number, (alike, body) in enumerate(regions.bodies.items()):
        regions.bodies[alike] = compiler(body, f"{name}_{number}", alike)
    return regions


def cut(graph: ModelGraph, least_bytes: int = 0) -> Regions:
    """Cut `graph`, already rewritten, after the last matrix product of each decoder layer.

    The cut prevents no fusion, because the product's output is written anyway. A graph whose layers cannot be told
    apart is one region. least_bytes: of the weights of each region but the last; small layers share a region.
    """
    nodes = [node for node in graph.gm.graph.nodes if not _is_given(node) and node.op != "output"]
    ends = {}
    for index, node in enumerate(nodes):
        layer = re.match(r".*?\.\d+(?=\.)", owner(node))
        if node.target in PRODUCTS and layer:
            end = index + 1  # after the getitem nodes that follow a node with several results
            while end < len(nodes) and nodes[end].target is operator.getitem and nodes[end].args[0] is node:
                end += 1
            ends[layer.group()] = end
    # Results such as the last hidden states come before the head, which stands apart then.
    results = next(node for node in graph.gm.graph.nodes if node.op == "output").args[0]
    last = max((nodes.index(node) + 1 for node in results[1:] if node in nodes), default=0)
    if ends and last > max(ends.values()):
        ends["head"] = last
    regions, begin = list[Region](), 0
    for end in sorted(ends.values()):
        stretch = nodes[begin:end]
        products = [node for node in stretch if node.target in PRODUCTS]
        weights = {source.target for node in products for source in node.all_input_nodes if source.op == "get_attr"}
        if sum(attribute(graph.gm, name).nbytes for name in weights) >= least_bytes:
            regions.append(_region(graph.gm, stretch))
            begin = end
    if begin < len(nodes):
        regions.append(_region(graph.gm, nodes[begin:]))
    shared: dict[str, fx.GraphModule] = {}
    for region in regions:
        region.body = shared.setdefault(region.alike, region.body)
    return Regions(graph.gm, regions)


def _is_given(node: fx.Node) -> bool:
    """True for values from outside the graph: inputs, parameters, and caches of layers."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return node.target is operator.getitem and node.all_input_nodes[0].op == "placeholder"


def _sizes_for(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` after the sizes that they need. Each region computes sizes again, because an integer input of a compiled
    function would be a constant."""
    inside, sizes = set(nodes), []

    def need(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in inside and not _is_given(source) and is_size(source):
                inside.add(source)
                need(source)
                sizes.append(source)

    for node in nodes:
        need(node)
    return [*sizes, *nodes]


def _region(gm: fx.GraphModule, nodes: list[fx.Node]) -> Region:
    nodes = _sizes_for(nodes)
    inputs, outputs = _ends(nodes)
    body = fx.Graph()
    copies = {}
    for number, node in enumerate(inputs):
        copies[node] = body.placeholder(f"v{number}")
        copies[node].meta = dict(node.meta)
    for number, node in enumerate(nodes):
        copies[node] = body.node_copy(node, copies.__getitem__)
        copies[node].name = f"n{number}"
    body.output(tuple(copies[node] for node in outputs))
    return Region(inputs, outputs, _text(gm, nodes), fx.GraphModule(nn.Module(), body))


def describe(graph: ModelGraph) -> str:
    """A text that is equal for graphs that compute the same with parameters of equal layouts."""
    return _text(graph.gm, [node for node in graph.gm.graph.nodes if not _is_given(node) and node.op != "output"])


def _ends(nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The values that `nodes` read from outside, and those that other nodes read from them."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return inputs, [node for node in outputs if not is_size(node)]


def _text(gm: fx.GraphModule, nodes: list[fx.Node]) -> str:
    """The computation of `nodes` as a text, equal for parameters of equal layouts."""
    inputs, outputs = _ends(nodes)
    names = {node: f"v{number}" for number, node in enumerate(inputs)}
    names |= {node: f"n{number}" for number, node in enumerate(nodes)}
    read = [attribute(gm, node.target) for node in inputs if node.op == "get_attr"]
    shapes = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in read if isinstance(t, Tensor)]
    kinds = [node.op if _is_given(node) else "value" for node in inputs]
    text = list[tuple]()
    for node in nodes:
        named = node.target
        with suppress(TypeError):  # another process does not know it by a name
            named = name_of(named)
        text.append((named, *(map_arg(given, lambda each: _Name(names[each])) for given in (node.args, node.kwargs))))
    return repr((kinds, shapes, [names[node] for node in outputs], text))


class _Name(str):
    def __repr__(self) -> str:
        return str(self)
