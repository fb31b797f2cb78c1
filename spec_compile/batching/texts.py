"""The texts whose keys and values lie in the rows of a batch, and which of them begins like a prompt."""

from typing import Any

import numpy as np

LEAST = 16
"""A beginning of fewer tokens is computed again rather than copied. Other clients' texts begin like a prompt in
multiples of so many tokens only, and figures are such multiples: whoever guesses a text, and watches what is copied,
has to guess so many tokens at once."""


def whole(tokens: Any) -> Any:
    """As many of some tokens as figures tell: a multiple of `LEAST`."""
    return tokens // LEAST * LEAST  # guard: figures-in-blocks


class Texts:
    """A text of up to `capacity` tokens for each of `rows` rows."""

    def __init__(self, rows: int, capacity: int, has_states: bool = False):
        """has_states: True if rows have states of recurrences, which exist only after the end of a text."""
        self._tokens = np.zeros((rows, capacity), dtype=np.int32)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._has_states = has_states
        self._scopes = [b""] * rows
        """See `Job.scope`."""
        self._clients = [""] * rows
        """The owner of each row's text."""
        self._has_ended = np.zeros(rows, dtype=bool)
        """True for rows whose states have seen all of the text but the last token."""
        self._counts = np.zeros(rows, dtype=bool)
        """True for rows whose keys and values are those of the text."""
        self.weights = 0
        """Counts how often the weights have changed."""

    def put(self, row: int, tokens: list[int] | None, scope: bytes = b"", client: str = "") -> None:
        """The row has this text from now on; None: one that no prompt begins with. scope, client: see `Job`."""
        self._scopes[row], self._clients[row] = scope, client
        self._lengths[row], self._has_ended[row], self._counts[row] = 0, False, tokens is not None
        self.extend(row, tokens or [])

    def close(self, row: int) -> None:
        """The row's text does not go on, because the keys and values after it are of no use to others."""
        self._counts[row] = False

    def end(self, row: int) -> None:
        """The row's text is complete, and its states have seen all of it but the last token."""
        self._has_ended[row] = True

    def has_ended(self, row: int) -> bool:
        """True if `end` was called for the row's text."""
        return bool(self._has_ended[row])

    def extend(self, row: int, tokens: list[int]) -> None:
        """The row's text goes on with these tokens."""
        if not self._counts[row]:
            return
        begin = self._lengths[row]
        self._tokens[row, begin : begin + len(tokens)] = tokens
        self._lengths[row] += len(tokens)

    def length(self, row: int) -> int:
        """Tokens of a row's text, the last of which has no keys and values yet."""
        return int(self._lengths[row])

    def tokens(self, row: int) -> np.ndarray:
        """A row's text [n] int32; empty if its keys and values are not those of the text."""
        return self._tokens[row, : self._lengths[row]]

    def scope(self, row: int) -> bytes:
        """The scope of a row's text, see `Job`."""
        return self._scopes[row]

    def move(self, row: int, to: int) -> None:
        """A row's text is in another row now, and no longer in this one."""
        length = self._lengths[row]
        self._tokens[to, :length], self._lengths[to] = self._tokens[row, :length], length
        self._counts[to], self._scopes[to] = self._counts[row], self._scopes[row]
        self._clients[to] = self._clients[row]
        self._lengths[row] = 0
        self._has_ended[to] = False

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more, until another text is put into a row."""
        self._lengths[:], self._counts[:] = 0, False
        self.weights += 1

    def longest_prefix(
        self, prompt: list[int], scope: bytes = b"", ahead: int = 0, client: str = ""
    ) -> tuple[int, int]:  # fmt: skip
        """The row whose text begins with most of the prompt, and with how many of its tokens: 0 if they are few. Rows
        of other scopes do not count.

        ahead: tokens after a slot's own that it may depend on, which must be the same, too, but may be the last ones of
            text and prompt.

        The last token of a text does not count, because it has no keys and values yet. With
        states a text counts only if the prompt begins with all of the rest.
        """
        width = min(len(prompt), int(self._lengths.max()))
        if width < LEAST:
            return 0, 0
        differs = self._tokens[:, :width] != np.asarray(prompt[:width], dtype=np.int32)
        alike = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        alike = np.minimum(np.minimum(alike, self._lengths) - ahead, self._lengths - 1)
        alike = np.where([own == scope for own in self._scopes], alike, 0)
        if not self._has_states:
            alike = np.where([own == client for own in self._clients], alike, whole(alike))
        else:
            alike = np.where(self._has_ended & (alike == self._lengths - 1), alike, 0)
        row = int(alike.argmax())
        return (row, int(alike[row])) if alike[row] >= LEAST else (0, 0)

    @property
    def used(self) -> int:
        """Tokens of all texts."""
        return int(self._lengths.sum())
