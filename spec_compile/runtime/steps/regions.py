"""regions: cut the graph behind each decoder layer, so that layers alike are compiled once."""

import operator
import re
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ...graph import ModelGraph, attribute, owner
from ...kernels.linear import is_product
from .compile import PartCompiler

LEAST_BYTES = {"cpu": 50_000_000, "cuda": 0}
"""Of the weights that the products of a compiled region read. On a CPU a call of a compiled function costs 0.1 to 0.2
milliseconds of bookkeeping, which is a few per cent of the time in which so many bytes are read. On a GPU one captured
graph replays all regions."""


@dataclass
class Region:
    """A stretch of the graph. inputs, outputs: nodes of the whole graph; alike: its key among those that compute the
    same; body: a module of the inputs' values, the same object for regions alike."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    alike: str
    body: fx.GraphModule


class Regions(nn.Module):
    """Computes what the graph computes that it was cut from, one region after the other.

    `bodies` has a function for each region that differs from the others; `compile` replaces them by compiled ones.
    Values that pass between regions are numbered: the graph's inputs first, then its parameters, then what each region
    returns. A value is dropped behind the last region that reads it.
    """

    def __init__(self, gm: fx.GraphModule, regions: list[Region]):
        super().__init__()
        self.regions, self.bodies = regions, {region.alike: region.body.forward for region in regions}
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        results = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        number = {node: place for place, node in enumerate(inputs)}
        self._constants: dict[int, Tensor] = {}
        self._elements: dict[int, tuple[int, int]] = {}
        """Values that are elements of an input: keys and values of a layer are elements of ``cache``."""
        for node in dict.fromkeys(node for region in regions for node in region.inputs):
            if node.op == "get_attr":
                self._constants[number.setdefault(node, len(number))] = attribute(gm, node.target)
            elif node not in number and _is_given(node):
                self._elements[number.setdefault(node, len(number))] = number[node.args[0]], node.args[1]
        for region in regions:
            for node in region.outputs:
                number.setdefault(node, len(number))
        self._results = [number[node] for node in results]
        self._size, kept, self._plan = len(number), {*self._results}, []
        for region in reversed(regions):
            reads = [number[node] for node in region.inputs]
            last_reads = [place for place in dict.fromkeys(reads) if place not in kept]
            kept.update(last_reads)
            self._plan.insert(0, (region.alike, reads, [number[node] for node in region.outputs], last_reads))

    def forward(self, *arguments):
        values = [*arguments, *[None] * (self._size - len(arguments))]
        for place, parameter in self._constants.items():
            values[place] = parameter
        for place, (source, index) in self._elements.items():
            values[place] = arguments[source][index]
        bodies = self.bodies
        for alike, reads, writes, last_reads in self._plan:
            out = bodies[alike](*[values[place] for place in reads])
            for place in last_reads:
                values[place] = None
            for place, value in zip(writes, out):
                values[place] = value
        return tuple([values[place] for place in self._results])


def compile_regions(graph: ModelGraph, compiler: PartCompiler, name: str) -> Regions:
    """`graph` in regions, of which those alike share one compiled function; `name` begins the functions' names."""
    regions = cut(graph, LEAST_BYTES[graph.device.type])
    for number, (alike, body) in enumerate(regions.bodies.items()):
        regions.bodies[alike] = compiler(body, f"{name}_{number}")
    return regions


def cut(graph: ModelGraph, least_bytes: int = 0) -> Regions:
    """Cut `graph`, already rewritten, behind the last matrix product of each decoder layer.

    There nothing can be fused across the cut: the product's output is written anyway. Graphs whose layers cannot be
    told apart come as one region. least_bytes: of the weights of each region but the last; small layers share one.
    """
    nodes = [node for node in graph.gm.graph.nodes if not _is_given(node) and node.op != "output"]
    ends = {}
    for place, node in enumerate(nodes):
        layer = re.match(r".*?\.\d+(?=\.)", owner(node))
        if is_product(node) and layer:
            ends[layer.group()] = place
    regions, begin = [], 0
    for end in sorted(ends.values()):
        region = nodes[begin : end + 1]
        if _weight_bytes(graph.gm, region) >= least_bytes:
            regions.append(_region(graph.gm, region))
            begin = end + 1
    if begin < len(nodes):
        regions.append(_region(graph.gm, nodes[begin:]))
    shared: dict[str, fx.GraphModule] = {}
    for region in regions:
        region.body = shared.setdefault(region.alike, region.body)
    return Regions(graph.gm, regions)


def _weight_bytes(gm: fx.GraphModule, nodes: list[fx.Node]) -> int:
    """Bytes of the weights that the products among `nodes` read."""
    products = [node for node in nodes if is_product(node)]
    names = {source.target for node in products for source in node.all_input_nodes if source.op == "get_attr"}
    return sum(attribute(gm, name).nbytes for name in names)


def _is_given(node: fx.Node) -> bool:
    """Whether a region gets this value from outside: inputs, parameters, and the caches of layers."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return node.target is operator.getitem and node.args[0].op == "placeholder"


def _sizes_for(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with the sizes that they need from before: a size is computed again in each region, for as an input of a
    compiled function an integer would be a constant."""
    inside, sizes = set(nodes), []

    def need(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in inside and not _is_given(source) and isinstance(source.meta.get("val"), torch.SymInt):
                inside.add(source)
                need(source)
                sizes.append(source)

    for node in nodes:
        need(node)
    return [*sizes, *nodes]


def _region(gm: fx.GraphModule, nodes: list[fx.Node]) -> Region:
    nodes = _sizes_for(nodes)
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    outputs = [node for node in outputs if not isinstance(node.meta.get("val"), torch.SymInt)]
    body = fx.Graph()
    copies = {}
    for number, node in enumerate(inputs):
        copies[node] = body.placeholder(f"v{number}")
        copies[node].meta = dict(node.meta)
    for number, node in enumerate(nodes):
        copies[node] = body.node_copy(node, copies.__getitem__)
        copies[node].name = f"n{number}"
    body.output(tuple(copies[node] for node in outputs))
    shapes = [
        (tuple(t.shape), t.stride(), t.dtype)
        for t in (attribute(gm, node.target) for node in inputs if node.op == "get_attr")
        if isinstance(t, Tensor)
    ]
    kinds = [node.op if _is_given(node) else "value" for node in inputs]
    text = [(node.target, _plain(node.args, copies), _plain(node.kwargs, copies)) for node in nodes]
    alike = repr((kinds, shapes, [copies[node].name for node in outputs], text))
    return Region(inputs, outputs, alike, fx.GraphModule(nn.Module(), body))


def _plain(value, copies: dict):
    """Arguments with the names that nodes have inside their region."""
    return torch.fx.node.map_arg(value, lambda node: _Name(copies[node].name))


class _Name(str):
    def __repr__(self) -> str:
        return str(self)
