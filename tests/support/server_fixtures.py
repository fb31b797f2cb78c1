"""A server in a thread of the test's process, over a model of two layers with the demo model's tokenizer."""

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
    """The objects of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]


@contextmanager
def running(folder: Path, grace: float = 30.0, **settings):
    """A client of a server that listens at a free port, with the runner as its attribute."""
    import httpx

    from spec_compile.serving.drain import Runner
    from spec_compile.serving.server import build

    flags = {"dtype": "float32", "device": "cpu", "port": 0, "host": "127.0.0.1", "log_level": "error"}
    server = build(folder, **flags | {"algo": "ngram", "options": EAGER} | settings)
    server.config.log_config = server.config.log_level = None
    runner = Runner(server, grace)
    thread = threading.Thread(target=runner.run)
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


def wait_until(is_true, seconds: float = 30.0) -> None:
    """Return once `is_true()`; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
