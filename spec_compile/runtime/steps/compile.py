"""Compiling the parts of a step, each as an entry of its own in Dynamo's cache, for sizes that may vary.

Guards are dropped: everything a part reads beside its arguments lies in buffers of fixed shape that the part's owner
never replaces.
"""

from collections.abc import Callable, Iterable
from types import FunctionType

import torch

from ...compat import CPU_OPTIONS, GPU_OPTIONS, tensors_in

PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)


def example_size(static: Iterable[int], at_most: int | None = None) -> int:
    """A size to call parts with for the first time: a prime that divides no size that stays as it is, so that every
    dimension which it divides is known to vary. RuntimeError if there is none."""
    static = set(static)
    for prime in PRIMES:
        if (at_most is None or prime <= at_most) and not any(size and size % prime == 0 for size in static):
            return prime
    raise RuntimeError(f"no size to compile with: {sorted(static)} have every prime as a factor; pass compile=False")


def compile_function(function: Callable, name: str, device: str) -> Callable:
    """`function` as one graph by Inductor, under a name of its own. Integer arguments of 2 or more may vary."""
    method, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
    code = method.__code__.replace(co_name=name)
    copy = FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__)
    return torch.compile(
        copy if owner is None else copy.__get__(owner),
        fullgraph=True,
        dynamic=True,
        options={
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            **(CPU_OPTIONS if device == "cpu" else GPU_OPTIONS),
        },
    )


class PartCompiler:
    """Compiles the parts of steps, each in its first call.

    tag: ends the name of each part. varying: sizes by `example_size`; a dimension of the first call that one of them
    divides may differ in later calls, all others stay. nodes, slots: how many nodes and slots of the cache the first
    call has. exact: whether later calls have as many nodes; else they may have any number above one.
    """

    def __init__(
        self, device: torch.device, tag: str, varying: tuple[int, ...], nodes: int, slots: int, exact: bool
    ):  # fmt: skip
        self.device, self.tag, self.varying = device, tag, varying
        self.nodes, self.slots, self.exact = nodes, slots, exact

    def __call__(self, function: Callable, name: str) -> Callable:
        """`function` of tensors, lists of them and integers, compiled in its first call."""
        compiled = compile_function(function, f"{name}_{self.tag}", self.device.type)
        is_first = True

        def part(*arguments):
            nonlocal is_first
            if is_first:
                self._mark(arguments)
                is_first = False
            return compiled(*arguments)

        return part

    def _mark(self, arguments: tuple) -> None:
        """Tell Dynamo which dimensions may vary."""
        for tensor in tensors_in(arguments):
            for dim, size in enumerate(tensor.shape):
                if size and any(size % prime == 0 for prime in self.varying):
                    torch._dynamo.mark_dynamic(tensor, dim)
                else:
                    torch._dynamo.mark_static(tensor, dim)
