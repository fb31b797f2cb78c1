"""The exceptions this package defines, and the did-you-mean used in messages."""

import difflib
from collections.abc import Iterable


class UnsupportedModelError(ValueError):
    """The model cannot be generated from exactly; the message names the model, the reason and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest of `known`, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
