"""`apply` runs passes over a graph in their order, and notes what each changed; facts that passes ask of nodes."""

from collections.abc import Callable, Iterable

import torch
from torch import fx

from ..graph import PassReport, calls
from ..kernels import HALF


def comes_after(*names: str) -> Callable[[Callable], Callable]:
    """Declares that a pass relies on what the passes of these names do."""

    def declare(rewrite: Callable) -> Callable:
        rewrite.comes_after = names
        return rewrite

    return declare


def supports_kernels(graph, settings) -> bool:
    """True if kernels of ours compute a graph, which is of 16 bits and on a GPU, and add up each row in one order."""
    return settings.purpose != "forward" and graph.dtype in HALF and graph.device.type == "cuda"


def check_order(pipeline: Iterable[Callable]) -> None:
    """ValueError if a pass has no pass before it that it `comes_after`."""
    names: list[str] = []
    for rewrite in pipeline:
        missing = [name for name in getattr(rewrite, "comes_after", ()) if name not in names]
        if missing:
            raise ValueError(f"pipeline: {rewrite.__name__} has to come after {', '.join(missing)}")
        names.append(rewrite.__name__)


def apply(graph, settings, pipeline: Iterable[Callable], keep_code: bool = False, on_report: Callable | None = None):
    """Run every pass ``fn(graph, settings) -> summary`` on ``graph.gm``, in place, and fill ``graph.log`` anew.

    graph: a `ModelGraph` or a `ForwardGraph`.
    keep_code: True if reports hold the readable graph.
    on_report: called with each report.
    """
    graph.log.clear()
    for rewrite in pipeline:
        before = len(calls(graph.gm))
        summary = rewrite(graph, settings)
        if graph.is_functional:
            drop_unread(graph.gm.graph)
        code = ""
        if keep_code:
            graph.gm.recompile()
            code = graph.gm.print_readable(print_output=False)
        report = PassReport(rewrite.__name__, summary, before, len(calls(graph.gm)), code)
        graph.log.append(report)
        if on_report is not None:
            on_report(report)
    graph.gm.graph.lint()
    graph.gm.recompile()


def drop_unread(graph: fx.Graph) -> None:
    """Erase the calls without side effects that no node reads. fx's own function takes four times as long, because it
    asks for the side effects of every node, and looks for faults of the graph each time."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


# Facts of a node, and its replacement.


aten = torch.ops.aten
SAME = {"alias", "clone", "contiguous", "copy_", "detach", "dropout", "to", "_to_copy", "type_as"}
"""ATen ops that keep the shape."""
VIEWS = {aten.view.default, aten.reshape.default, aten.unflatten.int}
"""ATen ops that only give the shape, as of batches and nodes, or of heads."""


def name_of(node: fx.Node) -> str:
    """The name of the op that a node calls, without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in SAME


def shape_of(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def calls_op(node, target) -> bool:
    """True if an argument is a node that calls an op."""
    return isinstance(node, fx.Node) and node.target == target


def swaps_heads(x: fx.Node) -> bool:
    """True if a node swaps heads and tokens, the dimensions 1 and 2 of 4."""
    return x.target == aten.transpose.int and {dim % 4 for dim in x.args[1:]} == {1, 2}


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Put a node, which describes the same value, in the place of another."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
