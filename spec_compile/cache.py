"""`Cache`: the keys and values of a batch of sequences, at fixed addresses."""

import mmap

import torch
from torch import Tensor, nn

from .graph import ModelGraph

PAGE = 128
"""Slots of a cache come in multiples of this many."""


class Cache(nn.Module):
    """Keys and values of B sequences of up to `slots` tokens, in every attention layer of a graph."""

    def __init__(self, graph: ModelGraph, batch: int, slots: int):
        super().__init__()
        self.layers = len(graph.layers)
        for number, layer in enumerate(graph.layers):
            for name, size in (("keys", layer.key_dim), ("values", layer.value_dim)):
                empty = _zeros((batch, layer.kv_heads, slots, size), graph.cache_dtype or graph.dtype, graph.device)
                self.register_buffer(f"{name}_{number}", empty, persistent=False)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of each layer in turn, each [B, Hkv, slots, D]."""
        return [getattr(self, f"{name}_{layer}") for layer in range(self.layers) for name in ("keys", "values")]

    @property
    def slots(self) -> int:
        """Tokens that each row has room for."""
        return self.tensors[0].shape[2]

    def share(self, other: "Cache") -> None:
        """Take the first rows of `other` in place of rows of its own."""
        for (name, tensor), larger in zip(list(self.named_buffers()), other.tensors):
            setattr(self, name, larger[: len(tensor)])

    def resize(self, slots: int) -> list[Tensor]:
        """Put empty tensors of `slots` slots in place of the present `tensors`, and return the latter."""
        before = self.tensors
        for name, tensor in list(self.named_buffers()):
            batch, heads, _, size = tensor.shape
            setattr(self, name, _zeros((batch, heads, slots, size), tensor.dtype, tensor.device))
        return before


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is taken only where it is written: on a CPU anonymous pages, which a fork does not share."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
