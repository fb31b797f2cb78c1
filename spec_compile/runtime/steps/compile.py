"""Compiling the parts of a step, each as an entry of its own in Dynamo's cache, for sizes that may vary.

Guards are dropped: everything a part reads beside its arguments lies in buffers of fixed shape that the part's owner
never replaces.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType

import torch
from torch import nn
from torch._dynamo import config as dynamo_config

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
    """`function` as one graph by Inductor, under a name of its own; of a method its function, which takes any owner of
    the same structure. Integer arguments of 2 or more may vary."""
    method = getattr(function, "__func__", function)
    code = method.__code__.replace(co_name=name)
    return torch.compile(
        FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__),
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
    call has. exact: whether later calls have as many nodes; else they may have any number above one. rows: sequences of
    the first call, one of `varying`, if later calls may have any number of them above one; else 0.
    """

    def __init__(
        self, device: torch.device, tag: str, varying: tuple[int, ...], nodes: int, slots: int, exact: bool,
        rows: int = 0,
    ):  # fmt: skip
        self.device, self.tag, self.varying = device, tag, varying
        self.nodes, self.slots, self.exact, self.rows = nodes, slots, exact, rows
        self._parts: dict[str, Callable] = {}

    def __call__(self, function: Callable, name: str) -> Callable:
        """`function` of tensors, lists of them and integers, compiled in its first call. Methods of the same name share
        what is compiled."""
        if name not in self._parts:
            self._parts[name] = self._part(function, f"{name}_{self.tag}")
        owner = getattr(function, "__self__", None)
        return self._parts[name] if owner is None else partial(self._parts[name], owner)

    def _part(self, function: Callable, name: str) -> Callable:
        compiled = compile_function(function, name, self.device.type)
        is_first = True

        def part(*arguments):
            nonlocal is_first
            if not is_first:
                return compiled(*arguments)
            self._mark(arguments)
            is_first = False
            with dynamo_config.patch(force_parameter_static_shapes=not self.rows):  # says it of buffers, too
                return compiled(*arguments)

        return part

    def _mark(self, arguments: tuple) -> None:
        """Tell Dynamo which dimensions may vary."""
        tensors = [*tensors_in(arguments)]
        if self.rows:  # those of buffers vary, too
            owners = [owner for owner in arguments if isinstance(owner, nn.Module)]
            tensors += [part for owner in owners for part in (*owner.parameters(), *owner.buffers())]
            sizes = [size for tensor in tensors for size in tensor.shape if size]
            assert any(size % self.rows == 0 for size in sizes), "the first call has other rows"
        for tensor in tensors:
            for dim, size in enumerate(tensor.shape):
                if size and any(size % prime == 0 for prime in self.varying):
                    torch._dynamo.mark_dynamic(tensor, dim)
                else:
                    torch._dynamo.mark_static(tensor, dim)
