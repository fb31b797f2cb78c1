"""The product that ends at the residual stream where its columns are shared out to the ranks of tensor parallelism.

A rank's product is its part of the sum. It stays in float32 until all parts are added up, so that the result differs
from that of one GPU in nothing but the order of that addition.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..all_reduce import EXCHANGES, Exchange, all_reduce
from ..ops import as_rows
from .plans import squared_columns
from .small_m import launch, plan_of, run
from .stream import plain_stream, stream_behind

try:
    from ..all_reduce_kernel import all_reduce_add
except ImportError:  # no Triton, and so no plan
    all_reduce_add = None


@torch.library.custom_op("spec_compile::small_m_all_reduce_add", mutates_args=())
def small_m_all_reduce_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, offset: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`small_m_add` of the sum of all ranks' products: x [..., I] and weight [O, I] are a rank's own, and so is the
    bias; residual [..., O], norm_weight [O] and what it returns are the same on all ranks, to the bit.

    group_name: of the ranks. Where their GPUs have memory in common (`all_reduce.prepare`) one kernel adds up;
    else `all_reduce` comes before it.
    """
    how = plan_of(x, weight)
    if how is None:
        product = all_reduce(F.linear(x, weight, bias), group_name)
        return plain_stream(product, residual, norm_weight, offset)
    exchange, behind = EXCHANGES.get(group_name), stream_behind(residual, norm_weight, offset)
    stream = torch.empty_like(behind.scaled)  # before the product, whose memory it must not take while that runs
    if product_sends(exchange, stream):
        flat, bias = as_rows(x), bias if bias is None else bias.contiguous()
        launch(flat, weight, bias, None, how.parts, how.tile(len(flat)), exchange=exchange)
        part = None
    else:
        part = run(x, weight, bias, how, dtype=torch.float32).view(stream.shape)
        part = all_reduce(part, group_name) if exchange is None else part
    all_reduce_add(exchange, part, stream, behind, squared_columns(len(weight)))
    return stream.view(residual.shape), behind.scaled.view(residual.shape), behind.squares


def product_sends(exchange: Exchange | None, stream: Tensor) -> bool:
    """Whether the product itself sends its numbers to the ranks, because all of them fit into their memory at once."""
    return exchange is not None and stream.numel() <= exchange.words


@small_m_all_reduce_add.register_fake
def _(x, weight, bias, residual, norm_weight, offset, group_name):
    behind = stream_behind(residual, norm_weight, offset)
    return x.new_empty(residual.shape), behind.scaled.view(residual.shape), behind.squares
