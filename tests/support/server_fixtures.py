"""A server in a thread of the test's process, over a model of two layers with the demo model's tokenizer."""

import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from spec_compile import speculate

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
PROMPT = "def mean(values):\n"
EAGER = {"compile": False, "num_draft_tokens": 8, "check": False}
CHATS, COMPLETIONS, RESPONSES, MESSAGES, COUNT = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
)
DIALECTS = COMPLETIONS, CHATS, RESPONSES, MESSAGES
JSON = {"Content-Type": "application/json"}


def save_model(folder: Path) -> Path:
    """Two layers of the demo model, and its tokenizer with a chat template and one token that the model lacks."""
    return _save(folder, ["<unknown>"], num_hidden_layers=2)


def save_whole(folder: Path) -> Path:
    """The demo model, and its tokenizer with a chat template."""
    return _save(folder, [])


def _save(folder: Path, tokens: list[str], **changes) -> Path:
    config = AutoConfig.from_pretrained(DEMO, **changes)
    AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", config=config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def load_alone(folder: Path) -> tuple:
    """The model of `save_model`, wrapped, and its tokenizer: for answers without a server."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    return speculate(model, **EAGER), AutoTokenizer.from_pretrained(folder)


def expected(alone: tuple, prompt: str, seed: int = 0, **options) -> str:
    """The answer of generate() to this request alone, as text."""
    model, tokenizer = alone
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, **options, pad_token_id=0)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# Requests, and what a client reads of answers.


def user(content) -> list[dict]:
    """A chat of one message."""
    return [{"role": "user", "content": content}]


def body(path: str, text="a", /, limit: int = 2, **fields) -> dict:
    """A request in the dialect of a path. limit: tokens of the answer"""
    prompt = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}.get(path, {"messages": user(text)})
    return prompt | {"max_output_tokens" if path == RESPONSES else "max_tokens": limit} | fields


def least(path: str) -> dict:
    """A request that the path answers."""
    others = {"/tokenize": {"messages": user("a")}, "/detokenize": {"tokens": [5]}, COUNT: {"messages": user("a")}}
    return others.get(path) or body(path)


def ask(client, path: str, text="a", /, limit: int = 2, **fields) -> SimpleNamespace:
    """What a client reads of the answer to a request of `body`."""
    usage = {"stream_options": {"include_usage": True}} if fields.get("stream") and path in (CHATS, COMPLETIONS) else {}
    return read(client.post(path, json=body(path, text, limit, **usage | fields)))


def together(client, path: str, bodies: list[dict], at_once: int = 16) -> list:
    """The responses to several requests, which are sent at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        return [*pool.map(lambda each: client.post(path, json=each), bodies)]


def read(response) -> SimpleNamespace:
    """Text, thoughts, calls (name, arguments), reason, usage, count of tokens and figures of an answer with one choice,
    whole or streamed, in the dialect of its path."""
    assert response.status_code == 200, response.text
    path, streams = response.request.url.path, response.headers["content-type"].startswith("text/event-stream")
    parts = events(response) if streams else [response.json()]
    said, usage = _READERS.get(path, _read_choice)(parts, streams), parts[-1].get("usage") or {}
    if path == MESSAGES and streams:
        usage = parts[-2]["usage"]
    if path == RESPONSES and streams:
        usage = parts[-1]["response"]["usage"]
    text, thoughts, calls, reason = said
    counts = [usage[name] for name in ("completion_tokens", "output_tokens") if name in usage]
    metrics = next((part["metrics"] for part in reversed(parts) if "metrics" in part), {})
    return SimpleNamespace(
        text=text, thoughts=thoughts, calls=calls, reason=reason, usage=usage, count=sum(counts), parts=parts,
        figures=metrics.get("speculative_decoding"),
    )  # fmt: skip


def _read_choice(parts: list[dict], streams: bool) -> tuple:
    choices = [choice for part in parts for choice in part["choices"]]
    messages = [choice.get("delta" if streams else "message", choice) for choice in choices]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    text, thoughts = (
        "".join(message.get(name) or message.get(other, "") or "" for message in messages)
        for name, other in (("content", "text"), ("reasoning_content", ""))
    )
    return text, thoughts, [(call["name"], call["arguments"]) for call in calls], choices[-1]["finish_reason"]


def _read_response(parts: list[dict], streams: bool) -> tuple:
    whole = parts[-1]["response"] if streams else parts[0]
    items = whole["output"]
    said = {kind: [item for item in items if item["type"] == kind] for kind in ("message", "reasoning")}
    text, thoughts = ("".join(item["content"][0]["text"] for item in said[kind]) for kind in said)
    if streams:
        assert "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta") == text
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return text, thoughts, calls, whole["status"]


def _read_message(parts: list[dict], streams: bool) -> tuple:
    if not streams:
        blocks, reason = parts[0]["content"], parts[0]["stop_reason"]
        calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    else:
        blocks = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
        calls, reason = None, parts[-2]["delta"]["stop_reason"]
    text, thoughts = ("".join(block.get(name, "") for block in blocks) for name in ("text", "thinking"))
    return text, thoughts, calls, reason


_READERS = {RESPONSES: _read_response, MESSAGES: _read_message}


def refusal(response, field: str | None = None, status: int = 400) -> str:
    """The message of an error in the form of its endpoint, which names this field."""
    assert response.status_code == status, response.text
    told = response.json()
    error = told["error"]
    if response.request.url.path.startswith(MESSAGES):
        assert told.keys() == {"type", "error", "request_id"} and error.keys() == {"type", "message"}, told
    else:
        assert error.keys() == {"message", "type", "param", "code"} and error["param"] == field, error
    assert field is None or field in error["message"], error
    return error["message"]


def events(response) -> list[dict]:
    """The objects of a stream, without the mark of its end."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# The server.


@contextmanager
def running(folder: Path, grace: float = 30.0, runner: dict | None = None, **settings):
    """A client of a server that listens at a free port, with the runner as its attribute.

    runner: further arguments of `Runner`. settings: of `build`
    """
    import httpx

    from spec_compile.serve.runner import Runner
    from spec_compile.serve.server import build

    flags = {"dtype": "float32", "device": "cpu", "port": 0, "host": "127.0.0.1", "log_level": "error"}
    server = build(folder, **flags | {"algo": "ngram", "options": EAGER} | settings)
    server.config.log_config = server.config.log_level = None
    runner = Runner(server, grace, **runner or {})
    thread = threading.Thread(target=runner.run)
    # It would let Python look for garbage among all that earlier tests have left: see `worker`.
    unfreeze = mock.patch.object(gc, "unfreeze")
    unfreeze.start()
    thread.start()
    try:
        wait_until(lambda: runner.started)
        port = runner.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.runner = runner
            yield client
    finally:
        runner.should_exit = True
        thread.join(30)
        unfreeze.stop()


def wait_until(is_true, seconds: float = 30.0) -> None:
    """Return once `is_true()`; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def scripted(client, text: str):
    """Answers of the server are this text and the end; other processors of a request come before the script."""
    requests, made = client.runner.requests, client.runner.requests._options
    tokenizer = requests.tokenizer
    script = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    def options(call, ids, config):
        config.eos_token_id = tokenizer.eos_token_id
        given = made(call, ids, config)
        return given | {"logits_processor": [*given.get("logits_processor", []), Script(script, len(ids))]}

    requests._options = options
    try:
        yield
    finally:
        del requests._options


class Script(LogitsProcessor):
    """Forces the tokens of an answer."""

    def __init__(self, tokens: list[int], prompt_length: int):
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids, scores):
        gained = input_ids.shape[1] - self.prompt_length
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[min(gained, len(self.tokens) - 1)]] = 0
        return forced


TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% for message in messages %}"
    "<|{{ message['role'] }}|>"
    "{% if message.get('reasoning_content') %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] }}{% for call in message.get('tool_calls', []) %}<tool_call>"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
"""A chat template with tools and thinking."""
TOOL_ANSWER = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|endoftext|>", "content": "text"},
    },
}  # fmt: skip
"""The form of answers under `TOOL_TEMPLATE`."""


def save_tool_model(folder: Path) -> Path:
    """The model of `save_model` with `TOOL_TEMPLATE`."""
    save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, TOOL_ANSWER
    tokenizer.save_pretrained(folder)
    return folder
