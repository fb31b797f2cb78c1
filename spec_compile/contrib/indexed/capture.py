"""Changes of attention with an indexer (DeepSeek sparse attention), so that its capture shows a marker of choices."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.modules import UNREAD, Attend, source_of
from ...graph import IndexSpec, ModelGraph, calls
from ...kernels import HALF
from . import choice


class _EarlierOfEqual(TorchDispatchMode):
    """See `earlier_of_equal`. sizes: tokens that indexers choose. has_changed: True if a choice was another before."""

    @property
    def warning(self) -> str:
        """See `capture.checks.TIES`."""
        return self.has_changed * (
            "has indexers whose scores are often equal, as with few heads: the earlier token is chosen here, and any "
            "by transformers, so that its tokens may differ, also between its own prompts and single steps"
        )

    def __init__(self, sizes: set[int]):
        super().__init__()
        self.sizes, self.has_changed = sizes, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or args[1] not in self.sizes:
            return out
        values, tokens = (part[..., : args[1]] for part in args[0].sort(dim=-1, descending=True, stable=True))
        chosen = [ids.masked_fill(v == -math.inf, -1).sort().values for v, ids in ((values, tokens), out)]
        self.has_changed |= not torch.equal(*chosen)
        return values, tokens


@contextmanager
def earlier_of_equal(graph: ModelGraph) -> Iterator[_EarlierOfEqual]:
    """A context in which a model's own indexers choose the earlier of equal scores, as ours do, where torch.topk
    promises no order."""
    choices = _EarlierOfEqual({spec.topk for spec in graph.indexes})
    with choices if choices.sizes else nullcontext():
        yield choices


def mark(module: nn.Module, attend: Attend, rotation: str = "apply_rotary_pos_emb", is_first: bool = True) -> None:
    """Call the attention without a mask, and its indexer, if it has one, by the marker.

    rotation: the name of the function, in the module's file, that rotates a part of each index head.
    is_first: True if the rotated part comes first.
    """
    indexer = module.indexer
    if indexer is None:  # an earlier layer has chosen its tokens, or it attends to all
        return
    rotate = partial(getattr(source_of(module), rotation), unsqueeze_dim=2)
    indexer.forward = partial(_chosen, indexer, rotate, is_first)
    module.forward = partial(_without_mask, module.forward)


def _without_mask(forward, *args, **named):
    return forward(*args, **{**named, "attention_mask": UNREAD})


def _chosen(
    indexer: nn.Module, rotate, is_first: bool, hidden_states: Tensor, q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor], *_, **__,
) -> Tensor:  # fmt: skip
    """An indexer's forward: hidden_states [B, T, C], q_resid [B, T, R] -> the chosen tokens [B, T, topk] int32.

    Its score is sum_h w_h relu(scale q_h . k). The scale is positive, so that it can be a factor of the weights.
    """
    q = indexer.wq_b(q_resid).unflatten(2, (-1, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).to(hidden_states.dtype)[:, :, None]
    part, size = indexer.qk_rope_head_dim, indexer.head_dim
    sizes = (part, size - part) if is_first else (size - part, part)
    (q_first, q_last), (k_first, k_last) = (x.split(sizes, dim=3) for x in (q, k))
    if is_first:
        q_first, k_first = rotate(q_first, k_first, *position_embeddings)
    else:
        q_last, k_last = rotate(q_last, k_last, *position_embeddings)
    q, k = torch.cat([q_first, q_last], dim=3), torch.cat([k_first, k_last], dim=3)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return choice.choose(q, k[:, :, 0], weights, indexer.index_topk)


def describe(gm: fx.GraphModule) -> tuple[IndexSpec, ...]:
    """The indexers of a captured graph, in its order."""
    choices = [(node.args[1].meta["val"], node.args[3]) for node in calls(gm, choice.MARKER)]
    return tuple(IndexSpec(k.shape[2], topk, None if k.dtype in HALF else k.dtype) for k, topk in choices)
