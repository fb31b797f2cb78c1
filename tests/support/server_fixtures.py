"""A server in a thread of the test's process, over a model of two layers with the demo model's tokenizer."""

import gc
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from spec_compile import speculate

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
PROMPT = "def mean(values):\n"
EAGER = {"compile": False, "num_draft_tokens": 8, "check": False}


def save_model(folder: Path) -> Path:
    """Two layers of the demo model, and its tokenizer with a chat template and one token that the model lacks."""
    config = AutoConfig.from_pretrained(DEMO, num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", config=config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["<unknown>"])
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


def events(response) -> list[dict]:
    """The objects of a stream, without the mark of its end."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


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
