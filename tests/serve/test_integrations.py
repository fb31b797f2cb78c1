"""Clients of other libraries with this server: `transformers chat`, smolagents and LangChain."""

import io
import json
import sys

import pytest
from server_fixtures import EAGER, expected, scripted

chat = pytest.importorskip("transformers.cli.chat")
PROMPTS = {
    "system_prompt": "Answer with code.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": ""},
}
"""Of an agent, short enough for a row of the demo model."""
SERVER = dict(options=EAGER)


def talk(client, folder, monkeypatch, lines, *flags):
    """The answers, each with the reason of its end, that a user sees who types these lines."""
    answers, real = [], chat.RichInterface.stream_output

    async def stream_output(self, stream):
        answers.append(await real(self, stream))
        return answers[-1]

    monkeypatch.setattr(chat.RichInterface, "stream_output", stream_output)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    chat.Chat(str(folder), f"{client.base_url}/v1", ["do_sample=False", *flags], user="tester")
    return answers


def test_turns_of_a_chat(client, folder, alone, monkeypatch, capsys):
    """The second prompt has the first answer, and the settings that were changed between them."""
    lines = ["a mean", "n", "!set max_new_tokens=5 repetition_penalty=1.5", "a stack", "n", "!exit"]
    answers = talk(client, folder, monkeypatch, lines, "max_new_tokens=8")
    first = expected(alone, "# a mean\n", max_new_tokens=8, do_sample=False)
    prompt = f"# a mean\n# {first}\n# a stack\n"
    second = expected(alone, prompt, max_new_tokens=5, do_sample=False, repetition_penalty=1.5)
    assert answers == [(first, "length"), (second, "length")]
    shown = capsys.readouterr().out
    assert "was already loaded" in shown and "Continue generating?" in shown


def test_an_answer_ends_at_the_models_own_end(client, folder, alone, monkeypatch):
    """The settings that the command sends do not name it."""
    model = client.runner.requests.manager.model
    first = expected(alone, "# a mean\n", max_new_tokens=8, do_sample=False)
    end = alone[1](first)["input_ids"][3]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    ((text, reason),) = talk(client, folder, monkeypatch, ["a mean", "!exit"], "max_new_tokens=8")
    assert reason == "stop" and first.startswith(text) and len(text) < len(first)


def test_another_model_is_refused_by_name(client, folder, monkeypatch):
    with pytest.raises(RuntimeError, match="model: there is no model 'other' here, only"):
        talk(client, "other", monkeypatch, [])
    response = client.post("/load_model", json={"model": str(folder)})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert json.loads(response.text.removeprefix("data: "))["status"] == "ready"
    assert client.post("/load_model", json={}).json()["error"]["param"] == "model"


def test_an_agent_of_smolagents(client, folder, alone):
    """Its streams, and an agent whose answer is code that calls a tool."""
    smolagents = pytest.importorskip("smolagents")
    settings = {"api_base": f"{client.base_url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 8}
    engine = smolagents.OpenAIServerModel(str(folder), flatten_messages_as_text=True, **settings)
    messages = [smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "a mean"}])]
    text = expected(alone, "# a mean\n", max_new_tokens=8, do_sample=False)
    answer = engine.generate(messages)
    assert answer.content == text and answer.token_usage.output_tokens == 8
    assert "".join(piece.content or "" for piece in engine.generate_stream(messages)) == text

    @smolagents.tool
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: any number
        """
        return 2 * number

    engine = smolagents.OpenAIServerModel(str(folder), flatten_messages_as_text=True, **settings | {"max_tokens": 64})
    agent = smolagents.CodeAgent([double], engine, verbosity_level=0, instructions="", prompt_templates=PROMPTS)
    with scripted(client, "<code>\nfinal_answer(double(21))\n</code>"):
        assert agent.run("the double of 21") == 42


def test_a_chat_of_langchain(client, folder, alone):
    langchain = pytest.importorskip("langchain_openai")
    settings = {"base_url": f"{client.base_url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 8}
    chat = langchain.ChatOpenAI(model=str(folder), **settings)
    text = expected(alone, "# a mean\n", max_new_tokens=8, do_sample=False)
    answer = chat.invoke("a mean")
    assert answer.content == text and answer.usage_metadata["output_tokens"] == 8
    assert "".join(piece.content for piece in chat.stream("a mean")) == text
