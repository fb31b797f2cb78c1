"""Attention of draft heads in training: differentiable, and with the history of a draft that rolls on.

Heads call the op ``spec_compile::attention``, which has no derivative. `Causal` and `Rollout` are context managers of
the calling thread that answer the call instead, so that the module that is trained is the one that will draft.

`BlockAttention` is for blocks of slots, each of which sees its block and the context before the block's anchor.

Shapes: B rows, H query heads, Hkv key-value heads, T slots, D head size.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModelError
from ..kernels.ops import masked_attention
from .data import WIDTH

CHUNK = 256
"""Slots whose scores are in memory at a time where no fused kernel applies."""


class Causal(TorchFunctionMode):
    """Causal attention: each slot sees the slots before it and itself, as at inference."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.spec_compile.attention.default:
            if (kwargs or {}).get("chosen") is not None:
                raise UnsupportedModelError("model: layers with an indexer cannot be trained; use algo='eagle3'")
            return self.attend(*args)
        return func(*args, **(kwargs or {}))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int | None,
        softcap: float | None, layer: int,
    ) -> Tensor:  # fmt: skip
        """The result of a call of ``spec_compile::attention``, [B, T, H, D].

        q: [B, H, T, D]
        k, v: [B, Hkv, T, D]
        sinks: [H] or None
        scale: factor of the scores
        window: slots that a slot sees, itself included, or None for all
        softcap: bound of the scores, or None
        layer: number of the draft's layer
        """
        if sinks is None and softcap is None and window is None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)
        # Fused kernels know neither sinks nor caps nor windows: a mask and the plain formula serve those.
        positions = torch.arange(q.shape[2], device=q.device)
        distance = positions[:, None] - positions
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
        return masked_attention(q, k, v, mask.repeat(q.shape[1] // k.shape[1], 1), sinks, scale, softcap)


class Rollout(Causal):
    """Attention of a draft that continues from every slot at once, step after step.

    In step i slot t has drafted i tokens: it sees slots 0 to t of step 0, and slot t of steps 1 to i. In step 2, e.g.,
    slot 1 sees slots 0 and 1 of step 0, its key of step 1, and its key of step 2. One object serves the steps of one
    batch, in order, at most `steps`.

    Training-time test of EAGLE-3 (arXiv:2503.01840, section 3.2).
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self._history: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._drafted: dict[int, Tensor] = {}
        """For each layer the drafted keys and the drafted values, without gradients, [2, steps - 1, B, T, H, D]."""

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`. The layer's keys and values of each step are remembered for the steps after it."""
        groups, size = q.shape[1] // k.shape[1], v.shape[3]
        # Fused kernels take one head size, but DeepSeek's values are shorter than its keys.
        v = F.pad(v, (0, q.shape[3] - size))
        k, v = (heads.repeat_interleave(groups, dim=1) if groups > 1 else heads for heads in (k, v))
        dtype = _dtype(q)
        keys, values = self._history.setdefault(layer, ([], []))
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
        fused = q.device.type == "cpu" or dtype.itemsize == 2
        if fused and sinks is None and softcap is None and window is None:
            drafted = self._remember(layer, keys, values)
            out = _Joint.apply(q.to(dtype), keys[0], values[0], scale, drafted, *keys[1:], *values[1:])
        else:
            out = joint_attention(q.to(dtype), keys, values, sinks, scale, window, softcap)
        return out[..., :size].transpose(1, 2)

    @torch.no_grad()
    def _remember(self, layer: int, keys: list[Tensor], values: list[Tensor]) -> Tensor | None:
        """The keys and values of steps 1 to i, [2, i, B, T, H, D], after adding step i's.

        Each is written once, so the views that earlier steps use do not change.
        """
        last = len(keys) - 1
        if not last:
            return None
        if layer not in self._drafted:
            batch, heads, slots, size = keys[0].shape
            self._drafted[layer] = keys[0].new_empty(2, self.steps - 1, batch, slots, heads, size)
        for part, steps in enumerate((keys, values)):
            self._drafted[layer][part, last - 1] = steps[last].transpose(1, 2)
        return self._drafted[layer][:, :last]


def joint_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], sinks: Tensor | None = None, scale: float = 1.0,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Step i of `Rollout` by the plain formula, [B, H, T, D].

    q: [B, H, T, D]
    keys, values: i + 1 tensors of the same shape
    sinks, scale, window, softcap: as in `Causal.attend`
    """
    slots, last = q.shape[2], len(keys) - 1
    # The keys and values that a slot has drafted itself, [B, H, T, i, D].
    drafted_keys, drafted_values = (torch.stack(steps, dim=3) if last else None for steps in (keys[1:], values[1:]))
    positions, parts = torch.arange(slots, device=q.device), []
    for begin in range(0, slots, CHUNK):
        chunk = slice(begin, begin + CHUNK)
        end = min(begin + CHUNK, slots)
        # Scores with the text, [B, H, chunk, end]. In step i the query's position is its slot's plus i.
        scores = q[:, :, chunk] @ keys[0][:, :, :end].mT
        distance = positions[chunk, None] - positions[:end]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance + last >= window)
        if last:
            # Scores with the slot's own drafts, [B, H, chunk, i]; the oldest may be outside of the window.
            drafted = torch.einsum("bhtd,bhtnd->bhtn", q[:, :, chunk], drafted_keys[:, :, chunk])
            lag = last - 1 - torch.arange(last, device=q.device)
            far = torch.zeros_like(lag, dtype=torch.bool) if window is None else lag >= window
            scores, hidden = torch.cat([scores, drafted], dim=3), torch.cat([hidden, far.expand(len(hidden), -1)], 1)
        # One softmax over both, in float32; a sink takes a share and gives no value.
        scores = scores.float() * scale if q.dtype.itemsize == 2 else scores * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=3)
        shares = scores.softmax(dim=3).to(q.dtype)
        out = shares[..., :end] @ values[0][:, :, :end]
        if last:
            out = out + torch.einsum("bhtn,bhtnd->bhtd", shares[..., end : end + last], drafted_values[:, :, chunk])
        parts.append(out)
    return torch.cat(parts, dim=2)


class _Joint(torch.autograd.Function):
    """`joint_attention` without a matrix of scores.

    A fused kernel computes the causal part, `join` adds the few keys that a slot has drafted. The fused backward
    recovers probabilities from an output and its log-sum-exp. It is passed the joint softmax's and so yields the
    gradients of its part (as in ring attention: Liu et al., arXiv:2310.01889).
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, drafted, *sources):
        """Attention to step 0 and to the drafted keys, [B, H, T, D].

        q, k, v: [B, H, T, D]
        drafted: [2, i, B, T, H, D]; the keys and values of steps 1 to i, None in step 0. It is not a saved tensor of
            autograd, because later steps write to the same storage after its end.
        sources: tensors [B, H, T, D] of which `drafted` is a copy, keys first; they get its gradients
        """
        out, total, *ctx.extra = _causal(q, k, v, scale)
        if drafted is not None:
            out, total = _joins(q)[0](q, *drafted, out, total, scale)
        ctx.scale, ctx.drafted = scale, drafted
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, total = ctx.saved_tensors
        grad = grad.contiguous() if grad.stride(3) != 1 else grad
        # The causal part: the kernel gets the joint output and sum, so that its probabilities are the joint ones.
        dq, dk, dv = _causal_backward(grad, q, k, v, out, total, ctx.scale, ctx.extra)
        if ctx.drafted is None:
            return dq, dk, dv, None, None
        dq, *parts = _joins(q)[1](grad, q, *ctx.drafted, out, total, dq, ctx.scale)
        return dq, dk, dv, None, None, *(step.transpose(1, 2) for part in parts for step in part)


def join(q: Tensor, keys: Tensor, values: Tensor, causal: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to i drafted keys of each slot, joined with attention to other keys.

    q: [B, H, T, D]
    keys, values: [i, B, T, H, D]
    causal: [B, H, T, D]; the output of attention to the other keys
    total: [B, H, T]; the log-sum-exp of its scores

    Returns output and log-sum-exp of the joint attention, in the same shapes and dtypes.
    """
    keys, values = keys.transpose(2, 3), values.transpose(2, 3)
    # Two softmaxes become one: each part's output is scaled by its share of the joint sum of exponentials.
    scores = (q * keys).sum(-1, dtype=total.dtype) * scale
    joint = torch.logaddexp(total, scores.logsumexp(0))
    shares = (scores - joint).exp()[..., None]
    out = causal * (total - joint).exp()[..., None] + (shares * values).sum(0)
    return out.to(q.dtype), joint


def join_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, joint: Tensor, dq: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q [B, H, T, D] and of the keys and values [i, B, T, H, D] of `join`.

    grad: [B, H, T, D]; the gradient of its output
    out, joint: [B, H, T, D], [B, H, T]; its output and log-sum-exp
    dq: [B, H, T, D]; the gradient of q in the attention to the other keys
    """
    keys, values = keys.transpose(2, 3), values.transpose(2, 3)
    # The softmax's derivative, shares * (pull of each value - their mean under all shares).
    shares = ((q * keys).sum(-1, dtype=joint.dtype) * scale - joint).exp()[..., None]
    mean = (grad * out).sum(-1, dtype=joint.dtype)[..., None]
    pull = (grad * values).sum(-1, dtype=joint.dtype)[..., None]
    dscores = shares * (pull - mean) * scale
    dkeys, dvalues = (part.to(q.dtype).transpose(2, 3) for part in (dscores * q, shares * grad))
    return (dq + (dscores * keys).sum(0)).to(q.dtype), dkeys, dvalues


def _joins(q: Tensor) -> tuple[Callable, Callable]:
    """`join` and `join_backward`, as kernels on a GPU."""
    if q.device.type == "cpu":
        return join, join_backward
    from . import attention_kernels

    return attention_kernels.join, attention_kernels.join_backward


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple:
    """Causal attention by PyTorch's flash kernel.

    Returns its output [B, H, T, D], the log-sum-exp of the scores [B, H, T], and what else the kernel's backward takes.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    out, total, *extra = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return out, total, *extra[:6]


def _causal_backward(grad, q, k, v, out, total, scale, extra) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each [B, H, T, D], by the backward of the kernel in `_causal`."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, True, scale=scale
        )
    lengths, random = extra[:4], extra[4:]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, total, *lengths, 0.0, True, *random, scale=scale
    )


def _dtype(like: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of `like` is computed here: autocast's, or `like`'s own."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


# Attention of blocks in training, with a derivative: a slot sees its block, and the context before the block's anchor.
#
# Shapes: as in `attention_kernels`.

ROWS = 256
"""Slots of blocks that attend together on a CPU, each to the context and to all of these slots, most of them masked."""


class BlockAttention(Causal):
    """Attention of blocks: a slot sees its block, and the context before the block's anchor."""

    def __init__(self, anchors: Tensor, size: int):
        """anchors: see `plain_block_attention`, on the draft's device. size: slots of a block."""
        super().__init__()
        self.anchors, self.size = anchors, size

    def attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
    ) -> Tensor:
        """The attention of all slots, [B, n * T, H, D]. q, k and v have two dimensions [n, T] in the place of S.

        The other arguments as in `plain_block_attention`.
        """
        q, k, v = (heads.flatten(2, 3) for heads in (q, k, v))
        is_plain = q.device.type == "cpu" or q.dtype == torch.float64
        attend = plain_block_attention if is_plain else _BlockAttention.apply
        return attend(q, k, v, keys, values, self.anchors, self.size, scale, causal).transpose(1, 2)


def plain_block_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, size: int, scale: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """The attention of all slots by masks, for some blocks at a time; [B, H, S, D].

    q: [B, H, S, D]
    k, v: [B, Hkv, S, D]; of the slots
    keys, values: [B, Hkv, L, D]; of the context, which the blocks of a row share
    anchors: [B, n] int64; the length of the context that a block sees, ascending
    size: T, slots of a block
    causal: True if a slot does not see later slots of its block
    """
    groups, parts = q.shape[1] // k.shape[1], []
    step = max(1, ROWS // size)
    for begin in range(0, anchors.shape[1], step):
        some = anchors[:, begin : begin + step]
        seen = min(keys.shape[2], -(-int(some.max()) // WIDTH) * WIDTH)
        slots = slice(begin * size, (begin + step) * size)
        # The keys and values of these slots follow the context's.
        own_q, own_k, own_v = (heads[:, :, slots] for heads in (q, k, v))
        joined = (torch.cat(pair, dim=2) for pair in ((keys[:, :, :seen], own_k), (values[:, :, :seen], own_v)))
        mask = _mask(some, size, causal, seen, q.dtype).repeat(1, 1, groups, 1)
        parts.append(masked_attention(own_q, *joined, mask, None, scale, None))
    return torch.cat(parts, dim=1).transpose(1, 2)


def _mask(anchors: Tensor, size: int, causal: bool, seen: int, dtype: torch.dtype) -> Tensor:
    """0 or minus infinity, [B, 1, S, seen + S]."""
    context = torch.arange(seen, device=anchors.device) < anchors.repeat_interleave(size, dim=1)[:, :, None]
    slot = torch.arange(anchors.shape[1] * size, device=anchors.device)
    block = slot[:, None] // size == slot // size
    block = block & (slot[:, None] >= slot) if causal else block
    visible = torch.cat([context, block.expand(len(anchors), -1, -1)], dim=2)[:, None]
    return torch.zeros(visible.shape, dtype=dtype, device=anchors.device).masked_fill_(~visible, -math.inf)


class _BlockAttention(torch.autograd.Function):
    """The kernels as a function of autograd, with the arguments of `plain_block_attention`.

    They compute in the dtype of a matrix product of q.
    """

    @staticmethod
    def forward(ctx, q, k, v, keys, values, *how):
        from .attention_kernels import forward_blocks

        dtype = _dtype(q)
        q, k, v, keys, values = (heads.to(dtype) for heads in (q, k, v, keys, values))
        out, total = forward_blocks(q, k, v, keys, values, *how)
        ctx.how = how
        ctx.save_for_backward(q, k, v, keys, values, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from .attention_kernels import backward_blocks

        *given, out, total = ctx.saved_tensors
        return *backward_blocks(grad.to(out.dtype), *given, *ctx.how, out, total), *[None] * len(ctx.how)
