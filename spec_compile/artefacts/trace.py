"""Traces: a function of tensors, integers and modules becomes a graph, specs of its inputs, and a small adapter."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from ..compat import forget_shapes
from .forms import PartForm
from .graphs import Row, rows_of
from .specs import Spec, fakes, spec_of

DEPTH = 3
"""Plain objects inside of plain objects in which tensors are looked for."""


class Traced(NamedTuple):
    """A function as data: its graph, the inputs of that, and how they come from its arguments."""

    rows: list[Row]
    specs: list[Spec]
    form: PartForm


def trace(function: Callable, arguments: tuple, varies: Callable[[int], bool], device: torch.device) -> Traced:
    """`function` of these arguments as data: tensors, integers, None, modules, and lists and tuples of these.

    device: of the tensors.
    varies: tells if a dimension of this size may have another one; integers of 2 and more may, 0 and 1 are constants.
    Modules are not changed: the function sees copies of them that have inputs in place of tensors. TypeError if a size
    that varies became a number, as `len(tensor)` makes of it.
    """
    inputs = PartInputs(arguments, varies)
    mode, values = fakes(inputs.specs)
    held, given = ({key: values[n] for key, n in numbers.items()} for numbers in (inputs.held, inputs.given))
    copies, written = Substitution(held, given)(arguments, ()), list[Any]()
    integers = {value.node.expr for value, spec in zip(values, inputs.specs) if len(spec) == 1}

    def run(*_) -> list[Any]:
        results = list[Any]()
        written.append(_result(function(*copies), results))
        return results

    try:
        with torch.no_grad(), mode, enable_python_dispatcher():
            gm = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    finally:
        forget_shapes(modes=[mode])
    _inline_constants(gm, device)
    fixed = [
        value for symbol, value in mode.shape_env.replacements.items() if value.is_number and symbol not in integers
    ]
    if fixed:
        raise TypeError(f"a part fixes sizes that vary, of which the example has {fixed}; use shape[0], not len()")
    used = _drop_unused(gm.graph)
    form = PartForm([inputs.sources[number] for number in used], written[0])
    return Traced(rows_of(gm), [inputs.specs[number] for number in used], form)


class PartInputs:
    """The tensors and integers in arguments. A tensor of modules is one input, by whatever names they have it; each
    argument is an input of its own, because it may be another tensor in the next call.

    held: numbers of the inputs that modules hold, by id of the tensor.
    given: numbers of the others, by path in the arguments.
    sources: (kind, path, slot) of each input.
    """

    def __init__(self, arguments: tuple, varies: Callable[[int], bool]):
        self.varies, self.specs, self.sources = varies, list[Spec](), list[tuple]()
        self.held: dict[int, int] = {}
        self.given: dict[tuple[int, ...], int] = {}
        self._find(arguments, ())

    def _find(self, value: Any, path: tuple[int, ...]) -> None:
        if isinstance(value, Tensor) or (type(value) is int and value > 1):
            self.given[path] = self._add(value, ("argument", path))
        elif isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                self._find(part, (*path, number))
        elif isinstance(value, nn.Module):
            for name, holder in _holders(value):
                for kind in ("_parameters", "_buffers", "") if isinstance(holder, nn.Module) else ("",):
                    for key, tensor in (vars(holder)[kind] if kind else vars(holder)).items():
                        if isinstance(tensor, Tensor) and id(tensor) not in self.held:
                            self.held[id(tensor)] = self._add(tensor, ("held", path, (name, kind, key)))

    def _add(self, value: Tensor | int, source: tuple) -> int:
        self.specs.append(spec_of(value, self.varies))
        self.sources.append(source)
        return len(self.specs) - 1


class Substitution:
    """Arguments with other tensors and integers. Modules become copies with these, because other threads use them."""

    def __init__(self, held: dict[int, Tensor], given: dict[tuple[int, ...], Any]):
        self.held, self.given = held, given
        self.copies: dict[int, Any] = {}

    def __call__(self, value: Any, path: tuple[int, ...] | None = None) -> Any:
        """path: of the value in the arguments; None inside of modules."""
        if path in self.given:
            return self.given[path]
        if isinstance(value, Tensor):
            return self.held.get(id(value), value)
        if isinstance(value, nn.Module) or _is_plain(value):
            return self._copy(value)
        if isinstance(value, (list, tuple)):
            parts = [self(part, None if path is None else (*path, n)) for n, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def _copy(self, whole: Any) -> Any:
        if id(whole) not in self.copies:
            copy = self.copies[id(whole)] = object.__new__(type(whole))
            for name, value in vars(whole).items():
                is_table = name in ("_parameters", "_buffers", "_modules")
                copy.__dict__[name] = {k: self(v) for k, v in value.items()} if is_table else self(value)
        return self.copies[id(whole)]


def _inline_constants(gm: fx.GraphModule, device: torch.device) -> None:
    """Numbers that operators hold as tensors of the host (``x[...] = -1``) are made by the graph itself, on its device,
    because a CUDA graph cannot read the host's."""
    for node in [node for node in gm.graph.nodes if node.op == "get_attr"]:
        value = getattr(gm, node.target)
        if isinstance(value, fx.GraphModule):
            continue
        value = getattr(value, "constant", None) if getattr(value, "constant", None) is not None else value
        if value.ndim or value.device.type != "cpu":
            raise TypeError(f"a part reads a tensor {tuple(value.shape)} that none of its modules has as an attribute")
        with gm.graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": device}
            number = gm.graph.call_function(torch.ops.aten.scalar_tensor.default, (value.item(),), options)
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)


def _drop_unused(graph: fx.Graph) -> list[int]:
    """Erase the inputs that no node reads; returns the numbers of the others."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if not node.users:
            graph.erase_node(node)
    return [number for number, node in enumerate(inputs) if node.users]


def _result(value: Any, results: list) -> Any:
    """`value` as the result of a `PartForm`, whose results of the graph are added to `results`. (a, [b, None]) becomes
    ``{"tuple": [{"result": 0}, {"list": [{"result": 1}, None]}]}``, and adds a and b."""
    if isinstance(value, (Tensor, torch.SymInt)):
        results.append(value)
        return {"result": len(results) - 1}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_result(part, results) for part in value]}
    if value is None or type(value) in (bool, int, float):
        return value
    raise TypeError(f"a part returns tensors, numbers, None, lists and tuples, not {type(value).__name__}")


def _holders(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules in `owner`, the plain objects that they have as attributes, and all that these have, with paths: of
    all that `Substitution` copies, except what lists and tuples hold."""
    found, waiting = {id(owner)}, deque[tuple[str, Any]]([("", owner)])
    while waiting:
        path, holder = waiting.popleft()
        yield path, holder
        modules = holder._modules if isinstance(holder, nn.Module) else {}
        for name, value in [*modules.items(), *vars(holder).items()]:
            if id(value) not in found and (isinstance(value, nn.Module) or _is_plain(value)):
                found.add(id(value))
                waiting.append((f"{path}.{name}", value))


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    """True for an object that is no module, and has a tensor, a module or another such object as an attribute."""
    if isinstance(value, (Tensor, nn.Module, tuple, list, dict, type)) or not hasattr(value, "__dict__") or not depth:
        return False
    return any(isinstance(each, (Tensor, nn.Module)) or _is_plain(each, depth - 1) for each in vars(value).values())
