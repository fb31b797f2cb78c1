"""Traces: a function of tensors, integers and modules becomes a graph, and the ways from its arguments to its inputs.

All of it is data that another process reads: the graph as rows (see `serialise`), a spec of each input, the source of
each input in the function's arguments, and the form of the function's result.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..compat import forget_shapes
from .serialise import Row, rows_of

DEPTH = 3
"""Plain objects inside of plain objects in which tensors are looked for."""

Spec = list
"""[shape, strides, numbers of the dimensions that vary, dtype, device] of a tensor, or [n], an integer that varies. The
shape is an example's: in [[5, 8], [8, 1], [0], "int64", "cpu"] any number of rows is an input, and 8 columns."""

Source = tuple
"""("argument", path) is an argument of the function, and ("held", path, slot) a tensor of a module there. A path (1, 2)
means ``arguments[1][2]``. A slot is the path of the module that has the tensor, the dictionary there ("" for
attributes), and its name."""


class Traced(NamedTuple):
    """A function as data.

    rows: its graph.
    specs, sources: the inputs of this graph.
    result: ``{"result": n}`` is a result of the graph, ``{"list": [...]}`` and ``{"tuple": [...]}`` have such results
        in them, and other values are constants.
    """

    rows: list[Row]
    specs: list[Spec]
    sources: list[Source]
    result: Any


def trace(function: Callable, arguments: tuple, varies: Callable[[int], bool], device: torch.device) -> Traced:
    """`function` of these arguments as data: tensors, integers, None, modules, and lists and tuples of these.

    device: where the tensors are.
    varies: tells if a dimension of this size may have another one; integers of 2 and more may, 0 and 1 are constants.
    Modules are not changed: the function sees copies of them that have inputs in place of tensors. TypeError if a size
    that varies became a number, as `len(tensor)` makes of it.
    """
    specs, sources, numbers = inputs_of(arguments, varies)
    mode, values = fakes(specs, shapes := ShapeEnv())
    copies, written = Substitution({key: values[n] for key, n in numbers.items()})(arguments, ()), list[Any]()
    integers = {value.node.expr for value, spec in zip(values, specs) if len(spec) == 1}

    def run(*_: Any) -> list[Any]:
        results = list[Any]()
        written.append(_result(function(*copies), results))
        return results

    try:
        with torch.no_grad(), mode, enable_python_dispatcher():
            gm = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    finally:
        forget_shapes(modes=[mode])
    _inline_constants(gm, device)
    fixed = [value for symbol, value in shapes.replacements.items() if value.is_number and symbol not in integers]
    if fixed:
        raise TypeError(f"a part fixes sizes that vary, of which the example has {fixed}; use shape[0], not len()")

    # Inputs that no node reads are left out.
    used = []
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node.users:
            used.append(number)
        else:
            gm.graph.erase_node(node)
    return Traced(rows_of(gm), [specs[n] for n in used], [sources[n] for n in used], written[0])


def inputs_of(
    arguments: tuple, varies: Callable[[int], bool]
) -> tuple[list[Spec], list[Source], dict[int | tuple, int]]:
    """The specs and sources of the tensors and integers in arguments, and their numbers, by the path of an argument, or
    by the id of a tensor that a module holds.

    A tensor of modules is one input, by whatever names they have it. Each argument is a separate input, because it
    may be another tensor in the next call.
    """
    specs, sources, numbers = list[Spec](), list[Source](), dict[int | tuple, int]()

    def add(key: int | tuple, value: Tensor | int, *source: Any) -> None:
        numbers[key] = len(specs)
        specs.append(spec_of(value, varies))
        sources.append(source)

    def find(value: Any, path: tuple[int, ...]) -> None:
        if isinstance(value, Tensor) or (type(value) is int and value > 1):
            add(path, value, "argument", path)
        elif isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                find(part, (*path, number))
        elif isinstance(value, nn.Module):
            for name, holder in _holders(value):
                for kind in ("_parameters", "_buffers", "") if isinstance(holder, nn.Module) else ("",):
                    for key, tensor in (vars(holder)[kind] if kind else vars(holder)).items():
                        if isinstance(tensor, Tensor) and id(tensor) not in numbers:
                            add(id(tensor), tensor, "held", path, (name, kind, key))

    find(arguments, ())
    return specs, sources, numbers


def spec_of(value: Tensor | int, varies: Callable[[int], bool]) -> Spec:
    """The spec of an input; `varies` tells if a dimension of this size may have another one."""
    if not isinstance(value, Tensor):
        return [value]
    dims = [dim for dim, size in enumerate(value.shape) if size > 1 and varies(size)]
    dtype = str(value.dtype).removeprefix("torch.")
    return [list(value.shape), list(value.stride()), dims, dtype, str(value.device)]


def fakes(specs: list[Spec], shapes: ShapeEnv | None = None) -> tuple[FakeTensorMode, list[Any]]:
    """Inputs of these specs without memory. Sizes that vary are symbols of `shapes`: one symbol for all that are equal
    in the example."""
    shapes = shapes or ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def fake(number: int, spec: Spec) -> Any:
        source = ConstantSource(f"v{number}")
        if len(spec) == 1:
            symbol = shapes.create_symbol(spec[0], source, DimDynamic.DUCK)
            return shapes.create_symintnode(symbol, hint=spec[0], source=source)
        size, stride, dims, dtype, device = spec
        dtype = getattr(torch, dtype)
        if dims:
            kinds = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(len(size))]
            example = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            context = StatelessSymbolicContext(kinds)  # type: ignore[var-annotated]
            size, stride, _ = shapes.create_symbolic_sizes_strides_storage_offset(
                example, source, symbolic_context=context
            )
        with mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return mode, [fake(number, spec) for number, spec in enumerate(specs)]


class Substitution:
    """Arguments with other tensors and integers. Modules become copies with these, because other threads use them.

    values: by path of an argument, and by id of a tensor that a module holds.
    """

    def __init__(self, values: dict[int | tuple, Any]):
        self.values, self.copies = values, dict[int, Any]()

    def __call__(self, value: Any, path: tuple[int, ...] | None = None) -> Any:
        """path: of the value in the arguments; None inside of modules."""
        if path in self.values:
            return self.values[path]
        if isinstance(value, Tensor):
            return self.values.get(id(value), value)
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
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, node.target)
        if isinstance(value, fx.GraphModule):
            continue  # `rows_of` refuses it
        constant = getattr(value, "constant", None)
        value = value if constant is None else constant
        if value.ndim or value.device.type != "cpu":
            raise TypeError(f"a part reads a tensor {tuple(value.shape)} that none of its modules has as an attribute")
        with gm.graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": device}
            number = gm.graph.call_function(torch.ops.aten.scalar_tensor.default, (value.item(),), options)
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)


def _result(value: Any, results: list) -> Any:
    """`value` as a `Traced.result`; the graph's results are added to `results`. (a, [b, None]) becomes
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
    """The modules in `owner`, the plain objects that they have as attributes, and all that these have, with paths.
    These are the objects that `Substitution` copies, except what lists and tuples hold."""
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
