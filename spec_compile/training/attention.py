"""Attention of draft heads in training: differentiable, and with the history of a draft that rolls on.

Heads call the op ``spec_compile::attention``, which has no derivative. Inside `Causal` or `Rollout`, context managers
of this thread alone, the call is answered here instead, so that what is trained is the module that will draft.

Shapes: B rows, H query heads, Hkv key-value heads, T slots, D head size.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..kernels.ops import masked_attention

CHUNK = 256
"""Rows whose scores are held at once where no fused kernel applies."""


class Causal(TorchFunctionMode):
    """Each row sees the rows before it and itself, as at inference."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.spec_compile.attention.default:
            return self.attend(*args)
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        layer: int,
    ) -> Tensor:
        """q [B, H, T, D], k, v [B, Hkv, T, D] -> [B, T, H, D]; see ``spec_compile::attention``."""
        if sinks is None and softcap is None and window is None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)
        steps = torch.arange(q.shape[2], device=q.device)
        distance = steps[:, None] - steps
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
        return masked_attention(q, k, v, mask.repeat(q.shape[1] // k.shape[1], 1), sinks, scale, softcap)


class Rollout(Causal):
    """Step i of a draft that continues every slot at once (training-time test: EAGLE-3, arXiv:2503.01840, section 3.2).

    In step 0 a row sees the rows before it and itself. In step i row t has drafted i tokens: it sees rows 0 to t of
    step 0, and of the steps 1 to i its own row alone. One object serves the steps of one batch, in turn.
    """

    def __init__(self):
        super().__init__()
        self._history: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`, for the next step of this layer."""
        groups, size = q.shape[1] // k.shape[1], v.shape[3]
        v = F.pad(v, (0, q.shape[3] - size))  # the fused kernels want one size (DeepSeek's values are shorter)
        k, v = (heads.repeat_interleave(groups, dim=1) if groups > 1 else heads for heads in (k, v))
        dtype = _dtype(q)
        keys, values = self._history.setdefault(layer, ([], []))
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
        fused = q.device.type == "cpu" or dtype.itemsize == 2
        if fused and sinks is None and softcap is None and window is None:
            out = _Joint.apply(q.to(dtype), keys[0], values[0], scale, *keys[1:], *values[1:])
        else:
            out = joint_attention(q.to(dtype), keys, values, sinks, scale, window, softcap)
        return out[..., :size].transpose(1, 2)


def joint_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    sinks: Tensor | None = None,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What step i of `Rollout` means. q and each of the i + 1 keys and values [B, H, T, D] -> [B, H, T, D]."""
    rows, last = q.shape[2], len(keys) - 1
    own_keys, own_values = (torch.stack(own, dim=3) if last else None for own in (keys[1:], values[1:]))
    places, parts = torch.arange(rows, device=q.device), []
    for begin in range(0, rows, CHUNK):
        here = slice(begin, begin + CHUNK)
        end = min(begin + CHUNK, rows)
        scores = q[:, :, here] @ keys[0][:, :, :end].mT
        distance = places[here, None] - places[:end]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance + last >= window)
        if last:
            own = torch.einsum("bhtd,bhtnd->bhtn", q[:, :, here], own_keys[:, :, here])
            lag = last - 1 - torch.arange(last, device=q.device)
            far = torch.zeros_like(lag, dtype=torch.bool) if window is None else lag >= window
            scores, hidden = torch.cat([scores, own], dim=3), torch.cat([hidden, far.expand(len(hidden), -1)], dim=1)
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
            out = out + torch.einsum("bhtn,bhtnd->bhtd", shares[..., end : end + last], own_values[:, :, here])
        parts.append(out)
    return torch.cat(parts, dim=2)


class _Joint(torch.autograd.Function):
    """`joint_attention` without a matrix of scores: a fused kernel for the causal part, the few other keys by hand.

    The fused kernel's backward recovers probabilities from the output and its log-sum-exp. Given those of the whole,
    it yields the gradients of its part of the whole (as ring attention does: Liu et al., arXiv:2310.01889).
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, *own):
        out, total, *ctx.extra = _causal(q, k, v, scale)
        half = len(own) // 2
        if half:
            keys, values = torch.stack(own[:half], dim=3), torch.stack(own[half:], dim=3)
            scores = (q[:, :, :, None] * keys).sum(-1, dtype=total.dtype) * scale
            joint = torch.logaddexp(total, scores.logsumexp(-1))
            shares = (scores - joint[..., None]).exp()
            causal = out * (total - joint).exp()[..., None]
            out = (causal + (shares[..., None] * values).sum(3)).to(q.dtype)
            total = joint
        else:
            shares = total.new_empty(0)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, total, shares, *own)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, total, shares, *own = ctx.saved_tensors
        half = len(own) // 2
        grad = grad.contiguous()
        dq, dk, dv = _causal_backward(grad, q, k, v, out, total, ctx.scale, ctx.extra)
        if not half:
            return dq, dk, dv, None
        keys, values = torch.stack(own[:half], dim=3), torch.stack(own[half:], dim=3)
        mean = (grad * out).sum(-1, dtype=shares.dtype)[..., None]
        pull = (grad[:, :, :, None] * values).sum(-1, dtype=shares.dtype)
        dscores = (shares * (pull - mean) * ctx.scale)[..., None]
        dq = (dq + (dscores * keys).sum(3)).to(q.dtype)
        dkeys = (dscores * q[:, :, :, None]).to(q.dtype)
        dvalues = (shares[..., None] * grad[:, :, :, None]).to(q.dtype)
        return dq, dk, dv, None, *dkeys.unbind(3), *dvalues.unbind(3)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple:
    """(attention [B, H, T, D], log-sum-exp of its scores [B, H, T], what else the backward of the kernel takes)."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    out, total, *extra = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return out, total, *extra[:6]


def _causal_backward(grad, q, k, v, out, total, scale, extra) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, True, scale=scale
        )
    lengths, random = extra[:4], extra[4:]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, total, *lengths, 0.0, True, *random, scale=scale
    )


def _dtype(like: Tensor) -> torch.dtype:
    """What a matrix product computes in here."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
