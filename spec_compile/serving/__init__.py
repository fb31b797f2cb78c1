"""Serving: transformers' HTTP server around continuous batching, replicas of it on Ray, and specdec_bench's engine."""

MAX_QUEUE = 256
"""Requests that may wait in a server, by default."""
GRACE = 30.0
"""Seconds that requests have to end after SIGTERM, by default."""
FLAGS = (
    "attn_implementation", "quantization", "reasoning", "chat_template_kwargs", "device", "dtype", "trust_remote_code",
    "host", "port", "enable_cors", "log_level", "default_seed",
)  # fmt: skip
"""The flags of transformers' server that do something here. Others are for its own cache, or for several models."""
