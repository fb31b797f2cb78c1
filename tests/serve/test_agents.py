"""Conversations of agents: bodies that their programs have sent, with the history that they keep of our answers."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_fixtures import events, save_tool_model, scripted

HERE = Path(__file__).parent
RECORDED = [
    pytest.param(each["path"], each["body"], id=f"{file.stem}-{number}")
    for file in sorted((HERE / "agents").glob("*.json"))
    for number, each in enumerate(json.loads(file.read_text()))
]
"""The first and the last request of conversations of five turns, whose long texts are replaced by their lengths."""
SAVE = save_tool_model
SERVER = dict(slots=4, served_model_name="tiny", options=dict(compile=False, num_draft_tokens=8, check=False))
CALL = '<think>I look.</think>Next.<tool_call>{"name": "%s", "arguments": {"input": "*** Begin"}}</tool_call>'
CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


def post(client, path: str, status: int = 200, **body) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize(("path", "body"), RECORDED)
def test_recorded_bodies_are_answered(client, path, body):
    name = "exec_command"
    limit = next((each for each in body if each.startswith("max_")), "max_output_tokens")
    body = body | {limit: 64}
    if body.get("tool_choice") == "required":
        pytest.importorskip("xgrammar", reason="needs xgrammar, which holds answers to calls")
    with scripted(client, CALL % name):
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert "error" not in {each.get("type") for each in events(response)} and name in response.text
    else:
        assert response.json()["usage"]


def test_tools_of_services_leave_the_prompt(client, caplog):
    function = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}, {"type": "mcp", "x": {}}]
    sizes = [
        post(client, RESPONSES, input="hello", tools=tools, max_output_tokens=4)["usage"]["input_tokens"]
        for tools in ([function], [*hosted, function], [], hosted)
    ]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
    theirs = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    counts = [
        post(client, f"{MESSAGES}/count_tokens", messages=HELLO, tools=tools)["input_tokens"]
        for tools in ([theirs], [search, theirs], [search], [])
    ]
    assert counts[0] == counts[1] > counts[2] == counts[3]
    reason = post(client, RESPONSES, 400, input="hello", tools=[{"type": "functoin", "name": "a"}])["error"]["message"]
    assert reason.startswith("tools[0].type: expected function, custom, namespace, or a hosted tool")


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_take_free_text(client, stream):
    tool = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    }
    inner = [{"type": "function", "name": "go", "parameters": {}}, {"type": "custom", "name": "say"}]
    space = {"type": "namespace", "name": "web", "tools": inner}
    calls = CALL % "patch" + '<tool_call>{"name": "web.go", "arguments": {"a": 1}}</tool_call>'
    calls += '<tool_call>{"name": "web.say", "arguments": {"input": "hi"}}</tool_call>'
    body = {"input": "hello", "tools": [tool, space], "stream": stream, "max_output_tokens": 200}
    with scripted(client, calls):
        response = client.post(RESPONSES, json=body)
    told = events(response) if stream else []
    output = told[-1]["response"]["output"] if stream else response.json()["output"]
    items = [item for item in output if item["type"] in ("custom_tool_call", "function_call")]
    assert [(each["type"], each["name"], each.get("namespace")) for each in items] == [
        ("custom_tool_call", "patch", None), ("function_call", "go", "web"), ("custom_tool_call", "say", "web")
    ]  # fmt: skip
    assert (
        items[0]["input"] == "*** Begin" and items[2]["input"] == "hi" and json.loads(items[1]["arguments"]) == {"a": 1}
    )
    if stream:
        kinds = [each["type"] for each in told]
        assert "response.custom_tool_call_input.delta" in kinds and "response.custom_tool_call_input.done" in kinds
    # The client sends the items back with its results.
    back = [{"role": "user", "content": "hello"}, *output]
    back += [
        {"type": "custom_tool_call_output", "call_id": items[0]["call_id"], "output": "done"},
        {
            "type": "function_call_output",
            "call_id": items[1]["call_id"],
            "output": [{"type": "input_text", "text": "ok"}],
        },
    ]
    post(client, RESPONSES, input=back, tools=[tool, space], max_output_tokens=4)
    chat = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
    with scripted(client, CALL % "patch"):
        message = post(client, CHATS, messages=HELLO, tools=[chat], max_tokens=200)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "patch", "input": "*** Begin"}
    history = [*HELLO, message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    post(client, CHATS, messages=history, tools=[chat], max_tokens=4)


def test_answers_are_kept_for_the_next_turn(client):
    with scripted(client, "<think>so</think>It is."):
        first = post(client, RESPONSES, input="hello", max_output_tokens=60)
        kept = post(client, RESPONSES, input="more", previous_response_id=first["id"], max_output_tokens=60)
        whole = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "more"}]
        sent = post(client, RESPONSES, input=whole, max_output_tokens=60)
        third = post(client, RESPONSES, input="and", previous_response_id=kept["id"], max_output_tokens=60)
        unkept = post(client, RESPONSES, input="hello", store=False, max_output_tokens=60)
    assert kept["usage"]["input_tokens"] == sent["usage"]["input_tokens"] < third["usage"]["input_tokens"]
    for name in (unkept["id"], "resp_none"):
        error = post(client, RESPONSES, 400, input="a", previous_response_id=name)["error"]
        assert error["code"] == "previous_response_not_found" and name in error["message"]


def test_kept_answers_have_bounds(monkeypatch):
    from types import SimpleNamespace

    from spec_compile.serve import responses
    from spec_compile.serve.errors import Refusal

    monkeypatch.setattr(responses, "MOST_KEPT", 2)
    kept = responses.KeptResponses()
    calls = [SimpleNamespace(fields={"input": "a"}, owner="me", http_id=str(number)) for number in range(3)]
    for call in calls:
        kept.keep(call, [])
    assert kept.items("me", "resp_2") == [{"role": "user", "content": "a"}]
    for owner, name in (("me", "resp_0"), ("other", "resp_2")):
        with pytest.raises(Refusal, match="previous_response_id"):
            kept.items(owner, name)
    monkeypatch.setattr(responses, "MOST_CHARACTERS", 10)
    kept.keep(calls[0], [])
    assert not kept._kept and kept._size == 0


def test_sealed_reasoning_comes_back(client):
    with scripted(client, "<think>a long thought</think>It is."):
        body = dict(input="hello", include=["reasoning.encrypted_content"], store=False, max_output_tokens=60)
        first = post(client, RESPONSES, **body)
    thought = first["output"][0]
    sealed = {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}
    sizes = []
    for item in (thought, sealed, sealed | {"encrypted_content": "gAAAA-another-server"}):
        items = [{"role": "user", "content": "hello"}, item, first["output"][1], {"role": "user", "content": "more"}]
        sizes.append(post(client, RESPONSES, input=items, max_output_tokens=4)["usage"]["input_tokens"])
    assert sizes[0] == sizes[1] > sizes[2]
    broken = [{"role": "user", "content": "a"}, sealed | {"encrypted_content": "spec_compile:%%%"}]
    assert "encrypted_content" in post(client, RESPONSES, 400, input=broken)["error"]["message"]


def test_systems_at_the_beginning_are_one(client):
    same = [
        dict(instructions="a", input=[{"role": "developer", "content": "b"}, *HELLO]),
        dict(input=[{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *HELLO]),
        dict(instructions="a\n\nb", input="hello"),
    ]
    sizes = {post(client, RESPONSES, **body, max_output_tokens=4)["usage"]["input_tokens"] for body in same}
    assert len(sizes) == 1
    system = [{"role": "system", "content": "mind"}]
    post(client, MESSAGES, messages=[*HELLO, *system], max_tokens=4)


def test_a_prefilled_answer_goes_on(client):
    with scripted(client, " and so on"):
        begun = [*HELLO, {"role": "assistant", "content": "It is"}]
        message = post(client, MESSAGES, messages=begun, max_tokens=60)
        chat = post(client, CHATS, messages=begun, continue_final_message=True, max_tokens=60)
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert message["content"][0]["text"].strip() == "and so on"
    error = post(client, CHATS, 400, messages=HELLO, continue_final_message=True)["error"]
    assert error["param"] == "continue_final_message"


def test_cached_tokens_are_told(client):
    prompt = [{"role": "user", "content": "def mean(values):\n" * 40}]
    for _ in range(2):
        chat = post(client, CHATS, messages=prompt, max_tokens=4)["usage"]
        message = post(client, MESSAGES, messages=prompt, max_tokens=4)["usage"]
        response = post(client, RESPONSES, input=prompt, max_output_tokens=4)["usage"]
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached == message["cache_read_input_tokens"] == response["input_tokens_details"]["cached_tokens"]
    assert message["input_tokens"] + cached == chat["prompt_tokens"] == response["input_tokens"]


def test_a_limit_of_messages_is_a_bound(client):
    answer = post(client, MESSAGES, messages=HELLO, max_tokens=10_000_000, stop_sequences=["e"])
    assert answer["usage"]["output_tokens"] > 0
    assert "max_tokens" in post(client, CHATS, 400, messages=HELLO, max_tokens=10_000_000)["error"]["message"]


@pytest.mark.slow
def test_the_sdks_of_node_read_every_event(client, tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    packages = ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod"]
    made = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--prefix", tmp_path, *packages], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"npm cannot fetch the packages: {made.stderr[-200:]}")
    script = tmp_path / "agents.mjs"
    script.write_text((HERE / "agents.mjs").read_text())
    with scripted(
        client, '<think>I look.</think>Next.<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
    ):
        run = subprocess.run(
            ["node", script, str(client.base_url)], capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
    assert run.returncode == 0, run.stderr[-3000:]
    told = [json.loads(line) for line in run.stdout.splitlines() if re.match(r"\{", line)]
    assert len(told) == 6
    for each in told:
        assert each["calls"] == [["look", {"at": "a"}]] and each["tokens"] > 0 and not each["errors"], each
        assert each["text"].strip() == "Next.", each
    thoughts = [each["thought"].strip() for each in told]
    assert thoughts == ["", "", *4 * ["I look."]]  # OpenAI's provider reads summaries of thoughts only
