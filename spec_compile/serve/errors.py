"""Errors in the form of OpenAI's or Anthropic's API, so that clients show the reason: `Refusal`, and all others."""

import json
import re
import traceback
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from ..errors import log

MESSAGES_PATH = "/v1/messages"
"""The path below which errors have Anthropic's form."""
ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's types of errors by status. Others are `invalid_request_error` below 500, and `api_error`."""
DEAD = "the worker died; the log has the reason"
RETRY_SECONDS = 1
"""The value of Retry-After if the queue is full or the server ends."""
MOST_SHOWN = 80
"""Characters of a client's value that a message quotes."""
LONGEST = 900
"""Characters of a message to a client."""
ADDRESS = re.compile(r"<[^<>]{0,200} at 0x[0-9a-fA-F]+>|0x[0-9a-fA-F]{7,}")
"""The text that Python gives to an object without a better one, and addresses of memory."""
LOCAL_PATH = re.compile(r"(?<![\w.:/])(~|\.{1,2})?(/[\w.@+-]+){2,}/?")
"""A path of a file."""


class Refusal(HTTPException):
    """A request that is not answered.

    status: HTTP's number
    reason: for the client
    param: the field that is at fault
    code: OpenAI's code for the reason
    retries: True if the same request may be answered later
    headers: further ones of the answer
    """

    def __init__(
        self, status: int, reason: str, param: str | None = None, code: str | None = None, retries: bool = False,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        later = {"Retry-After": str(RETRY_SECONDS)} if retries else {}
        super().__init__(status, tidy(reason), later | dict(headers or {}))
        self.param, self.code = param, code

    def rename(self, names: dict[str, str]) -> None:
        """Call the field by the client's name. names: by the server's, such as {"stop": "stop_sequences"}"""
        if self.param in names and self.detail.startswith(self.param):
            named = names[self.param]
            self.detail, self.param = named + self.detail[len(self.param) :], named


def refuse(field: str, reason: str, status: int = 400, code: str | None = None, retries: bool = False) -> Refusal:
    """The refusal of a field's value. field: the field, or a path into it such as "messages[0].role"."""
    return Refusal(status, f"{field}: {reason}", re.split(r"[\[.,]", field)[0], code, retries)


def tidy(reason: str) -> str:
    """A message for a client: one line of bounded length, without control characters and addresses of memory."""
    text = ADDRESS.sub("<object>", reason[: 4 * LONGEST])
    text = "".join(
        each if each.isprintable() else " " if each.isspace() else "\N{REPLACEMENT CHARACTER}" for each in text
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def quoted(error: BaseException) -> str:
    """The message of an exception of a library that tells what is wrong with a client's value, without local paths."""
    return LOCAL_PATH.sub("<path>", tidy(str(error)[:600]))


def shown(value: Any) -> str:
    """A client's value, for a message. It costs little for a large value."""
    if isinstance(value, (dict, list)) and len(value) > 4:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, str):
        return json.dumps(value[:MOST_SHOWN])
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "an int of more than 40 digits"
    try:
        return json.dumps(value)[:MOST_SHOWN]
    except (RecursionError, TypeError, ValueError):
        return f"a value of type {type(value).__name__}"


def error_object(refusal: Refusal) -> dict:
    """A refusal as the object in the field `error` of an answer."""
    status = refusal.status_code
    error_type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"message": tidy(refusal.detail), "type": error_type, "param": refusal.param, "code": refusal.code}


def error_response(refusal: Refusal) -> JSONResponse:
    """An answer that says why."""
    return JSONResponse({"error": error_object(refusal)}, refusal.status_code, refusal.headers)


def noted(details: BaseException | str) -> str:
    """Write an error's details to the log; returns the id under which they are there.

    Each line of them is marked and without control characters: they may quote a client, who must not be able to write
    lines of a log.
    """
    name = uuid.uuid4().hex[:16]
    lines = [details] if isinstance(details, str) else traceback.format_exception(details)
    told = "\n".join(f"    | {ascii(line)[1:-1]}" for line in "".join(lines).splitlines()[-200:])
    log.error("error %s: a request could not be answered\n%s", name, told)
    return name


def failed(details: BaseException | str) -> str:
    """The message to a client after an error that no client should cause. The log gets the details, under an id."""
    return f"the server failed; its log has the reason under error {noted(details)}"


def error_message(refusal: Refusal, request_id: str = "") -> dict:
    """An error in Anthropic's form."""
    status = refusal.status_code
    error_type = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": error_type, "message": tidy(refusal.detail)}, "request_id": request_id}


def error_at(path: str, refusal: Refusal, request_id: str = "") -> JSONResponse:
    """A refusal in the form of the endpoint at a path. A body that OpenAI's API refuses with 422 gets 400 at
    Anthropic's."""
    if not path.startswith(MESSAGES_PATH):
        return error_response(refusal)
    status = 400 if refusal.status_code == 422 else refusal.status_code
    told = {"request-id": request_id} if request_id else {}
    return JSONResponse(error_message(refusal, request_id), status, told | dict(refusal.headers or {}))


def failure(path: str, error: BaseException) -> JSONResponse:
    """The answer to a request whose handler raised an error that no client should cause."""
    return error_at(path, Refusal(500, failed(error)))


def add_handlers(app: FastAPI) -> None:
    """Give all errors of the application the form of the endpoint."""

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        if isinstance(error, Refusal):
            return error_at(request.url.path, error, request.state.request_id)
        reason, code, route = str(error.detail), None, f"{request.method[:20]} {shown(request.scope['path'])}"
        if error.status_code == 404:
            reason, code = f"there is no {route} on this server", "unknown_url"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            reason, code = f"{route} is not allowed; use {allowed}", "method_not_allowed"
        return error_response(Refusal(error.status_code, reason, code=code, headers=error.headers))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return failure(request.url.path, error)
