"""`plain_kernels`: operators compute their plain PyTorch meaning on a GPU, too, so that nothing has to be compiled."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_here = threading.local()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """A context of this thread in which norms, products and tree attention run no kernel of ours."""
    before, _here.are_plain = are_plain(), True
    try:
        yield
    finally:
        _here.are_plain = before


def are_plain() -> bool:
    """True inside of `plain_kernels`."""
    return getattr(_here, "are_plain", False)


def on_gpu(op: torch.library.CustomOpDef) -> Callable[[Callable], Callable]:
    """Decorate the function that launches the kernel of `op` on a GPU. Its plain meaning is what it runs on a CPU."""

    def register(launch: Callable) -> Callable:
        @functools.wraps(launch)
        def run(*arguments, **named):
            if are_plain():
                return op._opoverload.redispatch(CPU, *arguments, **named)
            return launch(*arguments, **named)

        op.register_kernel("cuda")(run)
        return launch

    return register
