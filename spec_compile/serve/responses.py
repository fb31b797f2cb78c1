"""Streams of /v1/responses, mended so that OpenAI's clients read them: each item once, at an index of its own."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any


class ResponseEvents:
    """Turns transformers' events of one answer into OpenAI's.

    transformers sends a message a second time after calls of tools, at the index of the last call, and a call without
    its `response.function_call_arguments.delta`.

    is_cut: returns True if the answer ended at its limit of tokens; asked at the end
    told: fields of the request that the answer repeats
    """

    def __init__(self, is_cut: Callable[[], bool], told: dict):
        self._is_cut, self._told, self._sequence = is_cut, told, 0
        self._items: list[dict] = []  # as they are when they end
        self._index, self._id, self._text = -1, "", ""
        self._waiting: list[dict] = []  # events that begin a message without text

    def mend(self, event: dict) -> Iterator[dict]:
        """The events in place of one event."""
        if "response" in event:
            event = event | {"response": event["response"] | self._told}
        for each in self._mended(event):
            yield each | {"sequence_number": self._sequence}
            self._sequence += 1

    def _mended(self, event: dict) -> Iterator[dict]:
        kind, item = event["type"], event.get("item", {})
        if kind == "response.output_item.added":
            self._waiting, self._text = [event], ""
            if item["type"] != "message":
                yield from self._begin()
        elif kind == "response.content_part.added":
            self._waiting.append(event)
        elif kind in ("response.completed", "response.failed"):
            if not self._items and self._waiting:  # an answer without any text is an empty message
                yield from self._begin()
                yield from self._end_message()
            yield close_response(event, self._items, self._is_cut())
        elif "output_index" not in event:
            yield event
        elif kind.startswith("response.output_text.") or kind == "response.content_part.done" or (
            item.get("type") == "message"
        ):  # fmt: skip
            if kind == "response.output_text.delta":
                yield from self._begin()
                self._text += event["delta"]
                yield self._placed(event)
            elif kind == "response.output_item.done" and not self._waiting:
                yield from self._end_message()
        else:
            if kind == "response.function_call_arguments.done":
                yield self._placed(
                    {"type": kind.replace(".done", ".delta"), "delta": event["arguments"], "item_id": ""}
                )
            if kind == "response.output_item.done":
                self._items.append(item)
            yield self._placed(event)

    def _begin(self) -> Iterator[dict]:
        """The waiting events that begin an item."""
        for event in self._waiting:
            if "item" in event:
                self._index += 1
                used = sum(each["type"] == "message" for each in self._items)
                item = event["item"]
                self._id = f"{item['id']}_{used}" if used and item["type"] == "message" else item["id"]
                if item["type"] == "function_call":
                    event = event | {"item": item | {"arguments": "", "status": "in_progress"}}
            yield self._placed(event)
        self._waiting = []

    def _end_message(self) -> Iterator[dict]:
        """The events that end the open message."""
        part = {"type": "output_text", "text": self._text, "annotations": []}
        place = {"content_index": 0, "item_id": ""}
        yield self._placed({"type": "response.output_text.done", "text": self._text, "logprobs": []} | place)
        yield self._placed({"type": "response.content_part.done", "part": part} | place)
        item = {"id": self._id, "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        self._items.append(item)
        yield self._placed({"type": "response.output_item.done", "item": item})

    def _placed(self, event: dict) -> dict:
        """The event with the index and the id of the open item."""
        event = event | {"output_index": self._index}
        if "item_id" in event:
            event["item_id"] = self._id
        if "item" in event:
            event["item"] = event["item"] | {"id": self._id}
        return event


async def mend_stream(chunks: AsyncIterator[str], is_cut: Callable[[], bool], told: dict) -> AsyncIterator[str]:
    """The events of a stream; see `ResponseEvents`."""
    events = ResponseEvents(is_cut, told)
    async for several in chunks:
        parts: list[Any] = [json.loads(each.removeprefix("data: ")) for each in several.split("\n\n") if each]
        made = [event for part in parts for event in events.mend(part)]
        if made:
            yield "".join(f"data: {json.dumps(event)}\n\n" for event in made)


def close_answer(response: dict, output: list[dict], is_cut: bool) -> dict:
    """A complete answer: without an empty message next to calls, and incomplete if its limit has cut it off."""
    calls = any(item["type"] == "function_call" for item in output)
    kept = [
        {name: value for name, value in item.items() if name != "annotations"}  # a message has them in its content
        for item in output
        if not (calls and item["type"] == "message" and not any(part.get("text") for part in item["content"]))
    ]
    response = response | {"output": kept}
    if is_cut:
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return response


def close_response(event: dict, output: list[dict], is_cut: bool) -> dict:
    """The last event of a stream. output: the items."""
    if event["type"] == "response.failed":
        return event
    kind = "response.incomplete" if is_cut else "response.completed"
    return event | {"type": kind, "response": close_answer(event["response"], output, is_cut)}
