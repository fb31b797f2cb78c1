"""Form "avx512": products of 2 to 16 rows of float32 on a CPU with AVX-512 (the kernel is C++, in avx512.cpp)."""

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import extensions

try:
    _avx512 = extensions.load("kernels.linear._avx512")
except extensions.OtherSourcesError as error:
    warnings.warn(f"products of float32 are slower: {error}", stacklevel=2)
    _avx512 = None
except ImportError:  # the package was not built
    _avx512 = None

MAX_ROWS = 16
"""BLAS uses the caches better with more rows, and reads the weights as fast as they come with one."""
LANES = 16
"""Floats of a vector, of which every row has a multiple."""
SUPPORTED = _avx512 is not None and _avx512.supported()


def avx512_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] -> [..., O], by the kernel where it is the faster."""
    rows, inputs = x.numel() // x.shape[-1], weight.shape[1]
    if not 1 < rows <= MAX_ROWS or inputs % LANES or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    out = torch.ops.spec_compile.avx512_product(x.reshape(rows, inputs), weight)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _avx512_product(x: Tensor, weight: Tensor) -> Tensor:
    x, out = x.contiguous(), x.new_empty(x.shape[0], weight.shape[0])
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _avx512.linear(*addresses, x.shape[0], x.shape[1], weight.shape[0], torch.get_num_threads())
    return out


# `torch.library.custom_op` would add 15 microseconds to each of the hundred products of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_LIBRARY.define("avx512_product(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("avx512_product", _avx512_product, "CPU")


@torch.library.register_fake("spec_compile::avx512_product")
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])
