"""The counters that launches of kernels share, see `kernels.launching.zero_counters`."""

from spec_compile.kernels import launching


def all_zero() -> bool:
    """True if every launch so far left its counters at 0."""
    return not any(counters.any() for counters in launching._counters.values())
