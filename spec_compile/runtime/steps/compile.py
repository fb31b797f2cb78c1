"""Compiling the parts of a step, each as an entry of its own in Dynamo's cache, for sizes that may vary.

Guards are dropped: everything a part reads besides its arguments lies in buffers of fixed shape that the part's owner
never replaces.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType

import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from ...compat import COMPILE_LOCK, CPU_OPTIONS, GPU_OPTIONS, forget_code, forget_shapes, inductor, tensors_in

PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
"""Numbers of nodes and of visible slots to compile with."""
SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
"""Numbers of rows and of pages of the cache to compile with, which take memory."""


def example_size(static: Iterable[int], at_most: int | None = None, primes: tuple[int, ...] = PRIMES) -> int:
    """A size for the first call of parts: the first prime that divides no `static` size, so that every dimension which
    it divides varies. static = [74, 128] gives 41, since 37 divides 74. RuntimeError if there is none."""
    static = set(static)
    for prime in primes:
        if (at_most is None or prime <= at_most) and not any(size and size % prime == 0 for size in static):
            return prime
    raise RuntimeError(f"no size to compile with: {sorted(static)} have every prime as a factor; pass compile=False")


def compile_function(function: Callable, name: str, device: str) -> Callable:
    """`function` compiled by Inductor to one graph called `name`; its code is freed with it. Integer arguments of 2 or
    more may vary. A method becomes its function, which takes any owner of the same structure."""
    method = getattr(function, "__func__", function)
    code = method.__code__.replace(co_name=name)
    own = FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__)
    weakref.finalize(own, forget_code, code)
    return torch.compile(
        own,
        fullgraph=True,
        dynamic=True,
        backend=inductor(CPU_OPTIONS if device == "cpu" else GPU_OPTIONS),
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )


class PartCompiler:
    """Compiles the parts of steps, each in its first call.

    tag: ends the name of each part.
    varying: sizes by `example_size`; a dimension that one of them divides in the first call may vary, no other may.
    nodes, slots: numbers of nodes and visible cache slots in the first call.
    exact: True if later calls have as many nodes; otherwise they may have any number above one.
    """

    def __init__(
        self, device: torch.device, tag: str, varying: tuple[int, ...], nodes: int, slots: int, exact: bool
    ):  # fmt: skip
        self.device, self.tag, self.varying = device, tag, varying
        self.nodes, self.slots, self.exact = nodes, slots, exact
        self.is_open = True
        """True if first calls may come. They have the sizes `varying`; any other size would be compiled in."""
        self._parts: dict[tuple[str, str], Callable] = {}

    def __call__(self, function: Callable, name: str, alike: str = "") -> Callable:
        """`function` of tensors, lists of tensors and integers, compiled in its first call. Methods of the same name
        share a compilation, and so do functions with the same `alike`, a text of their computation."""
        if (name, alike) not in self._parts:
            self._parts[name, alike] = self._part(function, f"{name}_{self.tag}")
        part, owner = self._parts[name, alike], getattr(function, "__self__", None)
        return part if owner is None else partial(part, owner)

    def _part(self, function: Callable, name: str) -> Callable:
        compiled = compile_function(function, name, self.device.type)
        is_compiled = False

        def part(*arguments):
            nonlocal is_compiled
            if is_compiled:
                return compiled(*arguments)
            with COMPILE_LOCK:  # another engine may run the same part for the first time in another thread
                if not is_compiled:
                    assert self.is_open, f"{name}: the first call has the sizes of a session"
                    self._mark(arguments)
                with dynamo_config.patch(force_parameter_static_shapes=False):  # says it of buffers, too
                    result = compiled(*arguments)
                is_compiled = True
                forget_shapes()
                return result

        return part

    def _mark(self, arguments: tuple) -> None:
        """Tell Dynamo which dimensions of the arguments, and of modules' tensors among them, may vary."""
        owners = [owner for owner in arguments if isinstance(owner, nn.Module)]
        held = [tensor for owner in owners for tensor in (*owner.parameters(), *owner.buffers())]
        for tensor in [*tensors_in(arguments), *held]:
            for dim, size in enumerate(tensor.shape):
                if size and any(size % prime == 0 for prime in self.varying):
                    torch._dynamo.mark_dynamic(tensor, dim)
                else:
                    torch._dynamo.mark_static(tensor, dim)
