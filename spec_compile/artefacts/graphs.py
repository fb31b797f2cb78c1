"""Graphs as data: rows of operators by name, which another process reads without running any code of theirs."""

import contextlib
import functools
import importlib
import math
import operator
import pkgutil
from typing import Any

import torch
from torch import fx, nn

from .. import kernels

NAMESPACES = {"aten", "prims", "spec_compile"}
"""Namespaces of the operators that rows may name."""
MODULES = {"_operator": operator, "math": math, "torch": torch}
"""Modules of the functions of sizes that rows may name."""
FUNCTIONS = {
    "_operator": set("getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_".split()),
    "math": {"ceil", "floor", "trunc"},
    "torch": {"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum"},
}
"""Functions of sizes, and `getitem`, that rows may name."""
CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
"""Classes of constants that are named attributes of torch."""

Row = list
"""[name of the operator, arguments, named arguments]; ``{"row": n}`` is the result of row n. The inputs are the first
rows, whose operator is ``""``."""


def rows_of(graph: fx.Graph) -> list[Row]:
    """`graph` as rows; the last one has the results as its arguments and the name "output".

    TypeError if it has a node that is neither an input nor a call of a named operator.
    """
    rows: list[Row] = []
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        numbers[node] = len(rows)
        if node.op == "placeholder":
            rows.append(["", [], {}])
        elif node.op == "output":
            rows.append(["output", [_data(value, numbers) for value in node.args[0]], {}])
        elif node.op == "call_function":
            named = {key: _data(value, numbers) for key, value in node.kwargs.items()}
            rows.append([name_of(node.target), [_data(value, numbers) for value in node.args], named])
        else:
            raise TypeError(f"node {node.name}: expected an input or a call of an operator, got {node.op}")
    return rows


def graph_of(rows: list[Row]) -> fx.GraphModule:
    """The graph of rows. ValueError if they name an operator that is not permitted, or have another form."""
    graph, values = fx.Graph(), list[fx.Node]()
    for number, row in enumerate(rows):
        try:
            name, arguments, named = row
            if not name:
                values.append(graph.placeholder(f"v{number}"))
                continue
            arguments = [_value(each, values) for each in arguments]
            named = {key: _value(each, values) for key, each in named.items()}
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"row {number}: expected [name, arguments, named arguments], got {row}") from error
        if name == "output":
            graph.output(tuple(arguments))
        else:
            values.append(graph.call_function(target_of(name), tuple(arguments), named))
    return fx.GraphModule(nn.Module(), graph)


def name_of(target: Any) -> str:
    """The name of an operator: "aten.add.Tensor", "_operator.getitem". TypeError if rows have no name for it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    module = "torch" if module.startswith("torch.") else module
    if name in FUNCTIONS.get(module, ()):
        return f"{module}.{name}"
    raise TypeError(f"expected an operator of {', '.join(sorted(NAMESPACES))} or a function of sizes, got {target}")


def target_of(name: str) -> Any:
    """The operator of a name. ValueError if it is not permitted or not known."""
    space, _, rest = name.partition(".")
    if space in FUNCTIONS and rest in FUNCTIONS[space]:
        return getattr(MODULES[space], rest)
    packet, _, overload = rest.rpartition(".")
    if space == "spec_compile" and not hasattr(torch.ops.spec_compile, packet):
        _define_operators()
    if space in NAMESPACES and packet and hasattr(getattr(torch.ops, space), packet):
        target = getattr(getattr(getattr(torch.ops, space), packet), overload, None)
        if isinstance(target, torch._ops.OpOverload):
            return target
    raise ValueError(f"operator: expected a known one of {', '.join(sorted(NAMESPACES))}, got {name!r}")


@functools.cache
def _define_operators() -> None:
    """Import all modules of kernels, except those that need a package that is not installed."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)


def _data(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """An argument as JSON data."""
    if isinstance(value, fx.Node):
        return {"row": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_data(part, numbers) for part in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in CONSTANTS:
        return {CONSTANTS[type(value)]: str(value).removeprefix("torch.")}
    raise TypeError(f"argument: expected a number, text, dtype, device or result of a node, got {value!r}")


def _value(data: Any, values: list[fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(part, values) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, name),) = data.items()
    if kind == "row":
        return values[name]
    if kind == "device":
        return torch.device(name)
    value = getattr(torch, name)
    if CONSTANTS.get(type(value)) != kind:
        raise TypeError(f"expected a {kind}, got {name}")
    return value
