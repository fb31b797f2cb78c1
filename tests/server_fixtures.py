"""A server in a thread of the test's process, over a model of two layers with the demo model's tokenizer."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parent.parent / "examples" / "tiny_coder"
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


@contextmanager
def running(folder: Path, grace: float = 30.0, **settings):
    """A client of a server that listens at a free port, with the runner as its attribute."""
    import httpx

    from spec_compile.serving.drain import Runner
    from spec_compile.serving.server import build

    flags = {"dtype": "float32", "device": "cpu", "port": 0, "host": "127.0.0.1", "log_level": "error"}
    server = build(folder, "ngram", EAGER, **flags | settings)
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
