"""Serving: transformers' HTTP server around continuous batching, replicas of it on Ray, and specdec_bench's engine."""
