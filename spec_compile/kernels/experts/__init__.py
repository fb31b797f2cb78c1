"""Routed experts: the two products of a mixture's experts, which capture marks, and where their kernel runs.

A token's experts each multiply its row (`experts_up`), and what they give is multiplied again and added up by the
router's weights (`experts_down`). T tokens, k experts of each, E experts, I columns between the products. A row of the
tables ``ids`` and ``weights`` has a token's experts in the router's order. Reference: transformers'
`integrations/moe.py`.
"""

import torch
from torch import Tensor, fx

from . import launch
from .kinds import Kind, kind_of, unrounded  # noqa: F401
from .launch import lack  # noqa: F401


@torch.library.custom_op("spec_compile::experts_up", mutates_args=())
def experts_up(x: Tensor, ids: Tensor, parts: list[Tensor], kind: str) -> Tensor:
    """The first product of each token's experts, and their gate: x [T, H], ids [T, k] int64 -> [T, k, I].

    parts, kind: the weights and how they lie, see `Kind`. Nothing waits for a GPU.
    """
    how, top = kind_of(kind), ids.shape[1]
    if launch.serves(x, parts, how):
        return launch.up(x, ids, parts, how)
    rows = x[:, None].expand(-1, top, -1).reshape(-1, x.shape[1])
    return how.gated(_product(rows, ids.reshape(-1), parts, how)).unflatten(0, ids.shape)


@experts_up.register_fake
def _(x, ids, parts, kind):
    return x.new_empty(*ids.shape, kind_of(kind).columns(parts))


@torch.library.custom_op("spec_compile::experts_down", mutates_args=())
def experts_down(x: Tensor, ids: Tensor, weights: Tensor, parts: list[Tensor], kind: str) -> Tensor:
    """The second product of each token's experts, and their sum by the router's weights.

    x [T, k, I], ids [T, k] int64, weights [T, k] -> [T, H] of x's dtype. parts, kind: as of `experts_up`.
    """
    how = kind_of(kind)
    if launch.serves(x, parts, how):
        return launch.down(x, ids, weights, parts, how)
    pairs = _product(x.flatten(0, 1), ids.reshape(-1), parts, how).unflatten(0, ids.shape)
    return (pairs * weights[:, :, None]).sum(dim=1).to(x.dtype)


@experts_down.register_fake
def _(x, ids, weights, parts, kind):
    return x.new_empty(x.shape[0], kind_of(kind).columns(parts))


UP, DOWN = torch.ops.spec_compile.experts_up.default, torch.ops.spec_compile.experts_down.default


def parts_of(node: fx.Node) -> list[fx.Node]:
    """The parts of the weights of a product of experts."""
    return node.args[-2]


def _product(x: Tensor, ids: Tensor, parts: list[Tensor], kind: Kind) -> Tensor:
    """x [P, I] by the weights of the experts ids [P] -> [P, O]."""
    if x.is_cuda and not kind.scale_size and x.dtype in (torch.bfloat16, torch.float16):
        return _grouped(x, ids, parts, kind)
    out = x.new_empty(len(x), kind.sizes(parts)[0])
    for expert in ids.unique().tolist():
        rows = (ids == expert).nonzero().squeeze(1)
        out[rows] = kind.product(x[rows], parts, expert)
    return out


def _grouped(x: Tensor, ids: Tensor, parts: list[Tensor], kind: Kind) -> Tensor:
    """`_product` on a GPU, by PyTorch's grouped product of rows that are sorted by their experts."""
    ids, order = ids.sort()
    ends = (ids[None] <= torch.arange(len(parts[0]), device=x.device)[:, None]).sum(dim=1, dtype=torch.int32)
    weight = parts[0] if kind.transposed else parts[0].transpose(1, 2)
    sorted_out = torch.nn.functional.grouped_mm(x[order], weight, offs=ends)
    if kind.biased:
        sorted_out = sorted_out + parts[-1][ids]
    return torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
