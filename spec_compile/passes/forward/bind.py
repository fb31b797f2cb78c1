"""`bind`: the weights of a rewritten forward become inputs again, and follow the module's parameters."""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ...graph import attribute
from ..merge_linears import join_parameters
from .lower import ForwardGraph


def bind(graph: ForwardGraph, inputs: list, compile_graph: Callable) -> "BoundForward":
    """Compile a rewritten forward with its weights as inputs, the last ones.

    inputs: of the forward.
    compile_graph: ``compile_graph(gm, examples, kept) -> callable``; kept: places of the examples besides weights that
        stay where they are between calls, which `torch._dynamo.mark_static_address` has marked, such as caches.
    """
    held = {name: inputs[place] for name, place in graph.places.items()}
    groups, examples = [], [node.meta["val"] for node in graph.gm.graph.nodes if node.op == "placeholder"]
    mode = next(example.fake_mode for example in examples if isinstance(example, Tensor))
    last = [node for node in graph.gm.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.gm.graph.nodes if node.op == "get_attr"]
    for name in dict.fromkeys(node.target for node in nodes):
        weight = attribute(graph.gm, name)
        groups.append(tuple(graph.places[part] for part in ([name] if name in held else _parts(weight, held))))
        with mode:
            examples.append(
                torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            )
        with graph.gm.graph.inserting_after(last[-1]):
            last.append(graph.gm.graph.placeholder(name))
        for node in (node for node in nodes if node.target == name):
            node.replace_all_uses_with(last[-1])
            graph.gm.graph.erase_node(node)
    parameters = set(graph.places.values())
    others = [place for place in range(len(inputs)) if place not in parameters]
    kept = [at for at, place in enumerate(others) if getattr(inputs[place], "_dynamo_static_input_type", None)]
    without_weights = fx.GraphModule(nn.Module(), graph.gm.graph)
    compiled = compile_graph(without_weights, examples, kept)
    return BoundForward(compiled, others, groups)


def _parts(joined: Tensor, held: dict[str, nn.Parameter]) -> list[str]:
    """The names of the parameters that view `joined`, in the order of its rows."""
    begin, end = joined.data_ptr(), joined.data_ptr() + joined.nbytes
    inside = [name for name, parameter in held.items() if begin <= parameter.data_ptr() < end]
    return sorted(inside, key=lambda name: held[name].data_ptr())


class BoundForward:
    """A compiled forward that is called with a module's inputs and parameters.

    The first call with new parameters makes those of a joined weight views of one tensor, with equal values, so that
    in-place updates are seen. A parameter that was replaced since has another address, and all are joined anew.

    others: places of the inputs that are no parameters. groups: for each weight the places of its parameters.
    """

    def __init__(self, compiled: Callable, others: list[int], groups: list[tuple[int, ...]]):
        self.compiled, self.others, self.groups = compiled, others, groups
        self._places = [place for group in groups for place in group]
        self._addresses: list[int] = []
        self._weights: list[Tensor] = []

    def __call__(self, *arguments):
        if self._addresses != [arguments[place].data_ptr() for place in self._places]:  # guard: joined-weights
            self._weights = [join([arguments[place] for place in group]) for group in self.groups]
            self._addresses = [arguments[place].data_ptr() for place in self._places]
        return self.compiled(*(arguments[place] for place in self.others), *self._weights)


def join(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all parameters in one tensor, of which they become views, also inside ``torch.inference_mode``."""
    if len(parameters) == 1:
        return parameters[0]
    with torch.inference_mode(False), torch.no_grad():
        return join_parameters(parameters)
