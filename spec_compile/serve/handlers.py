"""OpenAI's chats and completions, and /tokenize and /detokenize as vLLM spells them."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi.responses import JSONResponse, Response

from .answers import ReadAnswer, Thought, ToolCall
from .call import HttpCall
from .endpoint import Endpoint, Generating, Stream, Templated, event, usage_of
from .errors import refuse
from .fields import FLAG, ID, LIST, OBJECT, TEXT, check_fields, only, record
from .generation import flat_ids
from .infill_tokens import NO_MARKS
from .logprobs import ChatLogprobs, CompletionLogprobs, read_top
from .models import ChatFields, CompletionFields, Messages, Tools
from .prompts import count_characters
from .tools import input_of, is_custom

DONE = "data: [DONE]\n\n"
"""The end of a stream of chunks."""


class ChunkStream(Stream):
    """Chunks of OpenAI's completions and chats. head: fields of each chunk"""

    head: dict[str, str]

    def chunk(self, choice: HttpCall, part: dict, has_tokens: bool = True) -> dict:
        """A chunk with a part of a choice. has_tokens: True if it has the log-probabilities of the tokens since the
        last chunk."""
        logprobs = choice.logprobs.take() if choice.logprobs is not None and has_tokens else None
        part = {"index": choice.index} | part | ({} if logprobs is None else {"logprobs": logprobs})
        told = {"id": self.call.http_id, "created": int(time.time()), "model": self.model}
        if self.call.fields.get("return_token_ids") and has_tokens:
            told |= {"prompt_token_ids": choice.inputs["input_ids"]} if choice.told_tokens == 0 else {}
            part["token_ids"] = choice.new_tokens()
        return told | {"choices": [part]} | self.head

    def last(self, choice: HttpCall, part: dict, is_last: bool) -> str:
        """The last events of a choice. After all choices come the usage, if the client wants it, and the end."""
        chunk = self.chunk(choice, part)
        if not is_last:
            return event(chunk)
        metrics = self.endpoint.speculation(self.call.choices)
        if not self.call.fields.get("stream_options", {}).get("include_usage"):
            return event(chunk | metrics) + DONE
        usage = usage_of(self.call.choices, self.call.fields.get("n", 1))
        return event(chunk) + event(chunk | {"choices": [], "usage": usage} | metrics) + DONE


class ChatStream(ChunkStream):
    """The chunks of a chat."""

    head = {"object": "chat.completion.chunk", "system_fingerprint": ""}

    def __init__(self, endpoint: Any, call: HttpCall):
        super().__init__(endpoint, call)
        self._calls: Counter[int] = Counter()  # of tools, by choice

    def begin(self) -> str:
        delta = {"delta": {"role": "assistant"}}
        return "".join(event(self.chunk(choice, delta, has_tokens=False)) for choice in self.call.choices)

    def write(self, choice: HttpCall, item: str | Thought | ToolCall) -> str:
        if isinstance(item, ToolCall):
            number = self._calls[choice.index]
            self._calls[choice.index] += 1
            delta: dict[str, Any] = {"tool_calls": [{"index": number} | called(self.call, item, number)]}
        else:
            delta = {"reasoning_content" if isinstance(item, Thought) else "content": item}
        return event(self.chunk(choice, {"delta": delta}))

    def end(self, choice: HttpCall, is_last: bool) -> str:
        reason = finish_reason(choice, self._calls[choice.index] > 0)
        return self.last(choice, {"delta": {}, "finish_reason": reason}, is_last)


def called(call: HttpCall, item: ToolCall, number: int) -> dict:
    """A call of a tool in OpenAI's form. number: of those before it"""
    name = f"{call.http_id}_tool_call_{number}"
    if is_custom(item.name, call.fields.get("tools", [])):
        return {"id": name, "type": "custom", "custom": {"name": item.name, "input": input_of(item)}}
    return {"id": name, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def finish_reason(choice: HttpCall, has_calls: bool) -> str:
    """The reason why an answer ended."""
    reason = choice.finish_reason
    return "tool_calls" if has_calls and reason != "length" else reason


class Choosing(Generating):
    """An endpoint whose answers have choices. kind: OpenAI's name of an answer. logprobs: the class of its
    log-probabilities"""

    kind: str
    logprobs: type[ChatLogprobs]

    def _logprobs(self, call: HttpCall) -> ChatLogprobs | None:
        if read_top(call.fields) is None:
            return None
        return self.logprobs(self.requests.tokenizer, self.requests.bytes_of, call.echo)

    def _whole(self, call: HttpCall, answers: list[ReadAnswer]) -> dict:
        choices = []
        for choice, answer in zip(call.choices, answers):
            part = {"index": choice.index} | self._part(choice, answer)
            if call.fields.get("return_token_ids"):
                part |= {"token_ids": choice.new_tokens(), "prompt_token_ids": choice.inputs["input_ids"]}
            choices.append(
                part | ({} if choice.logprobs is None else {"logprobs": choice.logprobs.whole(choice.output)})
            )
        head = {"id": call.http_id, "object": self.kind, "created": int(time.time()), "model": self._model(call)}
        usage = usage_of(call.choices, call.fields.get("n", 1))
        return head | {"choices": choices, "usage": usage} | self.speculation(call.choices)

    def _part(self, choice: HttpCall, answer: ReadAnswer) -> dict:
        """The fields of a choice."""
        raise NotImplementedError


class Chat(Templated, Choosing):
    """POST /v1/chat/completions."""

    fields, prompt_field, kind, stream = ChatFields, "messages", "chat.completion", ChatStream
    logprobs = ChatLogprobs

    def _part(self, choice: HttpCall, answer: ReadAnswer) -> dict:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [called(choice, item, number) for number, item in enumerate(answer.calls)]
        return {"message": message, "finish_reason": finish_reason(choice, bool(answer.calls))}


class CompletionStream(ChunkStream):
    """The chunks of a completion."""

    head = {"object": "text_completion"}

    def write(self, choice: HttpCall, item: str) -> str:  # type: ignore[override]
        return event(self.chunk(choice, {"text": item}))

    def end(self, choice: HttpCall, is_last: bool) -> str:
        """A chunk with the reason of the end."""
        return self.last(choice, {"text": "", "finish_reason": choice.finish_reason}, is_last)


class Completion(Choosing):
    """POST /v1/completions."""

    fields, prompt_field, kind, stream = CompletionFields, "prompt", "text_completion", CompletionStream
    logprobs = CompletionLogprobs

    def _read(self, call: HttpCall, body: dict) -> dict:
        fields = super()._read(call, body)
        if fields.get("max_tokens") == 0:
            fields["max_tokens"], call.drops_answer = 1, True
        if fields.get("suffix"):
            if self.requests.infill is None:
                raise refuse("suffix", NO_MARKS)
            if not isinstance(fields["prompt"], str):
                raise refuse("suffix", "it needs a prompt that is one text")
            fields["stop_token_ids"] = [*fields.get("stop_token_ids", []), *self.requests.infill.ends]
        return fields

    def _check(self, call: HttpCall) -> None:
        super()._check(call)
        self._check_size(max(map(count_characters, self._given(call))) + len(call.fields.get("suffix", "")))

    def _given(self, call: HttpCall) -> list[str | list[int]]:
        """The prompts: texts and lists of token ids."""
        prompt = call.fields["prompt"]
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def _prompts(self, call: HttpCall) -> Iterator[tuple[dict, str | None]]:
        tokenizer, echo = self.requests.tokenizer, None
        for prompt in self._given(call):
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if call.fields.get("suffix"):
                ids = self.requests.infill.prompt(tokenizer, prompt, call.fields["suffix"])
            if call.fields.get("echo"):
                echo = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
            yield {"input_ids": ids}, echo

    def _part(self, choice: HttpCall, answer: ReadAnswer) -> dict:
        return {"text": (choice.echo or "") + answer.content, "finish_reason": choice.finish_reason}


# The tokens of a prompt, and the text of tokens.


TextToTokens = record("prompt", prompt=TEXT, model=TEXT, return_token_strs=FLAG, add_special_tokens=FLAG)
ChatToTokens = record(
    "messages", messages=Messages, prompt=only(), model=TEXT, tools=Tools, chat_template_kwargs=OBJECT,
    return_token_strs=FLAG, add_generation_prompt=FLAG,
    continue_final_message=FLAG, add_special_tokens=only(False),
)  # fmt: skip
"""The fields of /tokenize. A chat is a prompt as /v1/chat/completions makes it."""


class Tokenize(Chat):
    """POST /tokenize, of a `prompt` or of `messages`."""

    generates = False

    def _read(self, call: HttpCall, body: dict) -> dict:
        if "messages" in body:
            return check_fields(ChatToTokens, body, pictures=self.requests.reads_pictures)
        call.prompt_field = "prompt"
        return check_fields(TextToTokens, body)

    def _check(self, call: HttpCall) -> None:
        if "messages" in call.fields:
            super()._check(call)
            return
        Endpoint._check(self, call)
        most = self.requests.most_characters
        if len(call.fields["prompt"]) > most:
            raise refuse("prompt", f"expected at most {most} characters, because a row holds no more")

    async def _respond(self, call: HttpCall) -> Response:
        """A text is no prompt of a chat."""
        if "messages" in call.fields:
            return await super()._respond(call)
        special = call.fields.get("add_special_tokens", True)
        return self._told(call, self.requests.tokenizer(call.fields["prompt"], add_special_tokens=special)["input_ids"])

    async def _generate(self, call: HttpCall, prompts: list[tuple[dict, str | None]]) -> Response:
        ((inputs, _),) = prompts
        return self._told(call, flat_ids(inputs["input_ids"]))

    def _told(self, call: HttpCall, ids: list[int]) -> JSONResponse:
        tokenizer, row = self.requests.tokenizer, self.requests.row_tokens
        strings = tokenizer.convert_ids_to_tokens(ids) if call.fields.get("return_token_strs") else None
        return JSONResponse({"count": len(ids), "max_model_len": row, "tokens": ids, "token_strs": strings})


class Detokenize(Endpoint):
    """POST /detokenize."""

    fields, prompt_field, generates = record("tokens", tokens=LIST, model=TEXT), "tokens", False

    def _check(self, call: HttpCall) -> None:
        super()._check(call)
        tokens, most, embedded = call.fields["tokens"], self.requests.row_tokens, self.requests.embedded
        fits = len(tokens) <= most and all(
            ID.accepts(each) and each < embedded for each in tokens
        )  # guard: ids-of-tokens
        if not fits:
            raise refuse("tokens", f"expected a list of at most {most} ids below {embedded}")

    async def _respond(self, call: HttpCall) -> Response:
        return JSONResponse({"prompt": self.requests.tokenizer.decode(call.fields["tokens"])})
