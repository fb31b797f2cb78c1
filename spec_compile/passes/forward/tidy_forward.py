"""tidy_forward: the pass `tidy` for graphs that Dynamo has traced."""

import torch
from torch.nn import functional as F

from ...graph import calls
from .graph import ForwardGraph, value

CASTS = {"to", "type", "float", "half", "bfloat16", "double", "type_as", "cpu", "cuda"}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


def tidy_forward(graph: ForwardGraph, settings) -> str:
    """Erase casts to the dtype and device that a tensor already has, dropout at inference, and API-usage logging.

    Casts and dropouts of this sort return their very argument, so that aliasing and in-place writes stay as they were.
    """
    erased = 0
    for node in calls(graph.gm):
        if _is_idle_cast(node) or _is_idle_dropout(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is not torch._C._log_api_usage_once or node.users:
            continue
        graph.gm.graph.erase_node(node)
        erased += 1
    return f"erased {erased} idle casts, dropouts and logging calls"


def _is_idle_cast(node) -> bool:
    """True if a call is a cast that returns its argument."""
    before, after = value(node.args[0] if node.args else None), value(node)
    if node.op != "call_method" or node.target not in CASTS or before is None or after is None:
        return False
    if node.kwargs.get("copy") or True in node.args or node.kwargs.get("memory_format") is not None:
        return False
    return before.dtype == after.dtype and before.device == after.device


def _is_idle_dropout(node) -> bool:
    """True if a call is a dropout that is off."""
    if node.target not in DROPOUTS or value(node.args[0] if node.args else None) is None:
        return False
    arguments = dict(zip(("input", "p", "training", "inplace"), node.args)) | node.kwargs
    return arguments.get("training", node.target not in (F.alpha_dropout, F.feature_alpha_dropout)) is False
