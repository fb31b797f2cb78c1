"""An answer as it comes: who gave each token, and its text in colour."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

OWN, NGRAMS, RECYCLED = "the model itself", "n-grams", "recycled tokens"
STYLES = {OWN: "", NGRAMS: "bold green"}
OTHER_STYLE = "bold cyan"
"""The style of drafts that no n-gram can have given."""


class Fragment(NamedTuple):
    """The text that a token adds. seconds: from the start of the answer until the token came. source: who gave it."""

    seconds: float
    text: str
    source: str


def make_console() -> Console:
    """stdout, where no text is markup and no line is broken. It gets no escape codes if it is a pipe or a notebook,
    with TERM=dumb, and with NO_COLOR."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal or console.is_dumb_terminal or console.no_color or console.is_jupyter:
        plain = dict(color_system=None, force_terminal=False, force_jupyter=False)
        return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, **plain)
    return console


def coloured(pieces: Iterable[Fragment]) -> Text:
    """The text of an answer. Neighbours of one source are one span."""
    runs = groupby(pieces, lambda piece: STYLES.get(piece.source, OTHER_STYLE))
    return Text.assemble(*(("".join(piece.text for piece in run), style) for style, run in runs))


class TokenSources:
    """Tells who gave the tokens of an answer, round by round.

    The last token of a round is the model's, the others are drafts that it accepted. N-grams continue text that stands
    above. So a draft is theirs if it and the round's tokens before it, with the token before the round, stand above;
    another source may have drafted it as well. A draft that does not stand above must be the other source's.

    ids: the prompt and what the answer has so far.
    other: the source of drafts besides n-grams, or the only one.
    """

    def __init__(self, prompt: list[int], other: str, has_ngrams: bool = True):
        self.ids, self.other, self.has_ngrams = list[int](), other, has_ngrams
        self._places = defaultdict[int, list[int]](list)
        self._add(prompt)

    @classmethod
    def of(cls, fast: Any, prompt: list[int]) -> "TokenSources":
        """The sources of an answer by a result of `speculate`."""
        engine = fast.speculation.engine
        other = RECYCLED if engine.name == "ngram" else engine.name
        return cls(prompt, other, engine.runtime.algorithm.store is not None)

    def of_round(self, gained: list[int]) -> list[str]:
        """The source of each token that a round has gained.

        After the tokens [1, 2, 3, 1] a round gains [2, 7, 4]: 1, 2 stands above, and 1, 2, 7 does not. So 2 is given by
        n-grams, 7 by the other source, and 4 by the model.
        """
        root, found = len(self.ids) - 1, []
        places = self._places[self.ids[root]][:-1] if self.has_ngrams else []
        for token in gained[:-1]:
            places = [place + 1 for place in places if place < root and self.ids[place + 1] == token]
            found.append(NGRAMS if places else self.other)
        self._add(gained)
        return [*found, *[OWN][: len(gained)]]

    def _add(self, tokens: list[int]) -> None:
        for token in tokens:
            self._places[token].append(len(self.ids))
            self.ids.append(token)


class Fragments:
    """Makes tokens into text as they come. A character of several tokens comes with the last of them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._begin = self._read = 0  # tokens whose text is known, and of which the next token's text depends

    def text_of(self, token: int) -> str:
        """The text that one more token adds."""
        self._ids.append(token)
        known, text = (
            self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=True)
            for end in (self._read, len(self._ids))
        )
        added = text[len(known) :]
        if added.endswith("�"):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return added


class SourcedStreamer(BaseStreamer):
    """Gives the text of an answer to `take`, a round at a time.

    trace: see `Stats.trace`; called for each token.
    sources: they tell who gave each token; None if the model itself gives all.
    begin: `time.perf_counter` at the start of the answer.
    is_stopped: asked before each token; True raises KeyboardInterrupt, between two rounds.
    """

    def __init__(
        self, tokenizer: Any, take: Callable[[list[Fragment]], None], sources: TokenSources | None = None,
        trace: Callable[[], list[list[int]]] = list, is_stopped: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        self._take, self._sources, self._trace, self._is_stopped = take, sources, trace, is_stopped
        self._pieces, self._round, self._has_prompt = Fragments(tokenizer), list[int](), False
        self.ids: list[int] = []
        self.begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self._is_stopped():
            raise KeyboardInterrupt
        self._round += value.flatten().tolist()
        if self._sources is None or len(self._round) == self._trace()[-1][0]:
            self.end()

    def end(self) -> None:
        gained, now = self._round, self.seconds
        self._round = []
        self.ids += gained
        sources = [OWN] * len(gained) if self._sources is None else self._sources.of_round(gained)
        self._take([Fragment(now, self._pieces.text_of(token), source) for token, source in zip(gained, sources)])
