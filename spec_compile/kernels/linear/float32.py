"""A linear layer in float32 of rows and weights of 16 bits, as routers of experts have it; its sums have one order.

Import this module only where Triton is installed. A program takes 16 rows, whose sums do not mix, and runs over all
inputs, so that other rows do not change a row's bits. Products of two numbers of 16 bits are exact in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..launching import on_gpu, op_with_kernel
from ..ops import as_rows

BLOCK_R, BLOCK_O, BLOCK_K = 16, 16, 128


def _empty_result(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32)


@op_with_kernel("linear_float32", _empty_result)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., C] times weight [O, C], both cast to float32 -> [..., O] float32."""
    return F.linear(x.float(), weight.float())


@on_gpu(linear_float32)
def launch(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_float32` by the kernel."""
    out, x, weight = _empty_result(x, weight), as_rows(x), as_rows(weight)
    if out.numel():
        grid = triton.cdiv(weight.shape[0], BLOCK_O), triton.cdiv(len(x), BLOCK_R)
        linear_kernel[grid](
            x, weight, out, len(x), *weight.shape, x.stride(0), weight.stride(0),
            EXACT=x.dtype == weight.dtype and x.dtype != torch.float32,
            BLOCK_R=BLOCK_R, BLOCK_O=BLOCK_O, BLOCK_K=BLOCK_K, num_warps=2, num_stages=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "stride_x"], do_not_specialize_on_alignment=["x_ptr"])
def linear_kernel(
    x_ptr, weight_ptr, out_ptr, rows, outputs, inputs, stride_x, stride_w, EXACT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs, blocks of rows). EXACT: both are of one dtype of 16 bits."""
    output, row = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_K)
    x_ptr += row.to(tl.int64)[:, None] * stride_x + column[None, :]
    weight_ptr += output.to(tl.int64)[None, :] * stride_w + column[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        inside = column < inputs - begin
        x = tl.load(x_ptr + begin, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptr + begin, mask=(output < outputs)[None, :] & inside[:, None], other=0.0)
        if EXACT:
            total = tl.dot(x, weight, total)
        else:
            total = tl.dot(x.to(tl.float32), weight.to(tl.float32), total, input_precision="ieee")
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out_ptr + at, total, mask=(row < rows)[:, None] & (output < outputs)[None, :])
