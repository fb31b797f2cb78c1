"""Artefacts of starts: everything that `speculate()` found out about a model, kept on disk for later processes."""
