"""Linear layers. These passes change them, in this order.

`merge_linears` makes one product of layers that read one input (q/k/v, gate/up). `add_adapters` adds the low-rank
product of the adapter that each row has chosen. `use_linear_forms` gives each product the form that reads its
weights fastest, and `fuse_swiglu` lets the activation of a gated MLP join the product of gate and up.
"""

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import quantised
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, calls, owner
from ..kernels import linear
from ..kernels.linear import (
    PLAIN,
    PRODUCT,
    bias_of,
    ends_plainly,
    linear_layers,
    operands_of,
    quantised_layers,
    with_operands,
)
from ..kernels.linear.low_rank import LowRank, add_low_rank
from ..kernels.ops import arguments_of
from .apply import comes_after
from .products import output_sizes, put_product

MERGED = "merged_linear_"
"""Begins the names of merged weights."""


@comes_after("tidy")
def merge_linears(graph: ModelGraph, settings) -> str:
    """Merge each group of ``linear(x, w_i, b_i)`` of one x into ``linear(x, cat(w), cat(b))`` and a split.

    The weights are not held twice: the model's own parameters become views of the merged storage, with equal values,
    so that later in-place updates of either are seen by both. Only plain parameters that nothing else uses take part,
    and none that is offloaded, or that a graph which is still there reads where it lies.
    """
    linears = [*linear_layers(graph), *quantised_layers(graph)]
    if not settings.merge_linears:
        operands = [operand for node in linears for operand in operands_of(node) if operand is not None]
        keep_apart(graph.gm, [attribute(graph.gm, each.target) for each in operands if each.op == "get_attr"])
        return "off"
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    uses: dict[str, int] = defaultdict(int)
    for node in graph.gm.graph.nodes:
        if node.op == "get_attr":
            uses[node.target] += len(node.users)
    for node in linears:
        if _is_private(graph, node, uses):
            operands = operands_of(node)
            dtype = attribute(graph.gm, operands[0].target).dtype
            kind = "" if node.target is PLAIN else arguments_of(node)["kind"]
            groups[node.args[0], node.target, len(operands), dtype, kind].append(node)
    alike = [group for group in groups.values() if len(group) > 1 and _fits(graph.gm, group)]
    merged = [group for group in alike if not _is_apart(graph.gm, group)]
    for number, group in enumerate(merged):
        tensors = [join_parameters(parameters, dim) for dim, parameters in _operands(graph.gm, group)]
        with graph.gm.graph.inserting_before(group[0]):
            buffers = [add_buffer(graph.gm, f"{MERGED}{number}_{place}", each) for place, each in enumerate(tensors)]
        put_product(graph.gm.graph, group, group[0].target, with_operands(group[0], buffers))
    summary = f"merged {sum(map(len, merged))} linear layers into {len(merged)}"
    if len(merged) < len(alike):  # or because they are offloaded
        summary += f"; {len(alike) - len(merged)} groups stay apart for an earlier speculate(merge_linears=False)"
    return summary


_apart = WeakIdKeyDictionary()
"""Parameter -> the graphs that read it where it lies; their captured rounds hold its address."""


def keep_apart(reader: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Note that a graph, or a model, reads these parameters where they lie."""
    for parameter in parameters:
        _apart.setdefault(parameter, weakref.WeakSet()).add(reader)


def is_kept_apart(parameters: Iterable[Tensor]) -> bool:
    """True if a graph that is still there reads one of the parameters where it lies."""
    return any(map(_apart.get, parameters))


def _is_apart(gm: fx.GraphModule, group: list[fx.Node]) -> bool:
    """True if merging would move a parameter that a graph reads where it lies."""
    return any(is_kept_apart(each) and joined(each, dim) is None for dim, each in _operands(gm, group))


def _operands(gm: fx.GraphModule, group: list[fx.Node]) -> list[tuple[int, list[Tensor]]]:
    """For each operand the dimension of outputs, and the parameters of all layers."""
    first = group[0]
    dims = () if first.target is PLAIN else _layout(first).dims[: len(arguments_of(first)["parts"])]
    parameters = [[attribute(gm, operand.target) for operand in operands] for operands in zip(*map(operands_of, group))]
    return list(itertools.zip_longest(dims, parameters, fillvalue=0))


def _fits(gm: fx.GraphModule, group: list[fx.Node]) -> bool:
    """True if the outputs of layers can follow each other, so that no block with one scale is cut."""
    if group[0].target is PLAIN:
        return True
    layout = _layout(group[0])
    if not layout.merges or any(size % layout.step for size in output_sizes(group)[:-1]):
        return False
    return layout.fits([[attribute(gm, part.target) for part in arguments_of(node)["parts"]] for node in group])


def _layout(node: fx.Node) -> quantised.WeightLayout:
    """The layout of a quantised layer."""
    return quantised.layout_of(arguments_of(node)["kind"])


def _is_private(graph: ModelGraph, node: fx.Node, uses: dict[str, int]) -> bool:
    for operand in operands_of(node):
        if operand.op != "get_attr" or uses[operand.target] != 1 or operand.target == graph.head_weight:
            return False
        if type(attribute(graph.gm, operand.target).data) is not Tensor:  # quantised, sharded: not merged
            return False
    return True


def joined(parameters: list[Tensor], dim: int) -> Tensor | None:
    """All parameters in one tensor, if an earlier call has joined them."""
    first, end = parameters[0], parameters[0].data_ptr()
    total = sum(p.shape[dim] for p in parameters)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    stride = first.stride() if dim == 0 else (total, 1)  # of two dimensions
    for p in parameters:
        if p.data_ptr() != end or p.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if not p.is_contiguous() if dim == 0 else p.stride() != stride:
            return None
        end += (p.numel() if dim == 0 else p.shape[dim]) * p.element_size()
    return first.data.as_strided(shape, stride, first.storage_offset())


def join_parameters(parameters: list[Tensor], dim: int = 0) -> Tensor:
    """All parameters along a dimension in one tensor, which the parameters then view."""
    merged = joined(parameters, dim)
    if merged is not None:
        return merged
    merged = torch.cat([p.data for p in parameters], dim)
    for p, part in zip(parameters, merged.split([p.shape[dim] for p in parameters], dim)):
        p.data = part
    return merged


# The form of each product.


@comes_after("merge_linears", "select_logits")
def use_linear_forms(graph: ModelGraph, settings) -> str:
    """Give each linear layer the form that `linear.choose` chooses. On a CPU a graph that prefills has many rows. A
    forward keeps its layers, because it may be trained."""
    on_cpu, is_forward = graph.device.type == "cpu", settings.purpose == "forward"
    changed, few_rows = 0, not (on_cpu and settings.purpose == "prefill")
    for node in () if is_forward else linear.linear_layers(graph):
        form = linear.choose(attribute(graph.gm, node.args[1].target), few_rows)
        if form is not None:
            node.target = form.op
            changed += 1
    is_library_faster = settings.purpose == "prefill" and settings.exact != "request"
    packs = on_cpu or not (is_forward or is_library_faster)
    packed, copied = _use_packed(graph) if packs else (0, 0)
    summary = f"{changed + packed} linear layers take a form of ours"
    return f"{summary}; copies of quantised weights for it take {copied / 1e9:.2f} GB" if copied else summary


def _use_packed(graph: ModelGraph) -> tuple[int, int]:
    """How many quantised layers have a kernel and now take it, and the bytes of weights that were copied for them."""
    changed = copied = 0
    for node in linear.quantised_layers(graph):
        call = arguments_of(node)
        tensors = [attribute(graph.gm, part.target) for part in call["parts"]]
        form = linear.choose_packed(tensors, call["x"].meta["val"].shape[-1], call["kind"], graph.dtype)
        if form is not None:
            copied += _put(graph, node, f"packed_{changed}", *form)
            changed += 1
    return changed, copied


def _put(graph: ModelGraph, node: fx.Node, name: str, op: Callable, kind: str, tensors: list[Tensor]) -> int:
    """Put the kernel's product in place of a layer. Returns the bytes of weights that are copies."""
    call = arguments_of(node)
    parts, copied = list(call["parts"]), 0
    with graph.gm.graph.inserting_before(node):
        for index, tensor in enumerate(tensors):
            if tensor.data_ptr() != attribute(graph.gm, parts[index].target).data_ptr():
                copied += tensor.nbytes
                parts[index] = add_buffer(graph.gm, f"{name}_{index}", tensor)
    if op == linear.QUANTISED:
        node.args = call["x"], parts[: len(tensors)], call["bias"], kind
        return copied
    node.target, node.args = op, (call["x"], parts[0], call["bias"])
    node.kwargs = {"scales": parts[1], "kind": kind}
    return copied


def add_buffer(gm: fx.GraphModule, name: str, tensor: Tensor) -> fx.Node:
    """A node that reads a new buffer, where the graph inserts nodes now."""
    gm.register_buffer(name, tensor, persistent=False)
    return gm.graph.get_attr(name)


# Gates, on a GPU.


aten = torch.ops.aten


@comes_after("use_linear_forms")
def fuse_swiglu(graph: ModelGraph, settings) -> str:
    """Replace ``silu(a) * b``, with a and b the halves of one product, by that product with a gate."""
    joined = 0
    for product in calls(graph.gm, aten.mul.Tensor):
        for activated, up in (product.args, product.args[::-1]):
            source = halves(activated, up)
            if source is not None and ends_plainly(source):
                with graph.gm.graph.inserting_before(product):
                    fused = graph.gm.graph.call_function(PRODUCT, source.args, {**source.kwargs, "gated": True})
                fused.meta = dict(source.meta)
                product.replace_all_uses_with(fused)
                graph.gm.graph.erase_node(product)
                joined += 1
                break
    return f"{joined} activations joined to the product before them"


def halves(activated, up) -> torch.fx.Node | None:
    """The node whose halves these are, the first through silu, if there is one and it has no bias."""
    if not all(isinstance(node, torch.fx.Node) for node in (activated, up)) or activated.target != aten.silu.default:
        return None
    gate = activated.args[0]
    if gate.target is not operator.getitem or up.target is not operator.getitem or gate.args[0] is not up.args[0]:
        return None
    split = gate.args[0]
    if (gate.args[1], up.args[1]) != (0, 1) or split.target != aten.split_with_sizes.default:
        return None
    source, sizes = split.args[0], split.args[1]
    if len(sizes) != 2 or sizes[0] != sizes[1] or len(activated.users) > 1 or len(split.users) > 2:
        return None
    return source if bias_of(source) is None else None


# Adapters.


ROOT = "model."
"""Begins the path of each module in a captured graph, because capture wraps the model under this name."""


@comes_after("merge_linears", "use_tree_attention")
def add_adapters(graph: ModelGraph, settings) -> str:
    """Put an `add_low_rank` after each linear layer of ``settings.low_rank``, or after its part of a merged product.

    The rows' adapters [B] int64 are the last entry but one of the input ``cache``. The added op stands between the
    product and the ops that other passes would fuse with it, so these layers' norms, gates and rotations are not fused
    with products.
    """
    if not settings.low_rank:
        return "off"
    gm = graph.gm
    cache = next(node for node in gm.graph.nodes if node.op == "placeholder" and node.target == "cache")
    *_, last_input = (node for node in gm.graph.nodes if node.op == "placeholder")
    with gm.graph.inserting_after(last_input):
        rows = gm.graph.call_function(operator.getitem, (cache, -2))
    found: dict[str, list[fx.Node]] = {path: [] for path in settings.low_rank}
    for node in calls(gm):
        path = owner(node).removeprefix(ROOT)
        if path in found and _input_of(node) is not None:
            found[path].append(node)
    for number, (path, nodes) in enumerate(found.items()):
        _add(gm, path, nodes, settings.low_rank[path], f"low_rank_{number}", rows)
    graph.has_adapters = True
    return f"{len(found)} linear layers add the low-rank product of each row's adapter"


def _input_of(node: fx.Node) -> fx.Node | None:
    """The input x of the layer whose result a node is; None for a node that is no such result."""
    product = node
    if node.target is operator.getitem and node.args[0].op != "placeholder":  # of the split of a merged product
        product = node.args[0].args[0]
    if not isinstance(product, fx.Node) or product.target is not PLAIN:
        return None
    return product.args[0] if str(product.args[1]).startswith(MERGED) == (product is not node) else None


def _add(gm: fx.GraphModule, path: str, nodes: list[fx.Node], part: LowRank, name: str, rows: fx.Node) -> None:
    """Add to the one result of a layer. UnsupportedModelError if there is not exactly one, of [B, N, out]."""
    if [tuple(node.meta["val"].shape[2:]) for node in nodes] != [(part.up.shape[1],)]:
        raise UnsupportedModelError(
            f"max_loras: the linear layer {path} is not called once for a tensor [rows, tokens, features], so its "
            "adapters cannot be chosen for each row; leave max_loras out"
        )
    (node,) = nodes
    with gm.graph.inserting_after(node):
        on_gpu = part.down.device.type == "cuda"
        added = gm.graph.call_function(torch.ops.spec_compile.add_low_rank.default if on_gpu else add_low_rank)
    node.replace_all_uses_with(added)
    with gm.graph.inserting_before(added):
        tensors = [add_buffer(gm, f"{name}_{each}", getattr(part, each)) for each in ("down", "up", "scale")]
    added.args, added.meta = (node, _input_of(node), *tensors, rows), dict(node.meta)
