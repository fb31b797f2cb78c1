"""Low-rank additions of rows' own adapters on a GPU, in one launch for a layer.

    out[t] = y[t] + scale[i] * up[i] (down[i] x[t])        i = rows[t // N]

Import this module only where Triton is installed. A program has one token and a part of the outputs, and computes the
inner vector of `rank` numbers by itself; reading `down` again, from the L2 cache, takes less time than another launch.
The sums of a token depend on no other token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import on_gpu, op_with_kernel
from .low_rank import add_low_rank

MOST_TOKENS = 16
"""Tokens of a launch. More are batched products of a library, which read `down` once for all outputs."""
OUTPUTS = 64
"""Outputs of a program, for any number of tokens, because the order of its sums depends on it."""
PRODUCTS = 4096
"""Products of `down` and x that a program holds, for all of the rank together."""


@on_gpu(op_with_kernel("add_low_rank", lambda y, *_: y.new_empty(y.shape))(add_low_rank))
def launch(y, x, down, up, scale, rows) -> Tensor:
    """`add_low_rank` by the kernel, or by a library for many tokens and in float64."""
    batch, tokens, outputs = y.shape
    if not 0 < batch * tokens <= MOST_TOKENS or torch.float64 in (y.dtype, down.dtype):
        return add_low_rank(y, x, down, up, scale, rows)
    out, y, x = y.new_empty(y.shape), y.reshape(-1, outputs), x.reshape(batch * tokens, -1)
    rank, inputs = down.shape[1:]
    block = triton.next_power_of_2(rank)
    low_rank_kernel[(batch * tokens, triton.cdiv(outputs, OUTPUTS))](
        y, x, down, up, scale, rows, out, y.stride(0), x.stride(0), tokens, inputs, outputs, rank,
        RANK=block, INPUTS=max(PRODUCTS // block, 16), OUTPUTS=OUTPUTS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride_y", "stride_x", "tokens", "rank"])
def low_rank_kernel(
    y,  # [batch * tokens, outputs] by its stride
    x,  # [batch * tokens, inputs] by its stride
    down,  # [entries, rank, inputs]
    up,  # [entries, outputs, rank]
    scale,  # [entries]
    rows,  # [batch] int64
    out,  # [batch * tokens, outputs], written
    stride_y, stride_x, tokens, inputs, outputs, rank,
    RANK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One token and OUTPUTS outputs a program. Grid (batch * tokens, outputs / OUTPUTS)."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + token // tokens)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.arange(0, RANK)
    base = tl.load(y + token * stride_y + column, mask=column < outputs, other=0.0)

    # The inner vector: products of all inputs, summed at the end.
    products = tl.zeros((RANK, INPUTS), tl.float32)
    down += entry * rank * inputs
    for begin in range(0, inputs, INPUTS):
        at = begin + tl.arange(0, INPUTS)
        value = tl.load(x + token * stride_x + at, mask=at < inputs, other=0.0).to(down.dtype.element_ty)
        is_there = (line[:, None] < rank) & (at[None, :] < inputs)
        weight = tl.load(down + line[:, None] * inputs + at[None, :], mask=is_there, other=0.0)
        products += weight.to(tl.float32) * value.to(tl.float32)[None, :]
    inner = tl.sum(products, axis=1).to(down.dtype.element_ty).to(tl.float32)

    # Its product with `up`, rounded where a library's products round.
    is_there = (column[:, None] < outputs) & (line[None, :] < rank)
    weight = tl.load(up + entry * outputs * rank + column[:, None] * rank + line[None, :], mask=is_there, other=0.0)
    added = tl.sum(weight.to(tl.float32) * inner[None, :], axis=1).to(up.dtype.element_ty).to(tl.float32)
    added = (added * tl.load(scale + entry).to(tl.float32)).to(up.dtype.element_ty)
    result = base.to(tl.float32) + added.to(base.dtype).to(tl.float32)
    tl.store(out + token * outputs + column, result.to(base.dtype), mask=column < outputs)
