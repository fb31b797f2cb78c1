"""The client that tests of the server share; `client` is the fixture of each module."""

import pytest


@pytest.fixture(scope="module")
def sdk(client):
    """OpenAI's own client of the module's server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{client.base_url}/v1/", api_key="unused", max_retries=0) as sdk:
        yield sdk
