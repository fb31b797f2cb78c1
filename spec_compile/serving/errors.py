"""Errors in OpenAI's form, so that its clients show the reason: `Refusal`, and the handlers of all other errors."""

import json
import logging
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

log = logging.getLogger("spec_compile")

ERROR = 'data: {"error": "'
"""The beginning of an error in a stream of transformers. Within JSON these quotes would be escaped."""
RETRY_SECONDS = 1
"""The value of Retry-After if the queue is full or the server ends."""
MOST_SHOWN = 80
"""Characters of a client's value that a message quotes."""


class Refusal(HTTPException):
    """A request that is not answered.

    status: of HTTP
    reason: for the client
    param: the field that is at fault
    code: OpenAI's code for the reason
    retries: True if the same request may be answered later
    """

    def __init__(
        self, status: int, reason: str, param: str | None = None, code: str | None = None, retries: bool = False
    ):
        super().__init__(status, reason, {"Retry-After": str(RETRY_SECONDS)} if retries else None)
        self.param, self.code = param, code


def refuse(field: str, reason: str) -> Refusal:
    """The refusal of a field's value. field: the field, or a path into it such as "messages[0].role"."""
    return Refusal(400, f"{field}: {reason}", field.partition("[")[0].partition(".")[0])


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


def error_object(status: int, reason: str, param: str | None = None, code: str | None = None) -> dict:
    """The object in the field `error` of an answer of this status."""
    error_type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"message": reason, "type": error_type, "param": param, "code": code}


def error_response(
    status: int, reason: str, param: str | None = None, code: str | None = None, headers: dict | None = None
) -> JSONResponse:
    """An answer of this status that says why."""
    return JSONResponse({"error": error_object(status, reason, param, code)}, status, headers)


def failure(error: Exception) -> JSONResponse:
    """The answer to a request whose handler raised an error that no client should cause."""
    log.error("a request could not be answered", exc_info=error)
    return error_response(500, f"the server failed: {type(error).__name__}: {error}")


def add_handlers(app: FastAPI) -> None:
    """Give all errors of the application OpenAI's form."""

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        if isinstance(error, Refusal):
            return error_response(error.status_code, error.detail, error.param, error.code, error.headers)
        reason, code, route = str(error.detail), None, f"{request.method} {request.url.path}"
        if error.status_code == 404:
            reason, code = f"there is no {route} on this server", "unknown_url"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            reason, code = f"{route} is not allowed; use {allowed}", "method_not_allowed"
        return error_response(error.status_code, reason, None, code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return error_response(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    @app.exception_handler(CBWorkerDeadError)
    async def dead(request: Request, error: CBWorkerDeadError) -> JSONResponse:
        return error_response(503, str(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return failure(error)
