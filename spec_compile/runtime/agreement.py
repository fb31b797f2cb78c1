"""`Agreement`: the ranks of tensor parallelism check that they run the same generate()."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..parallel.ranks import Alone

if TYPE_CHECKING:
    from .request import Prompt

SCALARS = {NoneType, bool, int, float, str}


class Agreement:
    """Ranks agree once in each generate(), before the first of them decides anything for all."""

    def __init__(self, ranks: Alone):
        self.ranks = ranks
        self._parts: dict[str, Any] = {}
        self._is_awaited = False
        self._batches = 0
        """Managers of requests whose threads run here."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The context of a thread that runs rounds of requests, on all ranks at once."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """The context of one generate(). A rank that leaves it before `reach` says why, so that no other waits."""
        if self._is_awaited or self._parts:
            raise RuntimeError(
                "generate() inside a streamer, criterion or processor of another generate(): with tensor_parallel "
                "rank 0 alone runs these, so no other rank would take part; call it when the other one is over"
            )
        if self.ranks.size == 1:
            yield
            return
        if self._batches:  # guard: generate-during-ranks
            error = RuntimeError(
                "generate(): with tensor_parallel it cannot run while a manager of requests does, because the ranks "
                "follow one stream of rounds; stop the manager first, or add a request"
            )
            self.ranks.agree("generate()", {}, error)
            raise error
        self._is_awaited = True
        try:
            yield
            if self._is_awaited:
                self.reach({"the decoding loop": "transformers' own"})
        except Exception as error:
            if self._is_awaited:
                self._is_awaited = False
                self.ranks.agree("generate()", {}, error)
            raise
        finally:
            self._is_awaited = False
            self._parts.clear()

    def add(self, name: str, value: Any) -> None:
        if self._is_awaited:
            self._parts[name] = value

    def reach(self, parts: dict[str, Any]) -> None:
        """Wait for the other ranks. ValueError if the call of one differs, or if one has refused its call."""
        if self._is_awaited:
            self._is_awaited = False
            self.ranks.agree("generate()", self._parts | parts)


def asked(prompt: "Prompt", generation_config, processors: list, criteria: list) -> dict[str, Any]:
    """The parts of one call, by name, that ranks have to agree on."""
    options = {name: value for name, value in vars(generation_config).items() if not name.startswith("_")}
    return {
        "the prompts": (prompt.tokens, prompt.padding),
        "the generation config": sorted((name, value) for name, value in options.items() if is_plain(value)),
        "the logits processors": [type(processor).__name__ for processor in processors],
        "the stopping criteria": [type(criterion).__name__ for criterion in criteria],
    }


def is_plain(value: Any) -> bool:
    """True if a value is a number, a text, None, or lists, tuples and dictionaries of such."""
    cls = type(value)
    if cls in (list, tuple):
        return all(map(is_plain, value))
    return cls in SCALARS or (cls is dict and all(map(is_plain, (*value, *value.values()))))
