"""The text, the reasoning and the calls of an answer, read from its pieces by the model's response template."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser

REASONING = "reasoning_content", "thinking", "reasoning"
"""Names that response templates give to the model's reasoning."""


def response_template(processor: Any, model: Any) -> dict | None:
    """The form of a model's answers in transformers' response templates, or None if it is not known."""
    kind = model.config.model_type
    if kind.startswith("qwen3_5"):  # transformers 5.17 names only the models with pictures
        kind = kind.removesuffix("_text")
    return get_response_template(processor, SimpleNamespace(config=SimpleNamespace(model_type=kind)))


class Thought(str):
    """A piece of the model's reasoning."""


@dataclass(frozen=True)
class ToolCall:
    """A complete call. arguments: as JSON."""

    name: str
    arguments: str


def items_of(events: list[dict]) -> list[str | Thought | ToolCall]:
    """The pieces of text and of reasoning, and the complete calls, that a parser's events tell a client."""
    items: list[str | Thought | ToolCall] = []
    for event in events:
        text, name = event.get("text"), event.get("field")
        if event["type"] == "region_chunk" and not event.get("dirty") and text:
            items += [Thought(text)] if name in REASONING else [text] if name == "content" else []
        elif event["type"] == "region_close" and name == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            items.append(ToolCall(function["name"], arguments))
    return items


@dataclass
class ReadAnswer:
    """A whole answer."""

    content: str
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)


def read_answer(parser: Any, text: str, continues: bool = False) -> ReadAnswer:
    """The parts of a whole text. It is read as a stream is, so that text around calls stays.

    continues: True if the prompt ends in a message of the assistant, whose text is no part of the answer
    """
    events = [*([] if continues else parser.initial_events), *parser.feed(text)]
    with suppress(ValueError, RuntimeError):  # it was cut off within a call
        events += parser.finalize()[1]
    items = items_of(events)
    thoughts = "".join(item for item in items if isinstance(item, Thought)).strip()
    content = "".join(item for item in items if type(item) is str).strip()
    return ReadAnswer(content, thoughts or None, [item for item in items if isinstance(item, ToolCall)])


class FreeParser(ResponseParser):
    """transformers' parser, for answers that are not held to calls.

    A complete call that cannot be read, such as one whose JSON is broken, becomes content with the text that begins and
    ends it. transformers would fail. A call that is cut off is left out.
    """

    _begin, _inside = 0, 0  # where the open region begins, and where the text within it does

    def _open_explicit(self, events: list[dict], field: Any, match: Any) -> None:
        self._begin, self._inside = match.start(), match.end()
        super()._open_explicit(events, field, match)

    def _close_current(self, events: list[dict]) -> None:
        if self._current != "tool_calls":
            super()._close_current(events)
            return
        is_cut = self._inside + len(self._body) == self._pos  # nothing has closed it
        closing: list[dict] = []
        try:
            super()._close_current(closing)
        except (ValueError, TypeError, LookupError, RecursionError):
            self._reset_to_implicit()
        if closing and _is_call(closing[0]["value"]):
            events += closing
        elif not is_cut:
            text = self._buffer[self._begin : self._pos]
            events.append({"type": "region_chunk", "field": "content", "text": text})


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


class StopCut:
    """Ends a text that comes in pieces at the first stop string, as if it came character by character.

    stops: the stop strings
    keeps_stop: True if the text ends after the stop string, False if before
    found: the one that was found, or None

    With the stop "END", the pieces "aE", "N", "Db" give "a", "", "": the "E" waits until it is known to be no stop.
    If two stops end at one place, the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False):
        self.stops, self.keeps_stop = stops, keeps_stop
        self.found: str | None = None
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is known to belong to the answer."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if places:
            end, length, self.found = min(places)
            self._held = ""
            return text[: end if self.keeps_stop else end + length]
        sizes = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        held = max(sizes, default=0)  # guard: held-text
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """The text that waited, once nothing follows it."""
        held, self._held = self._held, ""
        return held

    def whole(self, text: str) -> str:
        """A whole text up to its end."""
        self.found = None
        return self.feed(text) + self.rest()
