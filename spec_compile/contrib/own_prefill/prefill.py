"""`OwnPrefill`: how the model's own forward processes the prompt of a request."""

from collections.abc import Iterator

from ...runtime.prompt import Past
from ...runtime.state import State


class OwnPrefill:
    """The prompt of a request, or its source, for the model's own forward.

    end: the first tokens of the prompt, which it processes; the rest is text.
    until: the first tokens without which the rest is more than text. A prompt of which as many are known needs no
        processing here.
    offset: how far positions run ahead of slots after the prompt.
    keys: the ids of the prompt, with a number for the contents of each picture, as the prefix cache knows it; None: it
        shares nothing with other prompts.
    """

    end: int
    until: float
    offset: int = 0
    keys: list[int] | None = None

    def begins(self, known: int) -> bool:
        """True if the prompt can be processed after its first `known` tokens."""
        return not known or known >= self.until

    def pieces(self, state: State, known: int, taps: tuple[int, ...]) -> Iterator[Past]:
        """Process the prompt from token `known` on. Each item has the keys and values of the next tokens, the states
        after them, and the features at the draft's taps; the length of the last one is `end`.

        state: has one row, in which the first `known` tokens are.
        """
        raise NotImplementedError
