"""Sums and rows that the ranks of tensor parallelism exchange: what the ops mean, by torch.distributed.

A faster way for one group, such as a kernel over symmetric memory, is an entry in `REDUCERS` under the group's name.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..compat import gather_flat

REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {}
"""What answers `all_reduce`, by the group's name: a function of the rank's partial sum, which it does not change."""


@torch.library.custom_op("spec_compile::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of all ranks' x, of any shape, in x's dtype.

    The partial sums are added in float32 (float64 stays as it is) in the order of the ranks and rounded once, so that
    all ranks have the same bits. group_name: of a process group of torch.distributed.
    """
    if group_name in REDUCERS:
        return REDUCERS[group_name](x)
    return sum_of_parts(x, group_name)


@all_reduce.register_fake
def _(x, group_name):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sum_of_parts(x: Tensor, group_name: str) -> Tensor:
    """`all_reduce` by torch.distributed."""
    parts = gather_parts(x, group_name)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


@torch.library.custom_op("spec_compile::all_gather", mutates_args=())
def all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """The last dimensions of all ranks' x [..., C] side by side, in the order of the ranks: [..., size * C].

    size: ranks of the group.
    """
    return torch.cat(gather_parts(x, group_name).unbind(), dim=-1)


@all_gather.register_fake
def _(x, size, group_name):
    return x.new_empty(*x.shape[:-1], size * x.shape[-1])


def gather_parts(x: Tensor, group_name: str) -> Tensor:
    """All ranks' x, [ranks, *x.shape]."""
    group = _resolve_process_group(group_name)
    parts = x.new_empty(group.size() * x.numel())
    gather_flat(parts, x.reshape(-1), group=group)
    return parts.view(group.size(), *x.shape)
