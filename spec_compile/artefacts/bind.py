"""Model graphs as data, which are bound to the tensors of a model when they are read.

No tensor is stored but small constants. The others have their paths in the model. Weights that a pass joined are the
list of their parts, which are joined again::

    {"model.lm_head.weight": {"path": "lm_head.weight"},
     "merged_linear_0_0": {"join": ["layers.0.q_proj.weight", "layers.0.k_proj.weight"]},
     "lifted_tensor_0": {"value": [2.0], "shape": [], "dtype": "float32", "device": "cpu"}}
"""

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.graph_module import _assign_attr

from ..graph import SIZE, IndexSpec, LayerSpec, ModelGraph, PassReport, RecurrenceSpec, attribute, owner
from ..inventory import held
from ..passes.merge_linears import join_parameters, joined
from .digest import SMALL, layout_of
from .graphs import graph_of, is_path, rows_of
from .permitted import check_rows

PLAIN = [each.name for each in fields(ModelGraph) if each.type in (int, bool, str, int | None)]
"""The fields of a graph that are data as they are."""

VARIES = 7
"""Stands for a size that varies with values, so that the trace had no example of it."""


class NoRecipe(Exception):
    """A graph reads a tensor that the model does not have, and that is too large to be stored."""


def data_of(graph: ModelGraph, model: nn.Module) -> dict[str, Any]:
    """A rewritten graph of a model as JSON data. NoRecipe, TypeError or ValueError if it cannot be bound again."""
    names = dict.fromkeys(node.target for node in graph.gm.graph.nodes if node.op == "get_attr")
    read = {name: attribute(graph.gm, name) for name in names}
    sources = Sources(model)
    owners, values = list[str](), list[Any]()
    nodes = [node for node in graph.gm.graph.nodes if node.op != "get_attr"]
    check_rows(rows := rows_of(graph.gm, has_tensors=True))
    return {
        "rows": rows,
        "owners": owners,
        "values": values,
        "meta": [[_number(owner(node), owners), _number(_value_data(node.meta.get("val")), values)] for node in nodes],
        "tensors": {name: sources.recipe(x, name) for name, x in read.items() if isinstance(x, Tensor)},
        "layers": [asdict(layer) for layer in graph.layers],
        "recurrences": [_recurrence_data(spec) for spec in graph.recurrences],
        "indexes": [[spec.size, spec.topk, _dtype_data(spec.dtype)] for spec in graph.indexes],
        "dtypes": [_dtype_data(graph.dtype), _dtype_data(graph.cache_dtype)],
        "log": [[each.name, each.summary, each.nodes_before, each.nodes_after] for each in graph.log],
        "plain": {name: getattr(graph, name) for name in PLAIN},
    }


def bound(data: dict[str, Any], model: nn.Module) -> ModelGraph:
    """The graph of `data`, which reads the model's tensors. Any error means that the data is not of this model."""
    check_rows(data["rows"])
    root, tensors = nn.Module(), {each.path: each.tensor for each in held(model)}
    if not all(map(is_path, data["tensors"])):
        raise ValueError(f"tensors: expected names, got {[*data['tensors']]!r:.80}")
    for name, recipe in data["tensors"].items():
        _assign_attr(_made(recipe, tensors), root, name)
    gm = graph_of(data["rows"], root).eval()
    values = [*map(_value, data["values"])]
    nodes = [node for node in gm.graph.nodes if node.op != "get_attr"]
    for node, (place, value) in zip(nodes, data["meta"], strict=True):
        path = data["owners"][place]
        if path:
            node.meta["nn_module_stack"] = {path: (path, None)}
        node.meta["val"] = values[value]
    dtype, cache_dtype = map(_dtype, data["dtypes"])
    for each in fields(ModelGraph):
        if each.name in PLAIN and not isinstance(data["plain"][each.name], each.type):
            raise ValueError(f"{each.name}: expected {each.type}, got {data['plain'][each.name]!r:.80}")
    return ModelGraph(
        gm=gm,
        layers=tuple(LayerSpec(**layer) for layer in data["layers"]),
        dtype=dtype,
        cache_dtype=cache_dtype,
        recurrences=tuple(map(_recurrence, data["recurrences"])),
        indexes=tuple(IndexSpec(size, topk, _dtype(dtype)) for size, topk, dtype in data["indexes"]),
        log=[PassReport(*report, code="") for report in data["log"]],
        **data["plain"],
    )


class Sources:
    """The tensors of a model, found by their memory."""

    def __init__(self, model: nn.Module):
        self.paths: dict[tuple, str] = {}
        self.starts: dict[int, tuple[str, Tensor]] = {}
        self.storages = {each.tensor.untyped_storage().data_ptr() for each in held(model)}
        for each in held(model):
            self.paths.setdefault(_memory(each.tensor), each.path)
            if each.tensor.nbytes and each.tensor.ndim:
                self.starts.setdefault(each.tensor.data_ptr(), (each.path, each.tensor))

    def recipe(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """The way to a tensor that a graph reads under a name. NoRecipe if there is none."""
        if _memory(tensor) in self.paths:
            return {"path": self.paths[_memory(tensor)]}
        names, parts, end = [], [], tensor.data_ptr()
        while end < tensor.data_ptr() + tensor.nbytes and end in self.starts:
            path, part = self.starts[end]
            names.append(path)
            parts.append(part)
            end += part.nbytes
        whole = joined(parts, 0) if len(parts) > 1 else None
        if whole is not None and _memory(whole) == _memory(tensor):
            return {"join": names}
        if tensor.numel() <= SMALL and tensor.untyped_storage().data_ptr() not in self.storages:  # guard: weight-values
            value, dtype = tensor.detach().flatten().tolist(), _dtype_data(tensor.dtype)
            return {"value": value, "shape": [*tensor.shape], "dtype": dtype, "device": str(tensor.device)}
        raise NoRecipe(f"its graphs read {name} {list(tensor.shape)}, which is no tensor of the model")


def _made(recipe: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    if "path" in recipe:
        return tensors[recipe["path"]]
    if "join" in recipe:
        return join_parameters([tensors[path] for path in recipe["join"]])
    options = {"dtype": _dtype(recipe["dtype"]), "device": recipe["device"]}
    return torch.tensor(recipe["value"], **options).reshape(recipe["shape"])


def _memory(tensor: Tensor) -> tuple:
    return tensor.data_ptr() or id(tensor), layout_of(tensor)[1:]


def _number(value: Any, seen: list) -> int:
    """The place of a value in a list, at whose end it is added if it is new."""
    if value not in seen:
        seen.append(value)
    return seen.index(value)


def _value_data(value: Any) -> Any:
    """The facts that reports and passes read of the value of a node: ["float32", [2, 7, 64]] of a tensor, see `_size`;
    "size" for a size that varies, null for a value that is not known."""
    if isinstance(value, Tensor):
        return [_dtype_data(value.dtype), [*map(_size, value.shape)]]
    if isinstance(value, (list, tuple)):
        return {"parts": [*map(_value_data, value)]}
    return SIZE if value is SIZE or isinstance(value, torch.SymInt) else None


def _size(size: int | torch.SymInt) -> int:
    """A size, or that of the trace's example if it varies: tokens [2, 7] give B = 2, T = 7 and T + 1 = 8.

    So sizes that differ stay apart: a slice of T + 1 tokens to T is no slice of everything.
    """
    if type(size) is int:
        return size
    example = size.node.hint if isinstance(size, torch.SymInt) else None
    return VARIES if example is None else int(example)


def _value(data: Any) -> Any:
    """A value without memory."""
    if isinstance(data, dict):
        return tuple(map(_value, data["parts"]))
    if isinstance(data, list):
        return torch.empty(data[1], dtype=_dtype(data[0]), device="meta")
    return SIZE if data == SIZE else None


def _dtype_data(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str | None) -> torch.dtype | None:
    """The dtype of `_dtype_data`. ValueError if there is none of this name."""
    dtype = None if name is None else getattr(torch, name)
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(f"dtype: expected one of torch, got {name!r:.80}")
    return dtype


def _recurrence_data(spec: RecurrenceSpec) -> dict[str, Any]:
    return {**asdict(spec), "dtypes": [*map(_dtype_data, spec.dtypes)]}


def _recurrence(data: dict[str, Any]) -> RecurrenceSpec:
    stash = tuple((tuple(shape), is_shared) for shape, is_shared in data["stash"])
    dtypes = tuple(map(_dtype, data["dtypes"]))
    return RecurrenceSpec(data["kind"], tuple(data["state"]), stash, dtypes)
