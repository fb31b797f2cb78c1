"""Row invariance: the parts of a verify graph in which other rows may change a row's bits.

`order_sums` gives sums and products that other passes leave an order that other rows do not change. `variant_parts`
lists the rest. A part is invariant if it stands in a list below, or if a kernel of ours computes it in one order. All
else is reported, because a library may choose another order of summation for another number of rows.
"""

import operator
import re
from collections import defaultdict
from itertools import groupby

import torch
from torch import Tensor, fx

from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, calls, owner
from ..kernels import HALF, experts, ops
from ..kernels.attention.base import TARGETS
from ..kernels.attention.tail_tiles import tail_tiles
from ..kernels.linear import LINEARS, PLAIN, QUANTISED, skinny_gemm, weight_of
from ..kernels.recurrence import advance_or_look, clamp_in_prompt, launch, walk_of
from .apply import comes_after, replace_node, supports_kernels
from .fuse_norms import CASTS

aten, ours = torch.ops.aten, torch.ops.spec_compile
LONGEST = 1024
"""Entries of a row whose sum is replaced. Longer rows come from norms, where two more kernels would be felt."""


@comes_after("fuse_routers", "use_linear_forms", "fuse_gated_norms", "fuse_l2_norms", "fuse_norms")
def order_sums(graph: ModelGraph, settings) -> str:
    """Replace short sums over the last dimension by `row_sum`, and float32 linear layers by `linear_float32`.

    Only in a graph of 16 bits.
    """
    if not supports_kernels(graph, settings):
        return "0 sums and 0 products in float32 ordered"
    sums = [node for node in calls(graph.gm, aten.sum.dim_IntList) if _is_short(node)]
    products = [node for node in calls(graph.gm, aten.linear.default) if _is_float32(node)]
    for node in sums:
        with graph.gm.graph.inserting_before(node):
            new = graph.gm.graph.call_function(ours.row_sum.default, (node.args[0], node.meta["val"].dtype))
            new.meta = dict(node.meta)
            if node.args[2:] == (True,):
                new.meta["val"] = node.meta["val"].squeeze(-1)
                new = graph.gm.graph.call_function(aten.unsqueeze.default, (new, -1))
        replace_node(node, new)
    for node in products:
        with graph.gm.graph.inserting_before(node):
            new = graph.gm.graph.call_function(ours.linear_float32.default, tuple(map(_before_cast, node.args)))
        replace_node(node, new)
    return f"{len(sums)} sums and {len(products)} products in float32 ordered"


def _is_short(node: fx.Node) -> bool:
    x = node.args[0].meta["val"]
    return x.is_floating_point() and list(node.args[1]) in ([-1], [x.dim() - 1]) and x.shape[-1] <= LONGEST


def _is_float32(node: fx.Node) -> bool:
    """True if it is a linear layer in float32 without a bias."""
    x = node.args[0].meta.get("val")
    return len(node.args) == 2 and x is not None and x.dtype == torch.float32


def _before_cast(node: fx.Node) -> fx.Node:
    """The input of a cast from 16 bits; any other node itself."""
    before = node.args[0].meta.get("val") if node.target in CASTS else None
    return node if before is None or before.dtype not in HALF else node.args[0]


# The parts that are known to be invariant.


INVARIANT_BACKEND = "triton"
"""The attention backend that sums the keys of a node in an order which only its position decides."""
MOVES = {
    "alias", "as_strided", "cat", "chunk", "clone", "concatenate", "contiguous", "copy", "copy_", "detach", "expand",
    "expand_as", "flatten", "flip", "gather", "index", "index_put", "index_select", "masked_select", "movedim",
    "narrow", "permute", "repeat", "repeat_interleave", "reshape", "roll", "scatter", "scatter_", "select", "slice",
    "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "tile", "to", "_to_copy", "transpose", "type_as",
    "unbind", "unflatten", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real",
}  # fmt: skip
"""ATen ops that move, choose or convert elements."""
CREATES = {
    "arange", "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "scalar_tensor", "zeros", "zeros_like",
}  # fmt: skip
"""ATen ops whose elements depend on no other."""
CHOOSES = {"amax", "amin", "argmax", "argmin", "argsort", "embedding", "max", "min", "sort", "topk"}
"""ATen ops that look up or choose elements of a row, which is the same in any order."""
INVARIANT_OPS = MOVES | CREATES | CHOOSES
KERNELS = {
    "spec_compile::add_rms_norm",
    "spec_compile::all_gather",
    "spec_compile::all_reduce",
    "spec_compile::gated_rms_norm",
    "spec_compile::l2_norms",
    "spec_compile::linear_float32",
    "spec_compile::rms_norm",
    "spec_compile::rounded_over_ranks",
    "spec_compile::route",
    "spec_compile::row_sum",
}
"""Kernels of ours in which a program takes a row, or that add up each element by itself."""
FUNCTIONS = {operator.getitem, ops.gather_rows, tail_tiles, walk_of, clamp_in_prompt}
"""Functions that move or choose elements, or that compute each element by itself; `contrib` adds some."""
PRODUCTS = {"addmm", "baddbmm", "bmm", "linear", "matmul", "mm"}


def variant_parts(graph: ModelGraph) -> list[str]:
    """The parts of a rewritten graph whose bits for a row may depend on how many rows there are; [] promises the bits.

    Layers alike share a line, as in "model.layers.0-31.mlp.gate: op softmax". On a CPU and in float32 bits are not
    promised, and the one line says so.
    """
    if graph.device.type != "cuda" or graph.dtype not in HALF:
        device = "GPU" if graph.device.type == "cuda" else "CPU"
        dtype = str(graph.dtype).removeprefix("torch.")
        return [f"{dtype} on a {device} (bits are promised in bfloat16 and float16 on a GPU)"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for node in calls(graph.gm):
        reason = _reason(graph, node)
        path = owner(node).removeprefix("model.") or "the model"  # capture wraps the model under this name
        if reason is not None and reason not in reasons[path]:
            reasons[path].append(reason)
    return _by_layers({path: ", ".join(each) for path, each in reasons.items() if each})


def require_same_bits(exact: str, graphs: dict[str, ModelGraph]) -> None:
    """UnsupportedModelError, naming the option and the parts, unless the graphs promise the bits that it asks for.

    exact: "bits": the graph that verifies; "request": the graph of prompts, too. graphs: by purpose.
    """
    purposes = ("verify", "prefill") if exact == "request" else ("verify",)
    parts = dict.fromkeys(part for purpose in purposes for part in variant_parts(graphs[purpose]))
    if parts:
        raise UnsupportedModelError(
            f"exact: {exact!r} cannot be kept, because no kernel computes these parts alike for any number of rows: "
            f"{'; '.join(parts)}. Pass exact='auto' for the same answer but for near-ties"
        )


def require_kernels_of_experts(graph: ModelGraph) -> None:
    """UnsupportedModelError if a GPU has no kernel for experts, whose plain meaning no CUDA graph holds."""
    if graph.device.type != "cuda":
        return
    for node in (node for op in experts.PRODUCTS for node in calls(graph.gm, op)):
        layout = experts.format_of(node.args[-1])
        if (reason := experts.why_not_on(graph.device, layout)) is not None:
            raise UnsupportedModelError(
                f"model: no kernel multiplies the experts {owner(node)}, because {reason}, and a CUDA graph cannot "
                "hold their plain meaning; pass cuda_graphs=False, or use a GPU of compute capability 8.0 or later"
            )


def _reason(graph: ModelGraph, node: fx.Node) -> str | None:
    """Why the bits of a row of the node may depend on other rows; None if they do not."""
    if not _is_float(node.meta.get("val")) or node.target in FUNCTIONS:
        return None
    if node.target == QUANTISED:
        return "quantised product by a library"
    if node.target in TARGETS:
        return None if graph.backend == INVARIANT_BACKEND else f"attention by {graph.backend}"
    if node.target is advance_or_look:
        kind = node.kwargs["kind"]
        return None if launch.has_kernels(kind) else f"recurrence of kind {kind}"
    if node.target in LINEARS and (source := weight_of(node)) is not None:
        weight = attribute(graph.gm, source.target)
        kind = node.kwargs.get("kind", "")
        reason = skinny_gemm.why_not(weight, kind, graph.dtype if kind else None)
        reason = reason or ("library product" if node.target is PLAIN else None)
        return reason and f"product {weight.shape[1]} -> {weight.shape[0]} ({reason})"
    if node.target in experts.PRODUCTS:
        weights = [attribute(graph.gm, part.target) for part in experts.parts_of(node)]
        reason = experts.why_not(weights, experts.format_of(node.args[-1]))
        return reason and f"experts ({reason})"
    space, name = _name(node)
    if f"{space}::{name}" in KERNELS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return None
    if space == "aten" and name in INVARIANT_OPS:
        return None
    if space == "aten" and name in PRODUCTS:
        return None if _is_scaling(node) else f"product by {name}"
    return f"op {name}"


def _is_float(value) -> bool:
    """True if a node's value holds floats, whose sums depend on their order. An unknown value may."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_float, value))
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return value is None


def _name(node: fx.Node) -> tuple[str, str]:
    """Namespace and name of the op that a node calls; a plain function has no namespace."""
    if isinstance(node.target, torch._ops.OpOverload):
        space, name = node.target._schema.name.split("::")
        return space, name
    return "", getattr(node.target, "__name__", str(node.target))


def _is_scaling(node: fx.Node) -> bool:
    """True if a matrix product sums over a single element, as rotary's frequencies by positions."""
    first = node.args[1] if _name(node)[1] in ("addmm", "baddbmm") else node.args[0]
    return first.meta["val"].shape[-1] == 1


def _by_layers(reasons: dict[str, str]) -> list[str]:
    """ "path: reason" lines, of which one serves all layers with the same."""
    lines: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for path, reason in reasons.items():
        before, number, after = re.fullmatch(r"(?:(.*?)\.(\d+)(?=\.|$))?(.*)", path).groups("")
        lines[before, after, reason] += [int(number)] if number else []
    return [
        f"{before}.{_ranges(numbers)}{after}: {reason}" if numbers else f"{after}: {reason}"
        for (before, after, reason), numbers in lines.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)
