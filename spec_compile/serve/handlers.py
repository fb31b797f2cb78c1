"""transformers' request handlers, with checked fields, settings for each request, and figures of speculation.

They run in the threads of `Workers` except while they wait.
"""

import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, CBWorkerDeadError, Modality, get_response_template

from .body import decode_body
from .call import CURRENT, HttpCall, add_usages, context_of, interleave, merge_choices, split_choices, together
from .errors import ERROR, Refusal, error_object, failure, noted, quoted, refuse
from .fields import CHAT, COMPLETION, RESPONSE, Field, check_fields, list_prompts, present
from .logprobs import ChatLogprobs, CompletionLogprobs, read_top
from .media import address_of, find_pictures, with_pictures
from .messages import ChatText, check_input, check_messages, check_tools, count_characters
from .metrics import speculation_fields
from .responses import close_answer, mend_stream
from .settings import make_config, usage_details
from .tool_calls import AnswerReader, read_tool_calls

PASSED = ("name", "reasoning_content")
"""Fields of a message that transformers does not pass to the chat template."""
BESIDE_PROMPT = ("chat_template_kwargs", "tools", "instructions", "system")
"""Fields that chat templates read in addition to the messages."""
DONE = "data: [DONE]\n\n"
"""The end of a stream of chunks."""


class _Checked:
    """A mixin for transformers' handlers, placed before them among the bases."""

    fields: dict[str, Field]
    """All fields that the endpoint knows."""
    required: str
    """Name of the field with the prompt."""
    uses_template = True
    """True if the chat template makes the prompt."""

    generates = True
    """True if its requests wait for a row."""

    async def answer(self, request: Request) -> Any:
        """The answer to a request. Refusal if it cannot be served, before its body is read if there is no room."""
        requests = self.generation_state.requests
        requests.admit(self.generates)
        async with requests.bodies.reading(request, requests.most_bytes) as data:
            requests.admit(self.generates)
            answering = self._answer(data, request.state.request_id)
            del data  # it may be large, and the answer may take long
            return await requests.workers.drive(answering)  # guard: event-loop

    async def _answer(self, data: bytes, request_id: str) -> Any:
        call = CURRENT.get()
        call.prompt_field = self.required
        body = decode_body(data, self.generation_state.requests.most_containers)
        del data
        call.fields = self._read(body)
        checked = None
        try:
            checked = await self._safe(self._check(dict(call.fields)))
            response = await self.handle_request(dict(checked), request_id)
        except (HTTPException, CBWorkerDeadError):
            raise
        except Exception as error:
            if checked is None or call.is_prepared:  # the prompt is not at fault
                return failure(error)
            is_told = isinstance(error, TemplateError)  # in the words of the template
            reason = quoted(error) if is_told else f"the log has the reason under error {noted(error)}"
            raise refuse(self._culprit(checked), f"it cannot be made a prompt of: {reason}") from error
        if isinstance(response, StreamingResponse):
            response.body_iterator = _with_error_objects(response.body_iterator, call)
        return response

    def _read(self, body: dict) -> dict:
        """The checked fields of a body. Refusal that names a field that cannot be served."""
        return check_fields(body, self.fields, self.required)

    def _check(self, body: dict) -> dict:
        """The body in the form that transformers takes. Refusal for inputs that the model does not take."""
        processor = self._check_model(body)
        body["stream"] = body.get("stream", False)
        if self.uses_template:
            self._check_template(body, processor)
        most = self.generation_state.requests.most_characters
        shown = find_pictures(body[self.required], self.required) if self.uses_template else ()
        if self._characters(body) - sum(len(address_of(part)) for _, part in shown) > most:
            reason = f"expected at most {most} characters, because a row (max_new_tokens included) holds no more"
            raise refuse(self.required, f"{reason}; send a shorter one")
        if "prediction" in body:
            CURRENT.get().prediction = self.generation_state.requests.read_prediction(body.pop("prediction"))
        return body

    async def _safe(self, body: dict) -> dict:
        """A checked body whose control tokens are text and whose pictures are loaded; see `ChatText` and `Media`."""
        call, prompt, (_, _, processor) = CURRENT.get(), body.get(self.required), self._resolve_model({})
        if not self.uses_template or prompt is None:
            return body
        call.pictures = await self.generation_state.requests.policy.media.load([*find_pictures(prompt, self.required)])
        texts = ChatText.of(processor)
        call.sign = texts.sign(prompt, [body.get(name) for name in BESIDE_PROMPT])
        written = present(("tools", "chat_template_kwargs"), body) if call.sign else []
        return body | {name: texts.broken(body[name], call.sign) for name in written}

    def _characters(self, body: dict) -> int:
        """The characters of the longest prompt."""
        return count_characters(
            [body.get(field) for field in (self.required, "instructions", "tools", "chat_template_kwargs")]
        )

    def _check_model(self, body: dict) -> Any:
        """The processor of the model that a body asks for. Refusal for another model."""
        requested, _, processor = self._resolve_model(body)
        adapter = self.model_manager.adapters.find(requested)
        if adapter is None:
            served = ", ".join(repr(each["id"]) for each in self.model_manager.get_gen_models())
            raise Refusal(
                404, f"model: there is no model {requested[:200]!r} here, only {served}", "model", "model_not_found"
            )
        CURRENT.get().adapter = adapter
        return processor

    def _check_template(self, body: dict, processor: Any) -> None:
        """Check the inputs of the chat template, and leave out tools that the client does not want to be called."""
        template = getattr(processor, "chat_template", None)
        if template is None:
            raise refuse(self.required, "the model has no chat template; use /v1/completions")
        template, requests = str(template), self.generation_state.requests
        modality = self._modality() if requests.reads_pictures else Modality.LLM
        if self.required == "messages":
            body["messages"] = check_messages(body["messages"], modality)
        else:
            body["input"] = check_input(body["input"], modality, "instructions" in body)
        check_tools(body.get("tools", []))
        if not body.get("tools") or body.get("tool_choice") == "none":
            body.pop("tools", None)
        elif "tools" not in template:  # guard: tools
            raise refuse("tools", "the model's chat template takes no tools; leave them out")
        for name in body.get("chat_template_kwargs", {}):
            if name not in ChatText.of(processor).variables:  # guard: template-variables
                raise refuse(f"chat_template_kwargs.{name[:80]}", "the model's chat template has no such variable")
        body.setdefault("parallel_tool_calls", True)  # /v1/responses repeats it in its answer
        call = CURRENT.get()
        call.tool_calls = read_tool_calls(call.fields, processor, self._resolve_model({})[1])

    def _culprit(self, body: dict) -> str:
        """The field without which the chat template, which has failed, makes a prompt; else the prompt's."""
        if self.uses_template and not self._is_rendered(body):
            for name in present(BESIDE_PROMPT, body):
                if self._is_rendered(self._without(name, body)):
                    return name
        return self.required

    def _without(self, name: str, body: dict) -> dict:
        return {field: value for field, value in body.items() if field != name}

    def _is_rendered(self, body: dict) -> bool:
        """True if the chat template makes a text of a body."""
        _, _, processor = self._resolve_model({})
        messages, tools = body.get("messages"), body.get("tools")
        try:
            if messages is None:
                messages, tools = self._normalize_input(body), self._normalize_tools(tools)
            messages = self.get_processor_inputs_from_messages(messages, self._modality())
            variables = self.chat_template_kwargs | body.get("chat_template_kwargs", {})
            processor.apply_chat_template(
                messages, add_generation_prompt=True, tools=tools, tokenize=False, **variables
            )
        except Exception:  # a template may raise anything
            return False
        return True

    def _modality(self) -> Modality:
        _, model, processor = self._resolve_model({})
        return self.model_manager.get_model_modality(model, processor=processor)

    def _validate_request(self, body: dict) -> None:
        """Does nothing, because `check_fields` has checked the body."""

    def _resolve_model(self, body: dict) -> tuple:
        loaded = self.model_manager.the_one
        return body.get("model", self.model_manager.served_name), loaded.model, loaded.processor

    def get_processor_inputs_from_messages(self, messages: list[dict], modality: Any) -> list[dict]:
        """transformers' messages, with the fields that it leaves out."""
        made = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        _, _, processor = self._resolve_model({})
        knows_developers = "developer" in str(processor.chat_template)
        call = CURRENT.get()
        for message, inputs in zip(messages, made):
            inputs.update({name: message[name] for name in PASSED if name in message})
            if "tool_calls" in message and message.get("content"):
                text = {"role": message["role"], "content": message["content"]}
                (spoken,) = BaseHandler.get_processor_inputs_from_messages([text], modality)
                inputs["content"] = spoken["content"]
            if inputs["role"] == "developer" and not knows_developers:
                inputs["role"] = "system"
            inputs["content"] = with_pictures(inputs["content"], call.pictures)
        texts = ChatText.of(processor)
        return [texts.broken_message(each, call.sign) for each in made] if call.sign else made

    def _build_generation_config(self, body: dict, defaults: GenerationConfig, use_cb: bool = False) -> Any:
        """The settings of the current request."""
        call, vocab = CURRENT.get(), self.generation_state.requests.vocab_size
        call.is_prepared, call.pictures = True, {}
        self.generation_state.requests.bodies.drop(call)
        config, call.limit_field = make_config(call.fields, defaults, vocab)
        return config

    async def _non_streaming(self, name: str, model: Any, processor: Any, *args: Any, **kwargs: Any) -> JSONResponse:
        template = get_response_template(processor, model) if self.uses_template else None
        if template is not None:
            processor = AnswerReader(processor, template, CURRENT.get())
        response = await super()._non_streaming(name, model, processor, *args, **kwargs)
        body, call = json.loads(response.body), CURRENT.get()
        for choice in body.get("choices", []):
            choice["finish_reason"] = _finish_reason(choice["finish_reason"])
            if call.echo is not None:
                choice["text"] = call.echo + choice["text"]
            if call.logprobs is not None:
                choice["logprobs"] = call.logprobs.whole(call.output)
        body["metrics"] = self._speculation([call])
        _add_prediction(body.get("usage"))
        return JSONResponse(body)

    def _speculation(self, calls: list[HttpCall]) -> dict:
        return speculation_fields((call.output for call in calls), self.generation_state.requests.num_spec_tokens)


class _Choosing(_Checked):
    """A handler of answers with choices, which streams chunks."""

    def _logprobs(self, call: HttpCall) -> ChatLogprobs | None:
        """The log-probabilities of a choice that wants some."""
        requests = self.generation_state.requests
        return None if read_top(call.fields) is None else ChatLogprobs(requests.tokenizer, requests.bytes_of)

    def _choices(self, *args: Any) -> list[tuple[HttpCall, tuple]]:
        """The choices of the current request, each with arguments of its own for transformers' methods.

        args: of the request; the fifth and the sixth are inputs and settings
        """
        before, (inputs, config), after = args[:4], args[4:6], args[6:]
        calls = split_choices(CURRENT.get(), self.generation_state.requests.max_queue)
        for call in calls:
            call.logprobs = self._logprobs(call)
        own = [dict(inputs) if call.prompt is None else {"input_ids": call.prompt} for call in calls]
        return [(call, (*before, each, copy.copy(config), *after)) for call, each in zip(calls, own)]

    def _streaming(self, *args: Any, **kwargs: Any) -> StreamingResponse:
        choices, stream = self._choices(*args), super()._streaming
        contexts = [context_of(call) for call, _ in choices]
        responses = [context.run(stream, *own, **kwargs) for context, (_, own) in zip(contexts, choices)]
        return responses[0] if len(responses) == 1 else interleave(responses, contexts)

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        choices, answer = self._choices(*args), super()._non_streaming
        answers = await together([(context_of(call), answer(*own, **kwargs)) for call, own in choices])
        body = merge_choices([json.loads(each.body) for each in answers], CURRENT.get().fields.get("n", 1))
        return JSONResponse(body | {"metrics": self._speculation([call for call, _ in choices])})

    def _build_chunk_sse(self, *args: Any, **kwargs: Any) -> str:
        call, is_last = CURRENT.get(), kwargs.get("usage") is not None
        if is_last:
            kwargs["finish_reason"] = _finish_reason(kwargs["finish_reason"])
        event = super()._build_chunk_sse(*args, **kwargs)
        logprobs = call.logprobs.take() if call.logprobs is not None and "role" not in kwargs else None
        if logprobs is None and not is_last and call.index == 0:
            return event
        chunk = json.loads(event.removeprefix("data: "))
        chunk["choices"][0]["index"] = call.index
        if logprobs is not None:
            chunk["choices"][0]["logprobs"] = logprobs
        if is_last:
            call.usage = chunk.pop("usage")
            _add_prediction(call.usage)
            usages = [each.usage for each in call.choices]
            if None not in usages:  # all other choices are complete
                return self._end_stream(chunk, add_usages(usages, call.fields.get("n", 1)))
        return _event(chunk)

    def _end_stream(self, chunk: dict, usage: dict) -> str:
        """The last events of a stream: a choice's last chunk, the usage if the client wants it, and the end.

        usage: of all choices
        """
        call = CURRENT.get()
        metrics = {"metrics": self._speculation(call.choices)}
        if not call.wants_usage:
            return _event(chunk | metrics) + DONE
        return _event(chunk) + _event(chunk | {"choices": [], "usage": usage} | metrics) + DONE


def _event(chunk: dict) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _add_prediction(usage: dict | None) -> None:
    """Put what became of the request's prediction, if it has one, into the usage of its answer."""
    call = CURRENT.get()
    if usage is not None and call.prediction is not None:
        output = call.output
        details = usage_details(call.prediction, output.generated_tokens, output.speculation)
        usage["completion_tokens_details"] = (usage.get("completion_tokens_details") or {}) | details


def _finish_reason(guess: str) -> str:
    """The reason why an answer ended. guess: made by transformers from the number of tokens."""
    reason = CURRENT.get().finish_reason
    return guess if guess == "tool_calls" and reason != "length" else reason


async def _with_error_objects(events: AsyncIterator[str], call: HttpCall) -> AsyncIterator[str]:
    """The events of a call's stream, with errors in OpenAI's form."""
    async for event in events:
        before, mark, after = event.partition(ERROR)
        if mark:
            error = error_object(500, after.removesuffix('"}\n\n'))
            if call.error is not None:
                error = error_object(call.error.status_code, call.error.detail, call.error.param, call.error.code)
            event = f"{before}data: {json.dumps({'error': error})}\n\n"
        yield event


class Chat(_Choosing, ChatCompletionHandler):
    """POST /v1/chat/completions."""

    fields, required = CHAT, "messages"


class Completion(_Choosing, CompletionHandler):
    """POST /v1/completions."""

    fields, required, uses_template = COMPLETION, "prompt", False

    def _read(self, body: dict) -> dict:
        fields, call = super()._read(body), CURRENT.get()
        if fields.get("max_tokens") == 0:
            if not fields.get("echo"):
                raise refuse("max_tokens", f"expected {COMPLETION['max_tokens'].expected}, got 0")
            fields["max_tokens"], call.drops_answer = 1, True
        if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
            raise refuse("best_of", f"expected the value of n, {fields.get('n', 1)}, because all answers are given")
        return fields

    def _characters(self, body: dict) -> int:
        return max(map(count_characters, list_prompts(body["prompt"])))

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """See transformers, whose handler takes one text."""
        tokenizer = self.generation_state.requests.tokenizer
        for prompt in list_prompts(body["prompt"]):
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
            CURRENT.get().prompts.append((ids, text if body.get("echo") else None))
        name, model, processor = self._resolve_model(body)
        config = self._build_generation_config(body, model.generation_config)
        parts = request_id, model, processor, name, {}, config, self.generation_state.requests, body.get("suffix")
        return self._streaming(*parts) if body["stream"] else await self._non_streaming(*parts)

    def _logprobs(self, call: HttpCall) -> CompletionLogprobs | None:
        requests = self.generation_state.requests
        if read_top(call.fields) is None:
            return None
        return CompletionLogprobs(requests.tokenizer, requests.bytes_of, call.echo)


class Response(_Checked, ResponseHandler):
    """POST /v1/responses."""

    fields, required = RESPONSE, "input"

    def _streaming(self, *args: Any, **kwargs: Any) -> StreamingResponse:
        response, call = super()._streaming(*args, **kwargs), CURRENT.get()
        told = _repeated(call.fields)
        response.body_iterator = mend_stream(response.body_iterator, lambda: call.finish_reason == "length", told)
        return response

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        response = json.loads((await super()._non_streaming(*args, **kwargs)).body)
        is_cut = CURRENT.get().finish_reason == "length"
        response |= _repeated(CURRENT.get().fields)
        return JSONResponse(close_answer(response, response["output"], is_cut))


def _repeated(fields: dict) -> dict:
    """The fields of a request that an answer of /v1/responses repeats; transformers writes its own values."""
    return {"tool_choice": fields.get("tool_choice", "auto")}


HANDLERS: dict[str, Callable] = {
    "ChatCompletionHandler": Chat,
    "CompletionHandler": Completion,
    "ResponseHandler": Response,
}
"""Our handlers by the names of transformers' handlers that they replace."""
