"""Graphs as data, which another process reads without running any code of theirs.

A graph is rows of operators by name. Rows of a part may name any operator of `NAMESPACES`. Rows of a model's graph lie
in files that others may have made, so they are checked: its operators compute, and write only to caches and to new
tensors: never to a file, to weights, or outside. No tensor of a model is stored but small constants. The others have
their paths in the model. Weights that a pass joined are the list of their parts, which are joined again::

    {"model.lm_head.weight": {"path": "lm_head.weight"},
     "merged_linear_0_0": {"join": ["layers.0.q_proj.weight", "layers.0.k_proj.weight"]},
     "lifted_tensor_0": {"value": [2.0], "shape": [], "dtype": {"dtype": "float32"}, "device": "cpu"}}
"""

import contextlib
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from keyword import iskeyword
from typing import Any, get_args, get_origin

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _assign_attr

from .. import kernels
from ..graph import SIZE, IndexSpec, LayerSpec, ModelGraph, PassReport, RecurrenceSpec, attribute, owner
from ..inventory import Held
from ..passes.linears import join_parameters, joined
from .key import SMALL, layout_of

NAMESPACES = {"aten", "prims", "spec_compile"}
"""Namespaces of the operators that rows may name."""
REFUSED = {"from_file", "set_", "set", "set_data", "resize", "resize_", "_resize_output", "_resize_output_"}
"""Operators that read and write files, or replace memory, by name; `is_permitted` tells what models may call."""
FUNCTIONS = {
    "_operator": set("getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_".split()),
    "math": {"ceil", "floor", "trunc"},
    "torch": {"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum"},
    f"{kernels.__name__}.attention.backends": {"sdpa"},
    f"{kernels.__name__}.attention.tail_tiles": {"tail_tiles"},
    f"{kernels.__name__}.linear.cpu_gemm": {"cpu_linear", "transposed_linear"},
    f"{kernels.__name__}.ops": {"gather_rows", "tree_mask"},
    f"{kernels.__name__}.recurrence": {"advance_or_look", "clamp_in_prompt", "walk_of"},
}
"""Functions of sizes, `getitem`, and functions of this package in graphs: those that rows may name."""
CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
"""Classes of constants that are named attributes of torch."""

SPECS = {each.__name__: each for each in (LayerSpec, IndexSpec, RecurrenceSpec, PassReport)}
"""Classes of what a model's graph has besides its rows."""

PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

Row = list
"""[name of the operator, arguments, named arguments]; ``{"row": n}`` is the result of row n, ``{"tensor": name}`` a
parameter. The inputs are the first rows, whose operator is ``""``."""


def rows_of(gm: fx.GraphModule, has_tensors: bool = False) -> list[Row]:
    """The graph as rows; the last one has the result or the list of results as its argument and the name "output".

    has_tensors: True if the graph may have parameters, which rows name.
    TypeError if it has a node that is neither an input nor a call of a named operator.
    """
    rows: list[Row] = []
    values: dict[fx.Node, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        if has_tensors and node.op == "get_attr" and isinstance(attribute(gm, node.target), Tensor):
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

    def parameter(name: Any) -> fx.Node:
        if not is_path(name) or not isinstance(attribute(root, name), Tensor):
            raise TypeError(f"expected the name of a tensor, got {name}")
        if name not in read:
            read[name] = graph.get_attr(name)
        return read[name]

    for number, row in enumerate(rows):
        try:
            name, arguments, named = row
            if not name:
                values.append(graph.placeholder(f"v{number}"))
                continue
            arguments = [_value(each, values, parameter) for each in arguments]
            named = {key: _value(each, values, parameter) for key, each in named.items()}
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
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    module = "torch" if module.startswith("torch.") else module
    if name in FUNCTIONS.get(module, ()) and target_of(f"{module}.{name}") is target:
        return f"{module}.{name}"
    raise TypeError(f"expected an operator of {', '.join(sorted(NAMESPACES))} or a function of sizes, got {target}")


def target_of(name: str) -> Any:
    """The operator of a name. ValueError if it is not permitted or not known."""
    module, _, function = name.rpartition(".")
    if function in FUNCTIONS.get(module, ()):  # guard: named-functions
        return getattr(importlib.import_module(module), function)
    space, _, rest = name.partition(".")
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
    if type(value).__name__ in SPECS:
        return {type(value).__name__: {each.name: _data(getattr(value, each.name), values) for each in fields(value)}}
    raise TypeError(f"argument: expected a number, text, dtype, device or result of a node, got {value!r}")


def _value(data: Any, values: list[fx.Node], make: Callable[[Any], fx.Node | None]) -> Any:
    """An argument of JSON data. make: the node of a parameter, by its name."""
    if isinstance(data, list):
        return [_value(part, values, make) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, name),) = data.items()
    if kind == "row":
        return values[name]
    if kind == "tensor":
        return make(name)
    if kind == "tuple":
        return tuple(_value(part, values, make) for part in name)
    if kind == "dict":
        return {key: _value(part, values, make) for key, part in name}
    if kind == "device":
        return torch.device(name)
    if kind in SPECS:
        return SPECS[kind](**{key: _value(part, values, make) for key, part in name.items()})
    value = getattr(torch, name)
    if CONSTANTS.get(type(value)) != kind:
        raise TypeError(f"expected a {kind}, got {name}")
    return value


def _plain(data: Any) -> Any:
    """A value of JSON data outside of rows: it refers to none."""
    return _value(data, [], lambda name: None)


# The operators that rows of a model's graph may name.

COMPOUND = set(
    """
    _log_softmax _softmax _unsafe_index _unsafe_view arctan2 argsort avg_pool1d baddbmm broadcast_to bucketize chunk
    clamp_max clamp_min concat concatenate contiguous conv1d conv2d conv3d cosine_similarity cross cummax cummin cumprod
    detach diff dropout einsum empty_like expand_as flatten glu group_norm index_add index_copy index_fill instance_norm
    isclose kron layer_norm lift_fresh_copy linalg_cross linalg_norm linalg_solve_triangular linalg_vector_norm linear
    linspace log_softmax logcumsumexp logsumexp masked_fill matmul max_pool2d meshgrid mT matrix_H moveaxis movedim mv
    narrow new_empty new_full new_ones new_zeros norm numpy_T one_hot ones ones_like outer pad pixel_shuffle
    pixel_unshuffle rad2deg relu_ repeat repeat_interleave reshape rms_norm roll rot90 scaled_dot_product_attention
    searchsorted softmax split squeeze stack std std_mean swapaxes swapdims t take_along_dim tensor_split tensordot tile
    to transpose tril triu type_as unbind unfold unflatten upsample_bicubic2d upsample_nearest1d var_mean vdot view_as
    vstack hstack where zeros zeros_like
    """.split()
)
"""Operators of ATen without the tags "core" and "pointwise" that models call."""
NOT_OF_MODELS = {
    "_local_scalar_dense", "as_strided", "empty_strided", "native_dropout", "rand", "randn", "randperm", "rrelu",
    "sym_storage_offset",
}  # fmt: skip
"""Operators of ATen with these tags that read memory by address, or draw from the process's generator."""
OF_ROUNDS = {
    "compact", "lattice_tree", "learn_from", "merge_into", "ngram_match", "ngram_propose", "recurrence_commit",
    "recycle_renew", "recycle_unroll",
}  # fmt: skip
"""Our operators that models never call: they take addresses, or move what is in caches."""
FRESH = {"clone", "copy", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros"} | {
    f"{kind}{like}" for kind in ("empty", "ones", "zeros") for like in ("", "_like")
}
"""Operators of ATen whose result has new memory, besides all with the tag "pointwise"."""
WRITTEN = {"key_cache", "value_cache", "state", "stash"}
"""Arguments that our functions write to."""
KINDS = {"Storage", "Stream", "Generator", "Dimname"}
"""Types of arguments that no operator of a model has."""


def check_rows(rows: list[Row]) -> None:
    """ValueError, naming the operator, if rows name one that models do not call, or one writes to a parameter."""
    writable = set[int]()
    for number, (name, arguments, named) in enumerate(rows):
        if not name:
            writable.add(number)
        elif name != "output":
            target = target_of(name)
            if isinstance(target, torch._ops.OpOverload) and not is_permitted(target):
                raise ValueError(f"operator: expected one that computes values of a model, got {name}")
            for data in _written(name, target, arguments, named):
                if not (isinstance(data, dict) and data.get("row") in writable):  # guard: writes-of-graphs
                    raise ValueError(f"operator: {name} writes to what is neither an input nor a new tensor")
            if _gives_writable(name, target, arguments, writable):
                writable.add(number)


def is_permitted(target: torch._ops.OpOverload) -> bool:
    """True for an operator that graphs of models may name."""
    space, _, name = target._schema.name.partition("::")
    if space == "spec_compile":
        return name.removesuffix("_on_cpu") not in OF_ROUNDS
    if space != "aten" or any(kind in str(each.type) for each in target._schema.arguments for kind in KINDS):
        return False
    if target._schema.is_mutable:  # x_ is permitted if x is
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overloads = [] if functional is None else [getattr(functional, each) for each in functional.overloads()]
        return name.endswith("_") and any(not each._schema.is_mutable and is_permitted(each) for each in overloads)
    is_tagged = torch.Tag.core in target.tags or torch.Tag.pointwise in target.tags
    return (is_tagged or name in COMPOUND) and name not in NOT_OF_MODELS


def _written(name: str, target: Any, arguments: list, named: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to."""
    given: dict[Any, Any]
    if isinstance(target, torch._ops.OpOverload):
        given = dict(zip((each.name for each in target._schema.arguments), arguments)) | named
        writes = [each.name for each in target._schema.arguments if each.alias_info and each.alias_info.is_write]
    elif name.startswith("spec_compile."):
        given = dict(enumerate(arguments)) | named
        writes = [key for key in given if key in WRITTEN]
        if any(key in WRITTEN for key in target.__code__.co_varnames[: len(arguments)]):
            raise ValueError(f"operator: expected {name} with names of its arguments")
    else:
        return
    for value in map(given.get, writes):
        yield from value if isinstance(value, list) else () if value is None else (value,)


def _gives_writable(name: str, target: Any, arguments: list, writable: set[int]) -> bool:
    """True if the result of a row is new memory, or a view of an input or of new memory."""
    of = arguments[0] if arguments else None
    is_part = isinstance(of, dict) and of.get("row") in writable
    if name == "_operator.getitem" or not isinstance(target, torch._ops.OpOverload):
        return is_part and name == "_operator.getitem"
    space, _, short = target._schema.name.partition("::")
    if any(each.alias_info for each in target._schema.returns):
        return is_part
    return space == "aten" and (short in FRESH or torch.Tag.pointwise in target.tags)


# Graphs of models, bound to their tensors.

FIELDS: dict[str, Any] = {each.name: each.type for each in fields(ModelGraph) if each.name != "gm"}
"""The types of the fields of a graph that are data."""
VARIES = 7
"""Stands for a size that varies with values, so that the trace had no example of it."""


class NoRecipe(Exception):
    """A graph reads a tensor that the model does not have, and that is too large to be stored."""


def data_of(graph: ModelGraph, tensors: Iterable[Held]) -> dict[str, Any]:
    """A rewritten graph as JSON data; tensors: its model's. NoRecipe, TypeError or ValueError if it cannot be
    bound again."""
    read = {node.target: attribute(graph.gm, node.target) for node in graph.gm.graph.find_nodes(op="get_attr")}
    sources = Sources(tensors)
    owners, values = list[str](), list[Any]()
    nodes = [node for node in graph.gm.graph.nodes if node.op != "get_attr"]
    check_rows(rows := rows_of(graph.gm, has_tensors=True))
    graph = replace(graph, log=[replace(each, code="") for each in graph.log])
    return {
        "rows": rows,
        "owners": owners,
        "values": values,
        "meta": [[_number(owner(node), owners), _number(_value_data(node.meta.get("val")), values)] for node in nodes],
        "tensors": {name: sources.recipe(x, name) for name, x in read.items() if isinstance(x, Tensor)},
        "fields": {name: _data(getattr(graph, name), {}) for name in FIELDS},
    }


def bound(data: dict[str, Any], tensors: Iterable[Held]) -> ModelGraph:
    """The graph of `data`, which reads the tensors of a model. Any error means that the data is not of this model."""
    check_rows(data["rows"])
    root, by_path = nn.Module(), {each.path: each.tensor for each in tensors}
    if not all(map(is_path, data["tensors"])):
        raise ValueError(f"tensors: expected names, got {[*data['tensors']]!r:.80}")
    for name, recipe in data["tensors"].items():
        _assign_attr(_made(recipe, by_path), root, name)
    gm = graph_of(data["rows"], root).eval()
    values = [*map(_value_of, data["values"])]
    nodes = [node for node in gm.graph.nodes if node.op != "get_attr"]
    for node, (place, value) in zip(nodes, data["meta"], strict=True):
        path = data["owners"][place]
        if path:
            node.meta["nn_module_stack"] = {path: (path, None)}
        node.meta["val"] = values[value]
    read = {name: _plain(data["fields"][name]) for name in FIELDS}
    for name, kind in FIELDS.items():
        is_list = get_origin(kind) in (list, tuple)
        is_right = isinstance(read[name], get_origin(kind) if is_list else kind)
        if is_list and is_right:
            is_right = all(isinstance(each, get_args(kind)[0]) for each in read[name])
        if not is_right:
            raise ValueError(f"{name}: expected {kind}, got {read[name]!r:.80}")
    return ModelGraph(gm=gm, **read)


class Sources:
    """The tensors of a model, found by their memory."""

    def __init__(self, tensors: Iterable[Held]):
        self.paths: dict[tuple, str] = {}
        self.starts: dict[int, tuple[str, Tensor]] = {}
        self.storages: set[int] = set()
        for each in tensors:
            self.storages.add(each.tensor.untyped_storage().data_ptr())
            self.paths.setdefault(_memory(each.tensor), each.path)
            if each.tensor.nbytes and each.tensor.ndim:
                self.starts.setdefault(each.tensor.data_ptr(), (each.path, each.tensor))

    def recipe(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """The way to a tensor that a graph reads under a name. NoRecipe if there is none."""
        if _memory(tensor) in self.paths:
            return {"path": self.paths[_memory(tensor)]}
        parts, end = list[tuple[str, Tensor]](), tensor.data_ptr()
        while end < tensor.data_ptr() + tensor.nbytes and end in self.starts:
            parts.append(self.starts[end])
            end += parts[-1][1].nbytes
        whole = joined([part for _, part in parts], 0) if len(parts) > 1 else None
        if whole is not None and _memory(whole) == _memory(tensor):
            return {"join": [path for path, _ in parts]}
        if tensor.numel() <= SMALL and tensor.untyped_storage().data_ptr() not in self.storages:  # guard: weight-values
            value, dtype = tensor.detach().flatten().tolist(), _data(tensor.dtype, {})
            return {"value": value, "shape": [*tensor.shape], "dtype": dtype, "device": str(tensor.device)}
        raise NoRecipe(f"its graphs read {name} {list(tensor.shape)}, which is no tensor of the model")


def _made(recipe: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    if "path" in recipe:
        return tensors[recipe["path"]]
    if "join" in recipe:
        return join_parameters([tensors[path] for path in recipe["join"]])
    options = {"dtype": _plain(recipe["dtype"]), "device": recipe["device"]}
    return torch.tensor(recipe["value"], **options).reshape(recipe["shape"])


def _memory(tensor: Tensor) -> tuple:
    return tensor.data_ptr() or id(tensor), layout_of(tensor)[1:]


def _number(value: Any, seen: list) -> int:
    """The place of a value in a list, at whose end it is added if it is new."""
    if value not in seen:
        seen.append(value)
    return seen.index(value)


def _value_data(value: Any) -> Any:
    """The facts that reports and passes read of the value of a node: [dtype, [2, 7, 64]] of a tensor, see `_size`;
    "size" for a size that varies, null for a value that is not known."""
    if isinstance(value, Tensor):
        return [_data(value.dtype, {}), [*map(_size, value.shape)]]
    if isinstance(value, (list, tuple)):
        return {"parts": [*map(_value_data, value)]}
    return SIZE if value is SIZE or isinstance(value, torch.SymInt) else None


def _size(size: int | torch.SymInt) -> int:
    """A size, or the example's size in the trace if it varies: tokens [2, 7] give B = 2, T = 7 and T + 1 = 8.

    So sizes that differ stay apart: a slice of T + 1 tokens to T is no slice of everything.
    """
    if type(size) is int:
        return size
    example = size.node.hint if isinstance(size, torch.SymInt) else None
    return VARIES if example is None else int(example)


def _value_of(data: Any) -> Any:
    """A value without memory."""
    if isinstance(data, dict):
        return tuple(map(_value_of, data["parts"]))
    if isinstance(data, list):
        return torch.empty(data[1], dtype=_plain(data[0]), device="meta")
    return SIZE if data == SIZE else None
