"""Graphs as data: rows of operators by name, which another process reads without running any code of theirs."""

import contextlib
import functools
import importlib
import math
import operator
import pkgutil
import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import kernels
from ..graph import attribute

NAMESPACES = {"aten", "prims", "spec_compile"}
"""Namespaces of the operators that rows may name."""
REFUSED = {"from_file", "set_", "set", "set_data", "resize", "resize_", "_resize_output", "_resize_output_"}
"""Operators that read and write files, or replace memory, by name; `permitted` has what graphs of models may call."""
MODULES = {"_operator": operator, "math": math, "torch": torch}
"""Modules of the functions of sizes that rows may name."""
FUNCTIONS = {
    "_operator": set("getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_".split()),
    "math": {"ceil", "floor", "trunc"},
    "torch": {"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum"},
    f"{kernels.__name__}.attention.flex": {"attention"},
    f"{kernels.__name__}.attention.sdpa": {"attention"},
    f"{kernels.__name__}.attention.tail_tiles": {"tail_tiles"},
    f"{kernels.__name__}.linear.few_rows": {"cpu_linear"},
    f"{kernels.__name__}.ops": {"gather_rows", "tree_mask"},
    f"{kernels.__name__}.recurrence": {"advance_or_look", "clamp_in_prompt", "walk_of"},
}
"""Functions of sizes, `getitem`, and functions of this package in graphs: those that rows may name."""
CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
"""Classes of constants that are named attributes of torch."""

PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

HIGHER_ORDER = "flex_attention"
"""The operator of graphs that rows may name."""

Row = list
"""[name of the operator, arguments, named arguments]; ``{"row": n}`` is the result of row n, ``{"graph": rows}`` a
graph as an argument, ``{"tensor": name}`` a parameter. The inputs are the first rows, whose operator is ``""``."""


def rows_of(gm: fx.GraphModule, has_tensors: bool = False) -> list[Row]:
    """The graph as rows; the last one has the result or the list of results as its argument and the name "output".

    has_tensors: True if the graph may have parameters, which rows name.
    TypeError if it has a node that is neither an input nor a call of a named operator.
    """
    rows: list[Row] = []
    values: dict[fx.Node, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            part = attribute(gm, node.target)
            if isinstance(part, fx.GraphModule):
                values[node] = {"graph": rows_of(part)}
                continue
            if has_tensors and isinstance(part, Tensor):
                values[node] = {"tensor": node.target}
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


def graph_of(rows: list[Row], tensors: nn.Module | None = None) -> fx.GraphModule:
    """The graph of rows. ValueError if they name an operator that is not permitted, or have another form.

    tensors: has the parameters that rows name.
    """
    graph, values, root = fx.Graph(), list[fx.Node](), nn.Module() if tensors is None else tensors
    read: dict[str, fx.Node] = {}

    def part(kind: str, content: Any) -> fx.Node:
        if kind == "graph":
            name = f"graph_{len(read)}"
            root.add_module(name, graph_of(content))
        elif not is_path(name := content) or not isinstance(attribute(root, name), Tensor):
            raise TypeError(f"expected the name of a tensor, got {content}")
        if name not in read:
            read[name] = graph.get_attr(name)
        return read[name]

    for number, row in enumerate(rows):
        try:
            name, arguments, named = row
            if not name:
                values.append(graph.placeholder(f"v{number}"))
                continue
            arguments = [_value(each, values, part) for each in arguments]
            named = {key: _value(each, values, part) for key, each in named.items()}
            if not all(map(is_path, named)) or any("." in key for key in named):
                raise ValueError("expected names of arguments")
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
    if name in FUNCTIONS.get(module, ()) and target_of(f"{module}.{name}") is target:
        return f"{module}.{name}"
    raise TypeError(f"expected an operator of {', '.join(sorted(NAMESPACES))} or a function of sizes, got {target}")


def target_of(name: str) -> Any:
    """The operator of a name. ValueError if it is not permitted or not known."""
    module, _, function = name.rpartition(".")
    if function in FUNCTIONS.get(module, ()):  # guard: named-functions
        return getattr(MODULES.get(module) or importlib.import_module(module), function)
    space, _, rest = name.partition(".")
    if name == f"higher_order.{HIGHER_ORDER}":
        return getattr(torch.ops.higher_order, HIGHER_ORDER)
    packet, _, overload = rest.rpartition(".")
    if space == "spec_compile" and not hasattr(torch.ops.spec_compile, packet):
        _define_operators()
    if space in NAMESPACES and packet and packet not in REFUSED and hasattr(getattr(torch.ops, space), packet):
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


def is_path(name: Any) -> bool:
    """True for names that are joined by dots. fx writes such names into code, which it runs."""
    return isinstance(name, str) and PATH.fullmatch(name) is not None and not any(map(iskeyword, name.split(".")))


def _data(value: Any, values: dict[fx.Node, dict[str, Any]]) -> Any:
    """An argument as JSON data."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list):
        return [_data(part, values) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_data(part, values) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _data(part, values)] for key, part in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in CONSTANTS:
        return {CONSTANTS[type(value)]: str(value).removeprefix("torch.")}
    raise TypeError(f"argument: expected a number, text, dtype, device or result of a node, got {value!r}")


def _value(data: Any, values: list[fx.Node], make: Callable[[str, Any], fx.Node]) -> Any:
    """An argument of JSON data. make: the node of a graph or a tensor that is an argument."""
    if isinstance(data, list):
        return [_value(part, values, make) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, name),) = data.items()
    if kind == "row":
        return values[name]
    if kind in ("graph", "tensor"):
        return make(kind, name)
    if kind == "tuple":
        return tuple(_value(part, values, make) for part in name)
    if kind == "dict":
        return {key: _value(part, values, make) for key, part in name}
    if kind == "device":
        return torch.device(name)
    value = getattr(torch, name)
    if CONSTANTS.get(type(value)) != kind:
        raise TypeError(f"expected a {kind}, got {name}")
    return value
