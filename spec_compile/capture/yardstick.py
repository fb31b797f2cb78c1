"""The yardstick of logits: how far they may be apart, for the checks after capture and for `audit`.

A difference is measured over the vocabulary. In float32 it is compared with the spread of the logits, where rounding is
a millionth. In 16 bits both sides are compared with a float32 result: a distance to it may be a few times that of the
model's own forward, which is the model's noise.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..graph import ModelGraph
from ..kernels import HALF
from .float32 import in_float32
from .modules.recurrent import unrounded_decays

log = logging.getLogger("spec_compile")

# Limits of the checks.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest accepted difference of any logit between runs in this dtype, relative to the logits' spread."""
NOISE = 3.0  # guard: noise
"""Largest accepted distance of 16-bit logits to the float32 result, as a multiple of that of a plain forward; both at
the position where they are largest."""
LEAST_NOISE = 1e-5
"""Share of the logits' spread that is always accepted as such a distance, because a model may have some weights of 16
bits and compute in float32."""

# Limits of the audit.
NEAR_TIE = 3.0
"""Two logits are a near-tie if they differ by at most so many standard deviations of the noise. If nothing but rounding
separates the models, one first difference in a thousand is larger."""
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


def first_unequal(ours: Sequence, theirs: Sequence) -> int | None:
    """The first position at which two answers have other tokens; None if one is the other or its beginning."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)


def compare_logits(name: str, part: str, got: Tensor, expected: Tensor) -> None:
    """UnsupportedModelError if logits [..., V] in float32 or float64 differ by more than `TOLERANCE`.

    name: of the model's class. part: of the system that computed `got`, for the message.
    """
    spread = expected.std().clamp(min=1e-6)
    error = ((got - expected).abs().max() / spread).item()
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
    error, noise = (rms(x.float() - exact).max().item() for x in (got, plain))
    if not error <= max(NOISE * noise, LEAST_NOISE * exact.std().item()):
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


def in_float32_if_possible(part: str, run: Callable[[], Tensor], model: nn.Module | None = None) -> Tensor | None:
    """Logits in float32; or None, with a line in the log, if an op has no float32 form.

    model: the one that computes them by itself, with `unrounded_decays`.
    """
    with nullcontext() if model is None else unrounded_decays(model):
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
