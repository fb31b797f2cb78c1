"""The level of instructions that kernels on a CPU take: the best that it has, or a lower one, as another CPU would.

The environment variable SPEC_COMPILE_CPU_LEVEL names it before the package is imported.
"""

import os
from collections.abc import Sequence

from ..compat import levels_of_cpu

VARIABLE = "SPEC_COMPILE_CPU_LEVEL"
LEVELS = "plain", "avx2", "avx512", "avx512_bf16", "amx"
"""From the lowest to the highest. A kernel that has no code for the chosen one takes the next lower."""
AMX = LEVELS.index("amx")


def chosen(present: Sequence[bool]) -> int:
    """The highest place in `LEVELS` that kernels may take: the one that `VARIABLE` names, without it the last.

    present: for each of `LEVELS`, if the CPU has it. ValueError if the variable names none, or one that it lacks.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return AMX
    here = [level for level, there in zip(LEVELS, present, strict=True) if there]
    if text not in LEVELS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(LEVELS)}, got {text!r}; unset it for the best")
    if text not in here:
        raise ValueError(f"{VARIABLE}: this CPU has {', '.join(here)}, not {text!r}; unset it for the best")
    return LEVELS.index(text)


PRESENT = levels_of_cpu()
HIGHEST = chosen(PRESENT)
"""See `chosen`."""
