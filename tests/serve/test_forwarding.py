"""A request as data, an ASGI app's answer in parts, and which replica has read which beginnings of prompts."""

import asyncio
import json
import pickle

import pytest

from spec_compile.serve.forwarding import BLOCK, MOST_BLOCKS, AnswerHead, HttpRequest, PrefixMap, answer, prompt_keys

LONG = "".join(f"line {number}, " for number in range(200))


def keys(**body):
    return prompt_keys(json.dumps(body).encode())


def common(first, second):
    """The number of blocks with which two lists begin alike."""
    return next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), min(len(first), len(second)))


def test_prompts_that_begin_alike_have_the_same_first_keys():
    place = 5 * BLOCK
    first, second = keys(prompt=LONG), keys(prompt=LONG[:place] + "x" + LONG[place + 1 :])
    assert len(first) == len(second) == (len(LONG) + 2) // BLOCK > 6
    assert common(first, second) == 5 and first == keys(temperature=0.5, prompt=LONG, stream=True)
    assert not common(first, keys(prompt="x" + LONG)) and len({*first}) == len(first)
    assert not common(first, keys(prompt=LONG, model="an adapter"))
    salted = keys(prompt=LONG, cache_salt="s")
    assert salted == keys(prompt=LONG, cache_salt="s") and not common(first, salted)
    assert not common(salted, prompt_keys(json.dumps({"prompt": LONG, "cache_salt": "s"}).encode(), "key"))


def test_a_conversation_that_goes_on_keeps_its_keys():
    turns = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": LONG},
        {"role": "user", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    begun, later = keys(tools=tools, messages=turns[:2]), keys(messages=turns, tools=tools)
    assert common(begun, later) >= len(begun) - 1 > 5


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"a": 1}'])
def test_a_body_without_a_prompt_has_no_keys(data):
    assert prompt_keys(data) == []


def test_a_long_prompt_has_a_bounded_number_of_keys():
    assert len(keys(prompt="a" * 10**6)) == MOST_BLOCKS


def test_the_replica_that_has_read_most_comes_first():
    known = PrefixMap()
    known.add([1, 2], "a")
    known.add([1, 2, 3, 4], "b")
    known.add([9, 3], "c")
    assert known.lengths([1, 2, 3, 5]) == {"a": 2, "b": 3} and not known.lengths([7, 1, 2])
    idle = dict.fromkeys("abc", 0)
    first, others = known.rank([1, 2, 3], idle, 4)
    assert first == ["b"] and sorted(others) == ["a", "c"]
    assert known.rank([1, 2, 3], idle | {"b": 3}, 4)[0] == ["b"]
    assert known.rank([1, 2, 3], idle | {"b": 4}, 4)[0] == ["a"]  # b has too many requests
    assert sorted(known.rank([5], idle, 4)[0]) == ["a", "b", "c"] and known.rank([1], {}, 4) == []


def test_of_replicas_that_have_read_as_much_the_less_busy_one_comes_first():
    known = PrefixMap()
    for replica in "abc":
        known.add([1, 2], replica)
    assert known.rank([1, 2, 3], {"a": 3, "b": 1, "c": 2}, 4)[0] == ["b"]


def test_beginnings_that_were_not_used_for_long_are_dropped():
    known = PrefixMap(most=4)
    known.add([1, 2], "a")
    known.add([3, 4], "b")
    known.add([1, 2], "a")
    known.add([5], "b")
    assert known.lengths([1, 2]) == {"a": 2} and not known.lengths([3, 4]) and known.lengths([5]) == {"b": 1}


def test_replicas_that_ended_are_forgotten():
    known = PrefixMap()
    known.add([1, 2], "a")
    known.add([1], "b")
    known.keep({"b", "c"})
    assert known.lengths([1, 2]) == {"b": 1}


# Answers in parts

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
