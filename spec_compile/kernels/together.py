"""Triton kernels compiled side by side: all that a function launches, before it runs.

A kernel takes 0.3 to 2 seconds, of which four fifths run without Python's lock, and a round has ten to twenty. The
function that launches it is C code, which Triton compiles in 0.25 seconds more.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..compat import COMPILE_LOCK
from .cpu import processors

MOST_THREADS = 16
EMPTY = (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")
"""Functions whose results hold whatever was in their memory. An index there may lie outside of a tensor."""


def compile_together(*functions: Callable[[], object]) -> None:
    """Compile the kernels that these functions of no arguments launch, in threads, and launch none of them.

    All else that the functions do is done, over zeros in place of the kernels' results, so they must leave no trace and
    may not read a result on the host. Kernels that are compiled already, or lie in Triton's cache, take no time.
    Without a GPU nothing runs.
    """
    if not torch.cuda.is_available():
        return
    import triton

    # One thread at a time: the first to leave `_no_launches` would undo what a second had put there.
    with COMPILE_LOCK, torch.no_grad(), ThreadPoolExecutor(min(MOST_THREADS, processors())) as pool:
        # A kernel that does not compile raises its error when it is launched.
        with triton.AsyncCompileMode(pool, ignore_errors=True), _no_launches() as kernels:
            for function in functions:
                function()
        # A kernel of several devices is compiled for the first that launches it.
        list(pool.map(lambda pair: _load(*pair), {id(pair[0]): pair for pair in kernels[::-1]}.values()))


def ahead(work: Callable[[], object]) -> None:
    """Do `work` in a thread, so that others find it done. Its error is left to whoever does the same again."""

    def run() -> None:
        with suppress(Exception):
            work()

    threading.Thread(target=run, name="spec_compile ahead", daemon=True).start()


def set_up_compiler() -> None:
    """Make Triton's compiler ready, whose first kernel takes a second longer than others."""
    import triton

    @triton.jit
    def nothing():
        pass

    nothing.warmup(grid=(1,))


def _load(kernel: Any, device: int) -> None:
    """Load a kernel, or what a thread compiles into one, and compile the function that launches it."""
    with suppress(Exception):  # raised again when it is launched
        torch.cuda.set_device(device)
        kernel = getattr(kernel, "kernel", None) if hasattr(kernel, "future") else kernel
        if kernel is not None:
            kernel._init_handles()


@contextmanager
def _no_launches() -> Iterator[list]:
    """A context in which launches of this thread only compile, and new memory is zero. Gives the kernels, each with
    its device."""
    from triton.runtime.jit import JITFunction

    # Launches of this thread are compiled, and noted.
    run, own, kernels = JITFunction.run, threading.get_ident(), list[Any]()

    def compile_only(self, *args, warmup, **options):
        if threading.get_ident() != own:
            return run(self, *args, warmup=warmup, **options)
        kernel = run(self, *args, warmup=True, **options)
        kernels.append((kernel, torch.cuda.current_device()))
        return kernel

    # Its new memory is zero, because no kernel fills it.
    def zeros(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args, **options):
            new = empty(*args, **options)
            return new.zero_() if threading.get_ident() == own else new

        return make

    with ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", compile_only))
        for place, name in EMPTY:
            patches.enter_context(patch.object(place, name, zeros(getattr(place, name))))
        yield kernels
