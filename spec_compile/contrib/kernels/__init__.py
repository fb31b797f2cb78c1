"""Triton kernels. The modules that launch them import them then, because the package runs without Triton."""
