"""Ops of this package: schema, plain-PyTorch meaning and, on a GPU, the kernel."""
