"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it when it must.

Kernels that let the next one begin early keep two rules:

1. At least one program waits before it ends, and so does every program that reads or writes memory which other kernels
   write. So when a kernel is done, all kernels before it are done.
2. Before its wait a program writes nothing, and reads only memory that no such kernel writes: weights, lengths,
   positions. `all_reduce_kernel` explains why it may break this rule after a product.

Reference: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from torch import Tensor

from .card import launches_early


def available(x: Tensor) -> bool:
    """True if kernels on x's device can be launched early: on Hopper and later, by a driver that knows it."""
    return x.is_cuda and launches_early(x.device)
