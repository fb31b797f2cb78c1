"""Kernels. Modules that launch Triton's import them then, because the package runs without Triton."""

from . import cpu_trees  # noqa: F401
