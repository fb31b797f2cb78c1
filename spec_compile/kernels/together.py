"""Triton kernels compiled side by side: all that a function launches, before it runs.

A kernel takes 0.3 to 1 second, of which four fifths run without Python's lock, and a round has ten to twenty.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from ..compat import COMPILE_LOCK

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
    with COMPILE_LOCK, torch.no_grad(), ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        # A kernel that does not compile raises its error when it is launched.
        with triton.AsyncCompileMode(pool, ignore_errors=True), _no_launches():
            for function in functions:
                function()


@contextmanager
def _no_launches() -> Iterator[None]:
    """A context in which launches of this thread only compile, and new memory is zero."""
    from triton.runtime.jit import JITFunction

    run, own = JITFunction.run, threading.get_ident()

    def compile_only(self, *args, warmup, **options):
        return run(self, *args, warmup=warmup or threading.get_ident() == own, **options)

    def zeros(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args, **options):
            new = empty(*args, **options)
            return new.zero_() if threading.get_ident() == own else new

        return make

    with ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", compile_only))
        for place, name in EMPTY:
            patches.enter_context(patch.object(place, name, zeros(getattr(place, name))))
        yield
