"""A request as data, and an ASGI app's answer in parts."""

import asyncio
import pickle

import pytest

from spec_compile.serve.forwarding import AnswerHead, HttpRequest, answer

SENT = HttpRequest("POST", "/a", b"b=1", [(b"content-type", b"text/plain")], b"the body")


async def echo(scope, receive, send):
    message = await receive()
    await send({"type": "http.response.start", "status": 201, "headers": [(b"x", b"y")]})
    for part in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], message["body"]):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"end"})


def collect(app, sent=SENT):
    async def parts():
        return [part async for part in answer(app, sent)]

    return asyncio.run(parts())


def test_an_answer_comes_in_parts():
    """Parts that are ready at the same time come as one."""
    assert collect(echo, pickle.loads(pickle.dumps(SENT))) == [
        AnswerHead(201, [(b"x", b"y")]), b"POST/ab=1the body", b"end",
    ]  # fmt: skip


def test_the_error_of_an_app_is_raised():
    async def fail(scope, receive, send):
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        collect(fail)


def test_an_iterator_that_is_closed_early_is_a_client_that_leaves():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200})
        seen.append(await receive())

    async def leave():
        parts = answer(app, SENT)
        assert (await anext(parts)).status == 200
        await parts.aclose()

    asyncio.run(leave())
    assert seen == [{"type": "http.disconnect"}]
