"""The tables of README.md and docs, from the results: ``python -m benchmarks.tables``."""
