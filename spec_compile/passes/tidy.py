"""tidy: drop what tracing leaves and inference never needs, and its assumptions about strides."""

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import ModelGraph, attribute, calls

aten = torch.ops.aten
CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
FORWARDS = {aten.alias.default, aten.detach.default}
CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device}
DROPOUTS = {aten.dropout.default, aten.feature_dropout.default}


def tidy(graph: ModelGraph, settings) -> str:
    """Erase run-time assertions, aliases, slices of everything, casts to the dtype a tensor already has, and dropout.

    A view becomes a reshape, and a view as complex numbers is one of a contiguous tensor: attention and linear layers
    of later passes may return other strides than the trace had, on which a view depends. A number that the trace
    holds on another device is made on the graph's, because a CUDA graph cannot copy it. An op that writes to its
    input, as the ``/=`` of routers, becomes one that does not, so that it can be dropped if nobody reads the result.
    """
    erased = 0
    for node in calls(graph.gm):
        if node.target is aten.lift_fresh_copy.default:
            _make_on_device(graph, node)
            continue
        if (pure := _pure_form(node)) is not None:
            node.target = pure
            continue
        if node.target is aten.view.default:
            node.target = aten.reshape.default
            continue
        if node.target is aten.view_as_complex.default:
            with graph.gm.graph.inserting_before(node):
                contiguous = graph.gm.graph.call_function(aten.contiguous.default, (node.args[0],))
            contiguous.meta = dict(node.args[0].meta)
            node.args = (contiguous,)
            continue
        if node.target in CHECKS:
            graph.gm.graph.erase_node(node)
        elif node.target in FORWARDS or _is_idle_cast(node) or _is_idle_slice(node) or _is_off(node):
            node.replace_all_uses_with(node.args[0])
            graph.gm.graph.erase_node(node)
        else:
            continue
        erased += 1
    return f"erased {erased} assertions, aliases, idle casts and dropouts"


def _make_on_device(graph: ModelGraph, node: fx.Node) -> None:
    """Put a `full` in place of the copy of a tensor of one number that is on another device than the graph."""
    held = attribute(graph.gm, node.args[0].target) if node.args[0].op == "get_attr" else None
    if held is not None and held.dim() == 0 and held.device != graph.device:
        node.target, node.args = aten.full.default, ([], held.item())
        node.kwargs = {"dtype": held.dtype, "device": graph.device}


def _pure_form(node: fx.Node):
    """The op that returns what this one writes to its first input; None if anybody could see the writing itself.

    The input must be what an op has made, with all its other readers before this one, and none of them a view of it.
    """
    name, overload = getattr(node.target, "_opname", ""), getattr(node.target, "_overloadname", "")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") and not name.endswith("__") else None
    if packet is None or overload not in packet.overloads() or not isinstance(written := node.args[0], fx.Node):
        return None
    dtypes = {value.dtype for each in node.all_input_nodes if isinstance(value := each.meta.get("val"), torch.Tensor)}
    maker = written.args[0] if written.target is operator.getitem else written
    readers = [user for user in written.users if user is not node]
    if len(dtypes) != 1 or not all(_is_fresh(each) for each in (maker, *readers)) or not all(r < node for r in readers):
        return None
    return getattr(packet, overload)


def _is_fresh(node: fx.Node) -> bool:
    """True if an op returns new memory and writes to none."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def _is_idle_cast(node: fx.Node) -> bool:
    if node.target not in CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    copies = node.kwargs.get("copy") or True in node.args[2:]  # somebody may want to write to it
    if before is None or after is None or copies or node.kwargs.get("memory_format") is not None:
        return False
    return before.dtype == after.dtype and before.device == after.device and before.stride() == after.stride()


def _is_idle_slice(node: fx.Node) -> bool:
    """True if a slice has as many entries as its input, so all of them, as with transformers' ``logits_to_keep``."""
    if node.target != aten.slice.Tensor:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if before is None or after is None:
        return False
    return all(statically_known_true(x == y) for x, y in zip(before.shape, after.shape))


def _is_off(node: fx.Node) -> bool:
    """True for dropout of inference."""
    return node.target in DROPOUTS and not node.args[2]
