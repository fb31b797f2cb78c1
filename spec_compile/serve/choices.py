"""The choices of one HTTP request: `n` answers to each of its prompts, each with an `HttpCall` of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

from fastapi.responses import StreamingResponse

from .call import CURRENT, HttpCall
from .errors import ERROR, refuse


def split(call: HttpCall, most: int) -> list[HttpCall]:
    """The calls of the choices, n for each prompt in turn; the request's own call if there is one choice.

    most: choices that one request may have

    With two prompts, n = 3 and seed = 7, choice 4 is the second one of the second prompt and has seed 8. Refusal if
    there are too many choices.
    """
    n, prompts = call.fields.get("n", 1), call.prompts or [(None, None)]
    count = n * len(prompts)
    if count > most:
        field = "prompt" if len(prompts) > 1 else "n"
        raise refuse(field, f"{count} choices are more than the {most} requests that may wait here; ask for fewer")
    calls = [replace(call) for _ in range(count)] if count > 1 else [call]
    for index, each in enumerate(calls):
        prompt, number = divmod(index, n)
        each.index, (each.prompt, each.echo) = index, prompts[prompt]
        if number and "seed" in call.fields:
            each.fields = call.fields | {"seed": call.fields["seed"] + number}
        each.choices = calls
    call.choices = calls
    for each in calls:  # the client may have left before it could be told to them
        each.is_gone |= call.is_gone
    return calls


def context_of(call: HttpCall) -> Context:
    """A context in which the call is the current one."""
    context = copy_context()
    context.run(CURRENT.set, call)
    return context


def add_usages(usages: Sequence[dict], n: int) -> dict:
    """The usage of all choices: of the prompt of each n choices once, and of all answers."""
    prompt = sum(usage["prompt_tokens"] for usage in usages[::n])
    answer = sum(usage["completion_tokens"] for usage in usages)
    total = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    details = [usage["completion_tokens_details"] for usage in usages if "completion_tokens_details" in usage]
    if details:
        total["completion_tokens_details"] = {name: sum(each[name] for each in details) for name in details[0]}
    return total


def merge(bodies: Sequence[dict], n: int) -> dict:
    """The answer to a request. bodies: the answers of its choices, in order"""
    choices = [choice | {"index": index} for index, body in enumerate(bodies) for choice in body["choices"]]
    return bodies[0] | {"choices": choices, "usage": add_usages([body["usage"] for body in bodies], n)}


def interleave(responses: Sequence[StreamingResponse], contexts: Sequence[Context]) -> StreamingResponse:
    """The events of several streams in the order in which they are made. An error in one of them ends all."""
    events: asyncio.Queue = asyncio.Queue(maxsize=1)  # so that a slow client holds up all streams
    turns = asyncio.Lock()  # unlike the queue it serves in order

    async def put(event: Any) -> None:
        async with turns:
            await events.put(event)

    async def read(response: StreamingResponse) -> None:
        try:
            async for event in response.body_iterator:
                await put(event)
            await put(None)
        except Exception as error:
            await put(error)

    async def together() -> AsyncIterator[str]:
        tasks = [asyncio.create_task(read(each), context=context) for each, context in zip(responses, contexts)]
        try:
            left = len(tasks)
            while left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                left -= event is None
                if event is not None:
                    yield event
                    if ERROR in event:
                        return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return StreamingResponse(together(), media_type=responses[0].media_type)
