"""Routed experts: the two products of a mixture's experts, to which capture reduces every family.

    experts_up:    y[t, r] = gate(x[t] @ up[ids[t, r]]^T + bias)
    experts_down:  out[t] = sum over r of weights[t, r] * (y[t, r] @ down[ids[t, r]]^T + bias)

T tokens, k experts for each (r is 0 .. k - 1, in the router's order), E experts, I columns between the products.
Reference: transformers' `integrations/moe.py`.
"""

import torch
from torch import Tensor, fx

from ...quantised.experts import ExpertFormat, format_here, format_of
from ..launching import new_op
from ..linear.product_ops import empty_stream, plain_stream, stream_after
from . import launch
from .launch import why_not, why_not_on  # noqa: F401


@new_op("experts_up", lambda x, ids, parts, format: x.new_empty(*ids.shape, format_of(format).columns(parts)))
def experts_up(x: Tensor, ids: Tensor, parts: list[Tensor], format: str) -> Tensor:
    """The first product of each token's experts, and their gate: x [T, H], ids [T, k] int64 -> [T, k, I].

    parts, format: the weights and the text of their `ExpertFormat`. The host waits for nothing on a GPU.
    """
    layout, top = format_here(format), ids.shape[1]
    if launch.supports(x, parts, layout):
        return launch.up(x, ids, parts, layout)
    rows = x[:, None].expand(-1, top, -1).reshape(-1, x.shape[1])
    return layout.gated(_product(rows, ids.reshape(-1), parts, layout)).unflatten(0, ids.shape)


@new_op("experts_down", lambda x, _, __, parts, format: x.new_empty(x.shape[0], format_of(format).columns(parts)))
def experts_down(x: Tensor, ids: Tensor, weights: Tensor, parts: list[Tensor], format: str) -> Tensor:
    """The second product of each token's experts, and their sum by the router's weights.

    x [T, k, I], ids [T, k] int64, weights [T, k] -> [T, H] of x's dtype. parts, format: see `experts_up`.
    """
    layout = format_here(format)
    if launch.supports(x, parts, layout):
        return launch.down(x, ids, weights, parts, layout)
    pairs = _product(x.flatten(0, 1), ids.reshape(-1), parts, layout).unflatten(0, ids.shape)
    return (pairs * weights[:, :, None]).sum(dim=1).to(x.dtype)


@new_op("experts_down_to_stream", lambda x, ids, weights, parts, format, *stream: empty_stream(*stream))
def experts_down_to_stream(
    x: Tensor, ids: Tensor, weights: Tensor, parts: list[Tensor], format: str, residual: Tensor, norm_weight: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The residual stream after `experts_down`, and the first half of the RMSNorm that follows.

    residual [..., H]; norm_weight, offset and the results: see `linear.product_ops.product_to_stream`.
    """
    layout = format_here(format)
    if not launch.supports(x, parts, layout):
        out = experts_down(x, ids, weights, parts, format)
        return plain_stream(out.view_as(residual), residual, norm_weight, offset)
    after = stream_after(residual, norm_weight, offset)
    stream = launch.down(x, ids, weights, parts, layout, stream=after._replace(residual=after.residual.contiguous()))
    return stream.view(residual.shape), after.scaled.view(residual.shape), after.squares


UP, DOWN = torch.ops.spec_compile.experts_up.default, torch.ops.spec_compile.experts_down.default
TO_STREAM = torch.ops.spec_compile.experts_down_to_stream.default
PRODUCTS = UP, DOWN, TO_STREAM
"""The ops of both products. A node's first arguments are `UP`'s or `DOWN`'s; all others stand in kwargs."""


def parts_of(node: fx.Node) -> list[fx.Node]:
    """The parts of the weights of a product of experts, where they are held if the product reads copies of them."""
    return [part if part.op == "get_attr" else part.all_input_nodes[0] for part in node.args[-2]]


def _product(x: Tensor, ids: Tensor, parts: list[Tensor], layout: ExpertFormat) -> Tensor:
    """x [P, I] times the weights of the experts ids [P] -> [P, O]; 0 for experts that the parts do not have."""
    out = x.new_zeros(len(x), layout.sizes(parts)[0])
    for expert in ids.unique().tolist():
        if 0 <= expert - layout.first < len(parts[0]):
            rows = (ids == expert).nonzero().squeeze(1)
            out[rows] = layout.product(x[rows], parts, expert - layout.first)
    return out
