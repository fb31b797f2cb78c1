"""`apply`: runs passes over a graph in their order, and notes what each changed."""

from collections.abc import Callable, Iterable

from torch import fx

from ..graph import PassReport, calls
from ..kernels import HALF


def comes_after(*names: str) -> Callable[[Callable], Callable]:
    """Declares that a pass relies on what the passes of these names do."""

    def declare(rewrite: Callable) -> Callable:
        rewrite.comes_after = names
        return rewrite

    return declare


def takes_kernels(graph, settings) -> bool:
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

    graph: a `ModelGraph` or a `passes.forward.graph.ForwardGraph`.
    keep_code: True if reports hold the readable graph.
    on_report: called with each report.
    """
    graph.log.clear()
    for rewrite in pipeline:
        before = len(calls(graph.gm))
        summary = rewrite(graph, settings)
        if graph.is_functional:
            _drop_unread(graph.gm.graph)
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


def _drop_unread(graph: fx.Graph) -> None:
    """Erase the calls without side effects that no node reads. fx's own function takes four times as long, because it
    asks for the side effects of every node, and looks for faults of the graph each time."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
