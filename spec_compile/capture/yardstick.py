"""The yardstick of logits: how far they may be apart, for the checks after capture and for `audit`.

A difference is measured over the vocabulary. In float32 it is compared with the spread of the logits, where rounding is
a millionth. In 16 bits both sides are compared with a float32 result. The distance of the model's own forward to it is
the model's noise, and another distance may be a few times as large.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from .. import quantised
from ..errors import UnsupportedModelError, log
from ..graph import ModelGraph
from ..kernels import HALF
from ..kernels.launching import plain_kernels
from ..kernels.linear import PRODUCT, PRODUCTS
from .recurrences import unrounded_decays

# Limits of the checks.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest accepted difference of any logit between runs in this dtype, relative to the logits' spread."""
NOISE = 3.0  # guard: noise
"""Largest accepted distance of 16-bit logits to the float32 result, as a multiple of a plain forward's; both at
the position where they are largest."""
FORBIDDEN = -3e4
"""Smaller logits forbid a token. Models write the least number of a dtype, -65504 in float16, or minus infinity."""
LEAST_NOISE = 1e-5
"""Share of the logits' spread that is always accepted as such a distance, because a model may have some weights of 16
bits and compute in float32."""

# Limits of the audit.
NEAR_TIE = 3.0
"""Two logits are a near-tie if they differ by at most this many standard deviations of the noise. If nothing but
rounding separates the models, one first difference in a thousand is larger."""
MORE_NOISE = 0.03
"""Share by which the speculative logits may be farther from the float32 copy than the target's are."""
DEVIATIONS = 3.0
"""Standard errors by which that share must be exceeded before the logits fail the audit."""
LEAST_SPREAD = 0.1
"""Least standard deviation of that share over positions, because a few positions may agree by chance."""
FLOOR = {torch.float32: 3.3e-6, torch.float64: 1e-12}
"""Least noise in a dtype, as a share of the largest logit, because libraries differ in sums and in exp."""


class DistantLogits(UnsupportedModelError):
    """Logits of 16 bits are too far from float32 on one text. On another they may be near: where the model's attention
    is nearly undecided, any rounding decides it."""


def rms(values: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return values.square().mean(dim=-1).sqrt()


def _distance(got: Tensor, expected: Tensor) -> Tensor:
    """The difference of logits, 0 where both forbid a token. E.g. Chameleon forbids the tokens of pictures."""
    return (got - expected).masked_fill((got < FORBIDDEN) & (expected < FORBIDDEN), 0)


def _spread(logits: Tensor) -> Tensor:
    """The standard deviation of logits, without those that forbid a token and would hide any difference."""
    return logits[logits >= FORBIDDEN].std()  # guard: forbidden-tokens


def compare_logits(name: str, part: str, got: Tensor, expected: Tensor) -> None:
    """UnsupportedModelError if logits [..., V] in float32 or float64 differ by more than `TOLERANCE`.

    name: the model's class, for the message.
    part: the part of the system that computed `got`, for the message.
    """
    error = (_distance(got, expected).abs().max() / _spread(expected).clamp(min=1e-6)).item()
    limit = TOLERANCE[expected.dtype]
    if not error <= limit:  # guard: checks-refuse
        raise UnsupportedModelError(
            f"model: {name}: {part} differs from the model's own forward by {error:.1e} of the logits' spread "
            f"(allowed: {limit:.0e}); it would change the answer"
        )


def compare_rounding(name: str, part: str, got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """DistantLogits if `got` is more than `NOISE` times as far from `exact` as `plain` is.

    name, part: as for `compare_logits`.
    got, plain: [..., V] in 16 bits; logits of the part that is checked and of a plain forward.
    exact: [..., V] float32; the result without rounding to 16 bits.
    """
    error, noise = (rms(_distance(x.float(), exact)).max().item() for x in (got, plain))
    if not error <= max(NOISE * noise, LEAST_NOISE * _spread(exact).item()):
        raise DistantLogits(
            f"model: {name}: {part} differs from the model's own forward: its logits are {error:.1e} away from those "
            f"in float32, a plain forward's {noise:.1e} (allowed: {NOISE:g} times that); it would change the answer"
        )


def has_half(graph: ModelGraph) -> bool:
    """True if any weights have 16 bits."""
    return any(parameter.dtype in HALF for parameter in graph.gm.parameters())


def exact_logits(name: str, run: Callable[[], Tensor]) -> Tensor:
    """Logits of the captured graph in float32; UnsupportedModelError if an op has no float32 form."""
    logits, reason = _in_float32(run)
    if logits is None:
        raise UnsupportedModelError(
            f"model: {name} cannot be checked, because its graph does not run in float32 ({reason}); check=False "
            "omits the check"
        )
    return logits


def in_float32_if_possible(part: str, run: Callable[[], Tensor], own: nn.Module | None = None) -> Tensor | None:
    """Logits in float32; or None, with a line in the log, if an op has no float32 form.

    own: the module whose own forward computes them, with `unrounded_decays`.
    """
    with nullcontext() if own is None else unrounded_decays(own):
        logits, reason = _in_float32(run)
    if logits is None:
        log.info("%s is checked in 16 bits alone, because it does not run in float32 (%s)", part, reason)
    return logits


def _in_float32(run: Callable[[], Tensor]) -> tuple[Tensor | None, str]:
    """The result of `run` in float32, or None and the reason."""
    try:
        with in_float32():
            return run(), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


# Float32 for models of 16 bits without a copy of their weights.


aten = torch.ops.aten
SELECTIONS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
"""Ops that select elements. Only their result is converted, because their tables may be large."""
MATMULS = {aten.mm.default, aten.addmm.default}
COLUMNS = 1 << 12
"""Outputs of a matrix product whose weights are converted together, because an output head may be large."""


@contextmanager
def in_float32(by_kernels: bool = False) -> Iterator[None]:
    """A context in which PyTorch computes in float32 what it would compute in 16 bits.

    Every op gets its operands of 16 bits as float32, and a cast to 16 bits stays in float32. Quantised layers do not
    round activations, and their weights mean what their format says. Nothing is rounded to TF32 or compiled. An op
    without a float32 form raises its own error, and one that would write to a tensor of 16 bits raises RuntimeError.

    by_kernels: norms, products and tree attention run their kernels. Otherwise they have their plain meaning, because
        for a model of 16 bits kernels for float32 would be compiled only for this.
    """
    unrounded, kernels = quantised.unrounded_activations(), nullcontext() if by_kernels else plain_kernels()
    with full_precision(), torch.compiler.set_stance("force_eager"), unrounded, kernels, _Float32():
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """A context in which matrix products of float32 are not rounded to TF32 or bfloat16, even if the user allows it."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch has two switches, and the user has set only the new one
        legacy = None
    try:
        _set_precision(legacy and "highest", ["ieee"] * len(backends))
        yield
    finally:
        _set_precision(legacy, before)


def _set_precision(legacy: str | None, precisions: list[str]) -> None:
    if legacy is not None:  # sets the new switches, too
        torch.set_float32_matmul_precision(legacy)
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = precisions


class _Float32(TorchDispatchMode):
    """Converts the operands of every op from 16 bits to float32."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # FlexAttention, which has no schema
            return func(*map(_widened, args), **kwargs)
        is_view, written = _aliasing(func)
        if is_view:  # converted by the op that uses it
            return func(*args, **kwargs)
        if func in SELECTIONS:
            return _widened(func(*args, **kwargs))
        if func in MATMULS and not kwargs:
            *bias, x, weight = args
            bias = bias[0].expand(len(x), weight.shape[1]) if bias else None
            return _by_outputs(lambda w, b: func(*([] if b is None else [b]), _widened(x), w), weight, bias, 1)
        for index in written:
            if index < len(args) and isinstance(args[index], torch.Tensor) and args[index].dtype in HALF:
                raise RuntimeError(f"{func} writes to a tensor of 16 bits, which has no float32 form")
        if func in PRODUCTS:  # scales of 16 bits stay, because weights are rounded to their dtype
            values = {**dict(zip(_names(func), args)), **kwargs}
            is_head = func is PRODUCT and not values.get("gated")  # an output head may be one
            keep = ("parts", "scales", "weight", "bias") if is_head else ("parts", "scales")
            values = {name: x if name in keep else _widened(x) for name, x in values.items()}
            if not is_head:
                return func(**values)
            weight, bias = values["weight"], values.get("bias")
            return _by_outputs(lambda w, b: func(**{**values, "weight": w, "bias": b}), weight, bias, 0)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _by_outputs(multiply: Callable, weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> torch.Tensor:
    """``multiply(weight, bias)`` for `COLUMNS` outputs at a time.

    dim: the dimension of the weight that counts outputs. The bias counts them in its last dimension.
    """
    if weight.dtype not in HALF or weight.shape[dim] <= COLUMNS:
        return multiply(_widened(weight), _widened(bias))
    out, begin = None, 0
    for part in weight.split(COLUMNS, dim):
        end = begin + part.shape[dim]
        product = multiply(_widened(part), None if bias is None else _widened(bias[..., begin:end]))
        out = product.new_empty(*product.shape[:-1], weight.shape[dim]) if out is None else out
        out[..., begin:end] = product
        begin = end
    return out


def _names(func) -> list[str]:
    """The names of an op's arguments."""
    return [argument.name for argument in func._schema.arguments]


@functools.cache
def _aliasing(func) -> tuple[bool, list[int]]:
    """True if an op returns a view of an operand; and the indices of the operands that it writes to."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    written = [index for index, alias in enumerate(aliases) if alias is not None and alias.is_write]
    return any(alias is not None for alias in aliases) and not written, written


def _widened(value):
    """Tensors of 16 bits as float32 and dtypes of 16 bits as float32, in lists and tuples too; others unchanged."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_widened, value))
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value
