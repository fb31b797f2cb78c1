"""Which operators a graph from a file may name, and where they may write: never to a file, to weights, or outside."""

from collections.abc import Iterator
from typing import Any

import torch

from .graphs import Row, target_of

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
REFUSED = {
    "_local_scalar_dense", "as_strided", "empty_strided", "native_dropout", "rand", "randn", "randperm", "rrelu",
    "sym_storage_offset",
}  # fmt: skip
"""Operators of ATen with these tags that read memory by address, or draw from the process's generator."""
OF_ROUNDS = {"compact", "lattice_tree", "merge_drafts", "ngram_match", "ngram_propose", "recurrence_commit"}
"""Our operators that models never call: they take addresses, or move what is in caches."""
FRESH = {"clone", "copy", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros"} | {
    f"{kind}{like}" for kind in ("empty", "ones", "zeros") for like in ("", "_like")
}
"""Operators of ATen whose result has memory of its own, besides those with the tag "pointwise"."""
WRITTEN = {"key_cache", "value_cache", "state", "stash"}
"""Arguments that our functions write to."""
KINDS = {"Storage", "Stream", "Generator", "Dimname"}
"""Types of arguments that no operator of a model has."""


def check_rows(rows: list[Row], is_inner: bool = False) -> None:
    """ValueError, naming the operator, if rows name one that models do not call, or one writes to a parameter.

    is_inner: the rows are an argument of an operator, so they write nowhere.
    """
    writable = set[int]()
    for number, (name, arguments, named) in enumerate(rows):
        if not name:
            writable |= set() if is_inner else {number}
        elif name != "output":
            target = target_of(name)
            if isinstance(target, torch._ops.OpOverload) and not is_permitted(target):
                raise ValueError(f"operator: expected one that computes values of a model, got {name}")
            for data in (*arguments, *named.values()):
                for inner in _inner_graphs(data):
                    check_rows(inner, is_inner=True)
            for data in _written(name, target, arguments, named):
                if not (isinstance(data, dict) and data.get("row") in writable):  # guard: writes-of-graphs
                    raise ValueError(f"operator: {name} writes to what is neither an input nor a new tensor")
            if _gives_writable(name, target, arguments, writable):
                writable.add(number)


def is_permitted(target: torch._ops.OpOverload) -> bool:
    """True for an operator that graphs of models may name."""
    space, _, name = target._schema.name.partition("::")
    if space == "spec_compile":
        return name not in OF_ROUNDS
    if space != "aten" or any(kind in str(each.type) for each in target._schema.arguments for kind in KINDS):
        return False
    if target._schema.is_mutable:  # x_ is permitted if x is
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overloads = [] if functional is None else [getattr(functional, each) for each in functional.overloads()]
        return name.endswith("_") and any(not each._schema.is_mutable and is_permitted(each) for each in overloads)
    is_tagged = torch.Tag.core in target.tags or torch.Tag.pointwise in target.tags
    return (is_tagged or name in COMPOUND) and name not in REFUSED


def _written(name: str, target: Any, arguments: list, named: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to."""
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


def _inner_graphs(data: Any) -> Iterator[list[Row]]:
    if isinstance(data, list):
        for each in data:
            yield from _inner_graphs(each)
    elif isinstance(data, dict):
        if "graph" in data:
            yield data["graph"]
        for each in data.values():
            yield from _inner_graphs(each)
