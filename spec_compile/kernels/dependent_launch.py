"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it where it must.

Kernels that let the next one begin early keep two rules. At least one program waits before it ends, and so do all that
read or write what other kernels write: then a kernel that is done means that all before it are. Before its wait a
program writes nothing, and reads only what no kernel of this kind writes: weights, lengths, positions. (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".)
`all_reduce_kernel` says why it need not keep the second rule behind a product.
"""

import functools

import torch
from torch import Tensor


def available(x: Tensor) -> bool:
    """Whether kernels on x's device can be launched so: on Hopper and later."""
    return x.is_cuda and _capable(x.device)


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
