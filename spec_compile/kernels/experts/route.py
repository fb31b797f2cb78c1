"""The choice of experts by a softmax of the router's logits, in one small kernel.

    value = logits, or softmax(logits)
    ids = the TOP largest values, ties to the lower id
    weights = value[ids], or value[ids] / sum(value[ids]), or softmax(logits[ids])

Import this module only where Triton is installed. A program takes a row, so a row's weights have the same bits whatever
other rows there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import dependent_launch
from ..linear.choice_kernel import choose
from ..linear.product import AMONG
from ..ops import as_rows
from ..plain import on_gpu


@torch.library.custom_op("spec_compile::route", mutates_args=(), device_types="cpu")
def route(logits: Tensor, top: int, among: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The `top` experts of each row of logits [T, E], the largest first -> weights [T, top] of `dtype`, ids int64.

    The weights are a softmax in float32. among: "all": over all experts; "all, to a sum of 1": the same, divided by
    the sum of the `top`; "chosen": over the `top` only.
    """
    wide = logits.float()
    values, ids = (wide if among == "chosen" else wide.softmax(dim=-1)).topk(top)
    if among == "chosen":
        values = values.softmax(dim=-1)
    elif among != "all":
        values = values / values.sum(dim=-1, keepdim=True)
    return values.to(dtype), ids.contiguous()


@route.register_fake
def _(logits, top, among, dtype):
    shape = logits.shape[0], top  # len() would make the number of rows a constant
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@on_gpu(route)
def launch(logits, top, among, dtype) -> tuple[Tensor, Tensor]:
    """`route` by the kernel."""
    logits, early = as_rows(logits), dependent_launch.available(logits)
    weights = logits.new_empty(len(logits), top, dtype=dtype)
    ids = torch.empty_like(weights, dtype=torch.int64)
    if len(logits):
        route_kernel[(len(logits),)](
            logits, weights, ids, len(logits), logits.stride(0), logits.shape[1], TOP=top, AMONG=AMONG.index(among),
            BLOCK_E=triton.next_power_of_2(logits.shape[1]), EARLY=early, num_warps=1,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return weights, ids


@triton.jit
def route_kernel(
    logits_ptr, weights_ptr, ids_ptr, rows, stride, experts, TOP: tl.constexpr, AMONG: tl.constexpr,
    BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`choose` of one row a program. Grid (rows)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) + tl.arange(0, 1)
    choose(logits_ptr, weights_ptr, ids_ptr, row, rows, stride, experts, TOP, AMONG, 1, BLOCK_E)
