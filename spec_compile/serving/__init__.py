"""Serving: transformers' HTTP server around continuous batching, replicas of it on Ray, and specdec_bench's engine."""

MAX_QUEUE = 256
"""Requests that may wait in a server, by default."""
GRACE = 30.0
"""Seconds that requests have to end after SIGTERM, by default."""
