"""Specs: what a part knows of its inputs, and inputs without memory that have these properties."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

Spec = list
"""[shape, strides, numbers of the dimensions that vary, dtype, device] of a tensor, or [n], an integer that varies. The
shape is that of an example: of [[5, 8], [8, 1], [0], "int64", "cpu"] any number of rows is an input, and 8 columns."""


def spec_of(value: Tensor | int, varies: Callable[[int], bool]) -> Spec:
    """The spec of an input; `varies` tells if a dimension of this size may have another one."""
    if not isinstance(value, Tensor):
        return [value]
    dims = [dim for dim, size in enumerate(value.shape) if size > 1 and varies(size)]
    dtype = str(value.dtype).removeprefix("torch.")
    return [list(value.shape), list(value.stride()), dims, dtype, str(value.device)]


def fakes(specs: list[Spec]) -> tuple[FakeTensorMode, list[Any]]:
    """Inputs of these specs, whose sizes that vary are symbols: one symbol for all that are equal in the example."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    return mode, [_fake(spec, mode, shapes, f"v{number}") for number, spec in enumerate(specs)]


def _fake(spec: Spec, mode: FakeTensorMode, shapes: ShapeEnv, name: str) -> Any:
    source = ConstantSource(name)
    if len(spec) == 1:
        symbol = shapes.create_symbol(spec[0], source, DimDynamic.DUCK)
        return shapes.create_symintnode(symbol, hint=spec[0], source=source)
    size, stride, dims, dtype, device = spec
    if dims:
        kinds = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(len(size))]
        example = torch.empty_strided(size, stride, dtype=getattr(torch, dtype), device="meta")
        context = StatelessSymbolicContext(kinds)  # type: ignore[var-annotated]
        size, stride, _ = shapes.create_symbolic_sizes_strides_storage_offset(example, source, symbolic_context=context)
    with mode:
        return torch.empty_strided(size, stride, dtype=getattr(torch, dtype), device=device)
