"""POST /v1/responses: answers as items, whole or in a stream of OpenAI's events."""

import json
import threading
import time
from collections import OrderedDict
from typing import Any

from .answers import ReadAnswer, Thought, ToolCall
from .call import HttpCall
from .endpoint import Service, Stream, Templated, usage_of
from .errors import Refusal, refuse
from .models import ResponseFields
from .prompts import messages_of, sealed
from .tools import in_namespace, input_of, is_custom

SEALED = "reasoning.encrypted_content"
"""The value of `include` that asks for reasoning in a form that a client keeps and sends back."""
NOT_FOUND = "previous_response_not_found"
"""OpenAI's code of an error."""
MOST_KEPT, MOST_CHARACTERS = 1024, 1 << 26
"""Answers that are kept for `previous_response_id`, and characters of all of them as JSON."""


class KeptResponses:
    """The conversations that ended in the latest answers, by the answer's id and the owner of the client's key."""

    def __init__(self) -> None:
        self._lock, self._size = threading.Lock(), 0
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()

    def keep(self, call: HttpCall, output: list[dict]) -> None:
        """Keep the items of a request and of its answer, unless the client forbids it. The oldest ones make room."""
        if call.fields.get("store") is False:
            return
        text = json.dumps([*as_items(call.fields["input"]), *output])
        with self._lock:
            self._kept[call.owner, f"resp_{call.http_id}"] = text
            self._size += len(text)
            while len(self._kept) > MOST_KEPT or self._size > MOST_CHARACTERS:
                self._size -= len(self._kept.popitem(last=False)[1])

    def items(self, owner: str, name: str) -> list[dict]:
        """The items of an answer and of what came before it. Refusal if it is not kept."""
        with self._lock:
            text = self._kept.get((owner, name))  # guard: answers-of-others
        if text is None:
            reason = f"there is no answer {name[:80]!r}, or it is not kept any longer; send its items"
            raise refuse("previous_response_id", reason, code=NOT_FOUND)
        return json.loads(text)


def as_items(given: str | list[dict]) -> list[dict]:
    """The field `input` as items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _reasoning(call: HttpCall, number: str, text: str) -> dict:
    content = [{"type": "reasoning_text", "text": text}]
    item = {"id": number, "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    return item | ({"encrypted_content": sealed(text)} if SEALED in call.fields.get("include", []) else {})


def _text_part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": []}


def _message(number: str, text: str) -> dict:
    content = [_text_part(text)]
    return {"id": number, "type": "message", "status": "completed", "role": "assistant", "content": content}


def _tool_call(call: HttpCall, number: str, item: ToolCall) -> dict:
    """The item of a call: of a function, or of a custom tool, whose argument is a text."""
    named = {"id": number, "call_id": number, "status": "completed"}
    tools = call.fields.get("tools", [])
    named |= in_namespace(item.name, tools)
    if is_custom(item.name, tools):
        return named | {"type": "custom_tool_call", "input": input_of(item)}
    return named | {"type": "function_call", "arguments": item.arguments}


def _response(call: HttpCall, model: str, status: str, output: list[dict], **more: Any) -> dict:
    """An object of the type response, which repeats fields of the request."""
    return {
        "id": f"resp_{call.http_id}", "object": "response", "created_at": time.time(), "model": model,
        "status": status, "output": output, "tools": [],
        "parallel_tool_calls": call.fields.get("parallel_tool_calls", True),
        "tool_choice": call.fields.get("tool_choice", "auto"),
    } | more  # fmt: skip


def _ended(call: HttpCall, model: str, output: list[dict]) -> dict:
    """A complete answer, which is incomplete if its limit has cut it off."""
    usage = usage_of([call])
    counts = {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
    }  # fmt: skip
    if call.finish_reason != "length":
        return _response(call, model, "completed", output, usage=counts)
    details = {"reason": "max_output_tokens"}
    return _response(call, model, "incomplete", output, usage=counts, incomplete_details=details)


class ResponseStream(Stream):
    """The events of an answer: each item once, at its own index."""

    def __init__(self, endpoint: Any, call: HttpCall):
        super().__init__(endpoint, call)
        self._sequence, self._open, self._text = 0, "", ""  # the type of the open item, and its text
        self._output: list[dict] = []  # complete items

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return f"data: {json.dumps({'type': kind} | fields | {'sequence_number': self._sequence - 1})}\n\n"

    @property
    def _id(self) -> str:
        """The id of the open item. The first one of a type has no number."""
        used = sum(item["type"] == self._open for item in self._output)
        if self._open == "call":
            return f"{self.call.http_id}_tool_call_{sum('call_id' in item for item in self._output)}"
        name = {"message": "msg", "reasoning": "rs"}[self._open]
        return f"{name}_{self.call.http_id}" + (f"_{used}" if used else "")

    def _place(self, **more: Any) -> dict:
        """The fields that say where in the answer an event belongs."""
        return {"item_id": self._id, "output_index": len(self._output)} | more

    def begin(self) -> str:
        """The answer is queued and begins."""
        return "".join(
            self._event(f"response.{kind}", response=_response(self.call, self.model, status, []))
            for kind, status in (("created", "queued"), ("in_progress", "in_progress"))
        )

    def write(self, choice: HttpCall, item: str | Thought | ToolCall) -> str:
        """The events of an item. A text goes on with the open message, a thought with the open reasoning."""
        if isinstance(item, ToolCall):
            return self._close() + self._tool_call(item)
        kind, name = ("reasoning", "reasoning_text") if isinstance(item, Thought) else ("message", "output_text")
        begun = "" if self._open == kind else self._close() + self._begin(kind)
        self._text += item
        more = {"logprobs": []} if kind == "message" else {}
        return begun + self._event(f"response.{name}.delta", delta=item, **self._place(content_index=0), **more)

    def _begin(self, kind: str) -> str:
        """The events that begin a message or reasoning."""
        self._open, self._text = kind, ""
        item: dict[str, Any] = {"id": self._id, "type": kind, "status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        begun = self._event("response.output_item.added", item=item, output_index=len(self._output))
        if kind == "message":
            place = self._place(content_index=0)
            begun += self._event("response.content_part.added", part=_text_part(""), **place)
        return begun

    def _close(self) -> str:
        """The events that end the open item, if there is one."""
        if not self._open:
            return ""
        place, text, ended = self._place(content_index=0), self._text, ""
        if self._open == "message":
            item = _message(self._id, text)
            ended += self._event("response.output_text.done", text=text, logprobs=[], **place)
            ended += self._event("response.content_part.done", part=_text_part(text), **place)
        else:
            item = _reasoning(self.call, self._id, text)
            ended += self._event("response.reasoning_text.done", text=text, **place)
        return ended + self._done(item)

    def _done(self, item: dict) -> str:
        """The event that ends an item."""
        done = self._event("response.output_item.done", item=item, output_index=len(self._output))
        self._output.append(item)
        self._open = ""
        return done

    def _tool_call(self, call: ToolCall) -> str:
        """The events of a call, which is complete."""
        self._open = "call"
        item, place, more = _tool_call(self.call, self._id, call), self._place(), {}
        field = "input" if "input" in item else "arguments"
        name = f"response.{item['type']}_{field}"
        if field == "arguments":
            more = {"name": call.name}
        started = item | {field: "", "status": "in_progress"}
        begun = self._event("response.output_item.added", item=started, output_index=len(self._output))
        begun += self._event(f"{name}.delta", delta=item[field], **place)
        return begun + self._event(f"{name}.done", **{field: item[field]}, **more, **place) + self._done(item)

    def end(self, choice: HttpCall, is_last: bool) -> str:
        """The last events. An answer without any text is an empty message."""
        before = "" if self._open or self._output else self._begin("message")
        before += self._close()
        self.endpoint.kept.keep(self.call, self._output)
        response = _ended(choice, self.model, self._output)
        return before + self._event(f"response.{response['status']}", response=response)

    def error(self, refusal: Refusal) -> str:
        """An error, and the end of an answer that has failed."""
        error = {"code": "server_error", "message": refusal.detail}
        failed = _response(self.call, self.model, "failed", [], error=error)
        return self._event("error", message=refusal.detail) + self._event("response.failed", response=failed)


class Responses(Templated):
    """POST /v1/responses."""

    fields, prompt_field, stream = ResponseFields, "input", ResponseStream
    names = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}

    def __init__(self, service: Service):
        super().__init__(service)
        self.kept = KeptResponses()

    def _read(self, call: HttpCall, body: dict) -> dict:
        """The fields, also by the names that chats have, after the items of an earlier answer."""
        fields = super()._read(call, body)
        if "previous_response_id" in fields:
            earlier = self.kept.items(call.owner, fields["previous_response_id"])
            fields["input"] = [*earlier, *as_items(fields["input"])]
        # Fields that chats have, too, are called as there from here on.
        if "effort" in fields.get("reasoning", {}):
            fields["reasoning_effort"] = fields["reasoning"]["effort"]
        form = fields.get("text", {}).get("format", {})
        if form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form:
            fields["response_format"] = form
        return fields

    def _messages(self, fields: dict) -> list[dict]:
        return messages_of(as_items(fields["input"]), fields.get("instructions"))

    def _whole(self, call: HttpCall, answers: list[ReadAnswer]) -> dict:
        ((answer, choice),) = zip(answers, call.choices)
        name, output = call.http_id, []
        if answer.reasoning is not None:
            output.append(_reasoning(call, f"rs_{name}", answer.reasoning))
        if answer.content or not answer.calls:
            output.append(_message(f"msg_{name}", answer.content))
        output += [_tool_call(call, f"{name}_tool_call_{number}", each) for number, each in enumerate(answer.calls)]
        self.kept.keep(call, output)
        return _ended(choice, self._model(call), output) | self.speculation([choice])
