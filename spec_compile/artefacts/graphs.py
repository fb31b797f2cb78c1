"""Graphs as data: rows of operators by name, which another process reads without running any code of theirs."""

import contextlib
import functools
import importlib
import math
import operator
import pkgutil
from collections.abc import Callable
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

HIGHER_ORDER = "flex_attention"
"""The operator of graphs that rows may name."""

Row = list
"""[name of the operator, arguments, named arguments]; ``{"row": n}`` is the result of row n, ``{"graph": rows}`` a
graph as an argument. The inputs are the first rows, whose operator is ``""``."""


def rows_of(gm: fx.GraphModule) -> list[Row]:
    """The graph as rows; the last one has the result or the list of results as its argument and the name "output".

    TypeError if it has a node that is neither an input nor a call of a named operator.
    """
    rows: list[Row] = []
    values: dict[fx.Node, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(part := getattr(gm, node.target), fx.GraphModule):
            values[node] = {"graph": rows_of(part)}
            continue
        values[node] = {"row": len(rows)}
        if node.op == "placeholder":
            rows.append(["", [], {}])
        elif node.op in ("output", "call_function"):
            named = {key: _data(value, values) for key, value in node.kwargs.items()}
            name = "output" if node.op == "output" else name_of(node.target)
            rows.append([name, [_data(value, values) for value in node.args], named])
        else:
            raise TypeError(f"node {node.name}: expected an input or a call of an operator, got {node.op}")
    return rows


def graph_of(rows: list[Row]) -> fx.GraphModule:
    """The graph of rows. ValueError if they name an operator that is not permitted, or have another form."""
    graph, values, root = fx.Graph(), list[fx.Node](), nn.Module()

    def part(rows: list[Row]) -> fx.Node:
        name = f"graph_{len(root._modules)}"
        root.add_module(name, graph_of(rows))
        return graph.get_attr(name)

    for number, row in enumerate(rows):
        try:
            name, arguments, named = row
            if not name:
                values.append(graph.placeholder(f"v{number}"))
                continue
            arguments = [_value(each, values, part) for each in arguments]
            named = {key: _value(each, values, part) for key, each in named.items()}
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"row {number}: expected [name, arguments, named arguments], got {row}") from error
        if name == "output":
            graph.output(arguments[0])
        else:
            values.append(graph.call_function(target_of(name), tuple(arguments), named))
    return fx.GraphModule(root, graph)


def name_of(target: Any) -> str:
    """The name of an operator: "aten.add.Tensor", "_operator.getitem". TypeError if rows have no name for it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target is getattr(torch.ops.higher_order, HIGHER_ORDER):
        return f"higher_order.{HIGHER_ORDER}"
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
    if name == f"higher_order.{HIGHER_ORDER}":
        return getattr(torch.ops.higher_order, HIGHER_ORDER)
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


def _data(value: Any, values: dict[fx.Node, dict[str, Any]]) -> Any:
    """An argument as JSON data."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return [_data(part, values) for part in value]
    if isinstance(value, dict):
        return {"dict": [[key, _data(part, values)] for key, part in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in CONSTANTS:
        return {CONSTANTS[type(value)]: str(value).removeprefix("torch.")}
    raise TypeError(f"argument: expected a number, text, dtype, device or result of a node, got {value!r}")


def _value(data: Any, values: list[fx.Node], graph: Callable[[list[Row]], fx.Node]) -> Any:
    if isinstance(data, list):
        return tuple(_value(part, values, graph) for part in data)
    if not isinstance(data, dict):
        return data
    ((kind, name),) = data.items()
    if kind == "row":
        return values[name]
    if kind == "graph":
        return graph(name)
    if kind == "dict":
        return {key: _value(part, values, graph) for key, part in name}
    if kind == "device":
        return torch.device(name)
    value = getattr(torch, name)
    if CONSTANTS.get(type(value)) != kind:
        raise TypeError(f"expected a {kind}, got {name}")
    return value
