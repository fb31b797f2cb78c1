"""The tokens of a prompt, and the text of tokens, as vLLM spells them: POST /tokenize and POST /detokenize."""

from typing import Any

from fastapi.responses import JSONResponse

from .call import CURRENT
from .errors import refuse
from .fields import CHAT, FLAG, ID, TEXT, Field, check_fields, only
from .generation import flat_ids
from .handlers import Chat

OF_BOTH = {"model": TEXT, "return_token_strs": FLAG}
OF_TEXT = OF_BOTH | {"prompt": TEXT, "add_special_tokens": FLAG}
OF_CHAT = OF_BOTH | {name: CHAT[name] for name in ("messages", "tools", "chat_template_kwargs")}
OF_CHAT |= {name: only(value) for name, value in (("add_generation_prompt", True), ("add_special_tokens", False))}
"""Fields of /tokenize. A chat is a prompt as /v1/chat/completions makes it."""


class Tokenize(Chat):
    """POST /tokenize, of a `prompt` or of `messages`."""

    generates = False

    def _read(self, body: dict) -> dict:
        if "messages" in body:
            return check_fields(body, OF_CHAT, "messages")
        CURRENT.get().prompt_field = "prompt"
        return check_fields(body, OF_TEXT, "prompt")

    def _check(self, body: dict) -> dict:
        if "messages" in body:
            return super()._check(body)
        self._check_model(body)
        most = self.generation_state.requests.most_characters
        if len(body["prompt"]) > most:
            raise refuse("prompt", f"expected at most {most} characters, because a row holds no more")
        return body

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """See transformers. A text is no prompt of a chat."""
        if "messages" in body:
            return await super().handle_request(body, request_id)
        tokenizer, special = self.generation_state.requests.tokenizer, body.get("add_special_tokens", True)
        return self._told(tokenizer(body["prompt"], add_special_tokens=special)["input_ids"])

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        return self._told(flat_ids(args[4]["input_ids"]))

    def _told(self, ids: list[int]) -> JSONResponse:
        requests, strings = self.generation_state.requests, None
        if CURRENT.get().fields.get("return_token_strs"):
            strings = requests.tokenizer.convert_ids_to_tokens(ids)
        told = {"count": len(ids), "max_model_len": requests.row_tokens, "tokens": ids, "token_strs": strings}
        return JSONResponse(told)


class Detokenize(Chat):
    """POST /detokenize."""

    generates = False

    def _read(self, body: dict) -> dict:
        requests = self.generation_state.requests

        def are_tokens(value: Any) -> bool:
            if not isinstance(value, list) or len(value) > requests.row_tokens:
                return False
            return all(ID.accepts(each) and each < requests.embedded for each in value)  # guard: ids-of-tokens

        words = f"at most {requests.row_tokens} ids below {requests.embedded}"
        return check_fields(body, {"model": TEXT, "tokens": Field(are_tokens, words)}, "tokens")

    def _check(self, body: dict) -> dict:
        self._check_model(body)
        return body

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """The text of the tokens."""
        return JSONResponse({"prompt": self.generation_state.requests.tokenizer.decode(body["tokens"])})
