"""Serving: an HTTP server around continuous batching, and replicas of it on Ray."""

import importlib

MAX_QUEUE = 256
"""Requests that may wait in a server, by default."""
GRACE = 30.0
"""Seconds that requests have to end after SIGTERM, by default."""
FLAGS = (
    "attn_implementation", "quantization", "reasoning", "chat_template_kwargs", "device", "dtype", "trust_remote_code",
    "host", "port", "enable_cors", "log_level", "default_seed",
)  # fmt: skip
"""The flags that say how the model is loaded and where the server listens, as `transformers serve` calls them."""
PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
"""The packages of the extra ``serve`` that are imported."""


def require_packages() -> None:
    """Raise ImportError, with what to install, if a package of the extra ``serve`` is missing."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"serving needs {name}: pip install 'spec_compile[serve]'") from error
