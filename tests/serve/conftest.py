"""The model, the server and the clients that tests share. A test file may have fixtures of its own in their place.

A file chooses its model by `SAVE`, a function of server_fixtures, and its server by `SERVER`, arguments of `running`.
"""

import importlib.util

import pytest
from server_fixtures import load_alone, running, save_model
from transformers import AutoTokenizer

NEEDED = ("fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]  # the extra `serve` is not installed, or the client of the tests


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The folder of a model."""
    return getattr(request.module, "SAVE", save_model)(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(request, folder):
    """A client of a server of the model."""
    with running(folder, **getattr(request.module, "SERVER", {})) as client:
        yield client


@pytest.fixture(scope="module")
def alone(folder):
    """The model without a server, and its tokenizer."""
    return load_alone(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    """The tokenizer of the model."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sdk(client):
    """OpenAI's own client of the module's server."""
    import openai

    with openai.OpenAI(base_url=f"{client.base_url}/v1/", api_key="unused", max_retries=0) as sdk:
        yield sdk
