"""Benchmarks, a folder for each subject (see README.md). A script runs as ``python -m benchmarks.FOLDER.NAME``."""
