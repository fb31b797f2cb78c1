"""The exceptions and the logger of this package, and the checks and the did-you-mean that messages share."""

import difflib
import logging
import math
from collections.abc import Iterable

log = logging.getLogger("spec_compile")


class UnsupportedModelError(ValueError):
    """The model cannot be generated from exactly; the message names the model, the reason and what to do."""


class RequestError(RuntimeError):
    """Ends one request. Whoever sent it may read the message, which therefore tells nothing of the process.

    status: the HTTP status; 400 if the request's own settings are at fault
    field: the field of the request that is at fault, as its client wrote it, or None
    """

    def __init__(self, message: str, status: int = 400, field: str | None = None):
        super().__init__(message)
        self.status, self.field = status, field


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest of `known`, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def check_int(name: str, value: object, low: int, high: int, note: str = "") -> None:
    """TypeError or ValueError, naming the argument, unless `value` is an int from `low` to `high`."""
    note = f" ({note})" if note else ""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int from {low} to {high}{note}, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}{note}, not {value}")


def check_positive(name: str, value: object) -> None:
    """TypeError or ValueError, naming the argument, unless `value` is a finite number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number above 0, not {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, not {value}")
