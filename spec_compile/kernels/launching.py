"""Means that all launches of kernels share: ops with kernels, plain runs, counters, tables of addresses.

Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it when it must (CUDA
C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). `card.launches_early` tells where this is
possible. Kernels that let the next one begin early keep two rules:

1. At least one program waits before it ends, and so does every program that reads or writes memory which other kernels
   write. So when a kernel is done, all kernels before it are done.
2. Before its wait a program writes nothing, and reads only memory that no such kernel writes: weights, lengths,
   positions. `all_reduce_kernel` explains why it may break this rule after a product.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
"""Ops that a round on a CPU calls often. `torch.library.custom_op` would add 10 to 40 microseconds to each call."""
CPU_KERNELS: dict[str, Callable] = {}  # by the name of a `one_launch`
_here = threading.local()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """A context of this thread in which norms, products and tree attention run no kernel of ours.

    They compute their plain PyTorch meaning on a GPU, too, so that nothing has to be compiled.
    """
    before, _here.are_plain = are_plain(), True
    try:
        yield
    finally:
        _here.are_plain = before


def are_plain() -> bool:
    """True inside of `plain_kernels`."""
    return getattr(_here, "are_plain", False)


def new_op(name: str, fake: Callable, writes: tuple[str, ...] = (), devices: str | None = None) -> Callable:
    """Decorate a function: it becomes the op `name`, for devices of one type, or for all.

    fake: gives results of the right shapes for the op's arguments. writes: names of the arguments that it writes to.
    """

    def define(function: Callable) -> torch.library.CustomOpDef:
        op = torch.library.custom_op(f"spec_compile::{name}", mutates_args=writes, device_types=devices)(function)
        op.register_fake(fake)
        return op

    return define


def op_with_kernel(name: str, fake: Callable, writes: tuple[str, ...] = ()) -> Callable:
    """`new_op` of a function in plain PyTorch, which the op runs on a CPU; `on_gpu` adds the kernel."""
    return new_op(name, fake, writes, "cpu")


def on_gpu(op: torch.library.CustomOpDef) -> Callable[[Callable], Callable]:
    """Decorate the function that launches the kernel of `op` on a GPU. Its plain meaning is what it runs on a CPU."""

    def register(launch: Callable) -> Callable:
        @functools.wraps(launch)
        def run(*arguments, **named):
            if are_plain():
                return op._opoverload.redispatch(CPU, *arguments, **named)
            first = next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor))
            with torch.cuda.device_of(first):  # a model may be on several
                return launch(*arguments, **named)

        op.register_kernel("cuda")(run)
        return launch

    return register


def expect(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """TypeError or ValueError unless the argument `name` of an op has this dtype and shape."""
    if x.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected the shape {list(shape)}, got {list(x.shape)}")


def one_launch(name: str, fake: Callable, kernel: str, writes: tuple[str, ...] = (), **constants: Any) -> Callable:
    """Decorate a function in plain PyTorch, whose first argument tells where the others are.

    On a GPU it becomes the op `name`, which gives its arguments and `constants` to the function `kernel` of
    `kernels.trees`. On a CPU it is the op in `CPU_KERNELS`, or stays as it is, so that a compiler can fuse it.
    """

    def define(function: Callable) -> Callable:
        @on_gpu(op := op_with_kernel(name, fake, writes)(function))
        def launch(*arguments):
            from . import trees  # needs Triton

            return getattr(trees, kernel)(*arguments, **constants)

        @functools.wraps(function)
        def run(first, *more):
            return (op if first.is_cuda else CPU_KERNELS.get(name, function))(first, *more)

        return run

    return define


# Counters in device memory tell a program if it is the last of its launch to arrive. They are zero between launches.

COUNTERS = 1 << 20
_counters: dict[torch.device, Tensor] = {}
_next: dict[torch.device, int] = {}


def prepare(device: torch.device) -> None:
    """Allocate the counters of a device. Otherwise the first launch does, and during a capture every launch."""
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _next[device] = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def zero_counters(device: torch.device, count: int) -> Tensor:
    """Counters [>= count] int32 of value 0, which a launch must leave at 0; concurrent launches get other ones."""
    count = -(-count // 32) * 32  # aligned, so that every launch has the same specialisation
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        prepare(device)
    begin = _next[device] if _next[device] + count <= COUNTERS else 0
    _next[device] = begin + count
    return _counters[device][begin : begin + count]


_tables: dict[tuple, Tensor] = {}
"""Tables of addresses on their devices. They are kept because captured graphs read them."""


def address_table(op: str, device: torch.device, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """Addresses and sizes of the tensors that one launch of `op` reads, as int64 [rows, columns] on a device."""
    key = device, *rows
    if key not in _tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"spec_compile::{op} must run once with these tensors before a graph is captured")
        _tables[key] = torch.tensor(rows, dtype=torch.int64, device=device)
    return _tables[key]
