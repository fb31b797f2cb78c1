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

from ..card import launches_early
from ..launching import on_gpu, op_with_kernel
from ..ops import as_rows

AMONG = ("all", "all, to a sum of 1", "chosen")


def _empty_choice(logits: Tensor, top: int, among: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top  # len() would make the number of rows a constant
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@op_with_kernel("route", _empty_choice)
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


@on_gpu(route)
def launch(logits, top, among, dtype) -> tuple[Tensor, Tensor]:
    """`route` by the kernel."""
    logits, early = as_rows(logits), launches_early(logits.device)
    weights, ids = _empty_choice(logits, top, among, dtype)
    if len(logits):
        route_kernel[(len(logits),)](
            logits, weights, ids, logits.stride(0), logits.shape[1], TOP=top, AMONG=AMONG.index(among),
            BLOCK_E=triton.next_power_of_2(logits.shape[1]), BLOCK_T=triton.next_power_of_2(top), EARLY=early,
            launch_pdl=early, num_warps=1,
        )  # fmt: skip
    return weights, ids


@triton.jit
def route_kernel(
    logits_ptr,  # [rows, experts] by its stride
    weights_ptr, ids_ptr,  # [rows, TOP], written
    stride, experts, TOP: tl.constexpr, AMONG: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`route` of one row a program. AMONG: an index of the tuple `AMONG`. Grid (rows)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    expert, rank = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    value = tl.load(logits_ptr + row * stride + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    if AMONG < 2:
        value = tl.exp(value - tl.max(value, 0))
        value = tl.where(expert < experts, value / tl.sum(value, 0), -1.0)

    # Take the largest that is left, TOP times. Values become integers of the same order, because a warp finds the
    # largest integer in one instruction; adding 0.0 makes 0.0 and -0.0 equal.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.zeros([BLOCK_T], tl.int32)
    ids = tl.zeros([BLOCK_T], tl.int32)
    for each in tl.static_range(TOP):
        largest = tl.max(key, 0)
        first = tl.min(tl.where(key == largest, expert, BLOCK_E), 0)
        keys = tl.where(rank == each, largest, keys)
        ids = tl.where(rank == each, first, ids)
        key = tl.where(expert == first, -0x80000000, key)
    chosen = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    chosen = tl.where(rank < TOP, chosen, -float("inf"))

    # The weights.
    if AMONG == 2:
        chosen = tl.exp(chosen - tl.max(chosen, 0))
    if AMONG > 0:
        chosen = chosen / tl.sum(tl.where(rank < TOP, chosen, 0.0), 0)
    at, mask = row * TOP + rank, rank < TOP
    tl.store(weights_ptr + at, chosen.to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=mask)
