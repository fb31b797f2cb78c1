"""/v1/responses through OpenAI's client: events in order, each item once, calls of tools with their arguments."""

import json

import pytest
from server_fixtures import CHATS, RESPONSES, ask, save_tool_model, scripted

CALL = '<tool_call>{"name": "look", "arguments": {"place": "Rome"}}</tool_call>'
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
BODY = {"model": "tiny", "input": "hi", "tools": TOOLS, "max_output_tokens": 200}
ITEMS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
SAVE = save_tool_model
SERVER = dict(slots=2, served_model_name="tiny")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"<think>so</think>It is.{CALL}{CALL}", ["reasoning", "message", "function_call", "function_call"]),
        (CALL, ["function_call"]), ("It is.", ["message"]), ("", ["message"]),
    ],
    ids=["all", "a call", "a text", "nothing"],
)  # fmt: skip
def test_events_of_each_item(client, sdk, text, kinds):
    with scripted(client, text):
        whole = sdk.responses.create(**BODY)
        events = [*sdk.responses.create(**BODY, stream=True)]
        with sdk.responses.stream(**BODY) as stream:
            final = [*stream] and stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert (
        last.type == "response.completed"
        and last.response.usage.total_tokens == whole.usage.total_tokens
        and whole.usage.output_tokens > 0
    )
    assert [item.type for item in whole.output] == kinds == [item.type for item in final.output]
    assert [item.type for item in last.response.output] == kinds
    assert len({item.id for item in last.response.output}) == len(kinds)
    for index, (kind, item) in enumerate(zip(kinds, last.response.output)):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[-1].type == "response.output_item.done"
        assert own[0].item.id == own[-1].item.id == item.id
        assert all(event.item_id == item.id for event in own if hasattr(event, "item_id"))
        name = f"response.{ITEMS[kind]}"
        pieces = "".join(event.delta for event in own if event.type == f"{name}.delta")
        (done,) = [event for event in own if event.type == f"{name}.done"]
        assert pieces == (done.arguments if kind == "function_call" else done.text)
        if kind == "function_call":
            assert own[0].item.arguments == "" and json.loads(item.arguments) == {"place": "Rome"}
            assert item.name == "look" and item.call_id


def test_the_results_of_calls_go_on(client, sdk):
    with scripted(client, CALL):
        first = sdk.responses.create(**BODY)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    with scripted(client, "It is sunny."):
        assert sdk.responses.create(**BODY | {"input": items}).output_text == "It is sunny."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "It is.", "<think>so</think>It is.", "", f"It is.{CALL}{CALL}", f"<think>so</think>{CALL}",
        f"<think>so</think>It is.{CALL}", "<think>so", '<tool_call>{"name": "look", "arguments": "Rome"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    ],
)  # fmt: skip
def test_an_answer_is_an_input(client, sdk, monkeypatch, stream, text):
    """`input += response.output`, as OpenAI's guide has it, also as plain objects, and whatever the answer ends in."""
    requests, seen = client.runner.requests, []
    is_cut = text == "<think>so"
    limit = len(requests.tokenizer(text)["input_ids"]) if is_cut else 200
    with scripted(client, text):
        body = BODY | {"max_output_tokens": limit, "stream": stream}
        answer = [*sdk.responses.create(**body)][-1].response if stream else sdk.responses.create(**body)
    output = answer.output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in output
        if item.type == "function_call"
    ]
    asked = {"role": "user", "content": "hi"}
    prompt = text + "</think>" * is_cut + "<|tool|>sunny" * len(results)
    monkeypatch.setattr(requests, "_check_room", lambda call, ids, config: seen.append(requests.tokenizer.decode(ids)))
    for items in (output, [item.to_dict() for item in output], [item.model_dump() for item in output]):
        with scripted(client, "Well."):
            answer = sdk.responses.create(**BODY | {"input": [asked, *items, *results, asked], "tools": []})
        assert answer.output_text == "Well."
        assert seen.pop() == f"<|user|>hi<|assistant|>{prompt}<|user|>hi<|assistant|>"
    assert not any(hasattr(item, "annotations") for item in output)


BROKEN = (
    '{"name": "look", "arguments": {', "5", "[1]", "{}", '{"name": "f"}', '{"name": 5, "arguments": {}}', "", "[" * 500,
)  # fmt: skip
"""Texts within the marks of a call that are none."""


@pytest.mark.parametrize("inside", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_complete_call_that_cannot_be_read_is_text(client, path, inside):
    """Also after thoughts and between a text and a good call, whole and in a stream."""
    bad, flat = f"<tool_call>{inside}</tool_call>", {name: TOOLS[0][name] for name in ("name", "parameters")}
    tools = TOOLS if path == RESPONSES else [{"type": "function", "function": flat}]
    with scripted(client, f"<think>{bad}</think>It is {bad}{CALL}"):
        for stream in (False, True):
            answer = ask(client, path, "hi", 1200, tools=tools, stream=stream)
            assert (answer.thoughts, answer.text) == (bad, f"It is {bad}")
            assert answer.calls == [("look", '{"place": "Rome"}')]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_the_choice_of_tools_is_repeated(sdk, choice):
    body = BODY | {"max_output_tokens": 2} | ({} if choice is None else {"tool_choice": choice})
    assert sdk.responses.create(**body).tool_choice == (choice or "auto")
    told = [
        event.response.tool_choice for event in sdk.responses.create(**body, stream=True) if "response" in vars(event)
    ]
    assert len(told) == 3 and {*told} == {choice or "auto"}


def test_an_answer_at_its_limit_is_incomplete(client, sdk):
    body = BODY | {"max_output_tokens": 4, "temperature": 0}
    whole, last = sdk.responses.create(**body), [*sdk.responses.create(**body, stream=True)][-1]
    assert last.type == "response.incomplete" and whole.status == last.response.status == "incomplete"
    assert whole.incomplete_details.reason == last.response.incomplete_details.reason == "max_output_tokens"


def test_a_text_after_a_call_is_a_message_of_its_own(client, sdk):
    with scripted(client, f"a{CALL}b"):
        events = [*sdk.responses.create(**BODY, stream=True)]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2] and len({event.item.id for event in done}) == 3
    assert [done[index].item.content[0].text for index in (0, 2)] == ["a", "b"]
