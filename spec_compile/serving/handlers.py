"""transformers' request handlers, with checked fields, settings for each request, and what speculation did."""

import json
from collections.abc import Callable
from typing import Any

import jinja2
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

from .call import CURRENT
from .fields import check_fields, has_own_limit
from .speculation import speculation_fields


class _Checked:
    """Put in front of a handler of transformers."""

    required: str
    """The field that has the prompt."""
    uses_template = True
    """Whether the prompt is made by the chat template."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """Answer a request, as transformers does; HTTPException 400 that names the field if it cannot be served."""
        self._validate_request(body)  # unknown fields: 422
        try:
            check_fields(body, self.required)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        CURRENT.get().has_own_limit = has_own_limit(body)
        try:
            return await super().handle_request(body, request_id)
        except jinja2.TemplateError as error:
            raise HTTPException(400, f"{self.required}: the chat template refuses it: {error}") from error

    def _resolve_model(self, body: dict) -> tuple:
        name, model, processor = super()._resolve_model(body)
        if self.uses_template and getattr(processor, "chat_template", None) is None:
            raise HTTPException(400, f"{self.required}: the model has no chat template; use /v1/completions")
        return name, model, processor

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict], modality: Any) -> list[dict]:
        """transformers' own; HTTPException 400 if a message has another form."""
        try:
            return BaseHandler.get_processor_inputs_from_messages(messages, modality)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"messages: expected objects with role and content, got another form: {type(error).__name__} {error}"
            raise HTTPException(400, text) from error

    def _build_generation_config(self, body: dict, defaults: GenerationConfig, use_cb: bool = False) -> Any:
        """The settings of this request. A temperature asks for sampling; a seed holds for this request alone."""
        body = dict(body)
        seed = body.pop("seed", None)  # transformers would seed the process
        config = super()._build_generation_config(body, defaults, use_cb=use_cb)
        config.use_cache = True
        if body.get("temperature"):
            config.do_sample = True
        config.seed = seed
        return config

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **kwargs)
        body = json.loads(response.body)
        for choice in body.get("choices", []):
            choice["finish_reason"] = _finish_reason(choice["finish_reason"])
        body["metrics"] = self._speculation()
        return JSONResponse(body)

    def _speculation(self) -> dict:
        return speculation_fields(CURRENT.get().output, self.generation_state.requests.num_spec_tokens)


class _Chunked(_Checked):
    """A handler whose streams are of chunks, the last of which has `usage`."""

    def _build_chunk_sse(self, *args: Any, **kwargs: Any) -> str:
        if kwargs.get("usage") is None:
            return super()._build_chunk_sse(*args, **kwargs)
        kwargs["finish_reason"] = _finish_reason(kwargs["finish_reason"])
        chunk = json.loads(super()._build_chunk_sse(*args, **kwargs).removeprefix("data: "))
        chunk["metrics"] = self._speculation()
        return self.chunk_to_sse(f"data: {json.dumps(chunk)}\n\n")


def _finish_reason(guess: str) -> str:
    """Why an answer ended. guess: transformers' guess from the number of tokens."""
    return guess if guess == "tool_calls" else CURRENT.get().output.finish_reason


class Chat(_Chunked, ChatCompletionHandler):
    """POST /v1/chat/completions."""

    required = "messages"


class Completion(_Chunked, CompletionHandler):
    """POST /v1/completions."""

    required, uses_template = "prompt", False


class Response(_Checked, ResponseHandler):
    """POST /v1/responses."""

    required = "input"


HANDLERS: dict[str, Callable] = {
    "ChatCompletionHandler": Chat,
    "CompletionHandler": Completion,
    "ResponseHandler": Response,
}
"""Ours, by the name of transformers' own."""
