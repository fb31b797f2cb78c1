"""The choice of "auto" for prompts on a GPU: each process measures the backends once for a graph's shapes."""

from collections import Counter

import torch
from torch import Tensor

from ...graph import LayerSpec, ModelGraph
from .base import Backend, Use

CHUNK, COMMITTED, REPEATS = 2048, 6144, 3
"""Tokens of the chunk that is measured, tokens committed before it, and how many times it is timed."""
TOLERANCE = 3e-2, 3e-2
"""Relative and absolute, of results in 16 bits."""
FASTEST: dict[tuple, Backend] = {}
"""The fastest backend by device, dtype, layers and measured backends."""


def fastest(backends: list[Backend], graph: ModelGraph) -> Backend:
    """The backend that attends to prompts fastest, of those that are `ready`; the first one if fewer than two are.

    A backend whose result differs from the first one's is left out. This takes some milliseconds for each backend and
    sort of layer, and the compilation of our kernel, which is needed anyway.
    """
    layers = Counter(graph.layers)
    rivals = [each for each in backends if each.ready and all(each.ready(layer, graph.dtype) for layer in layers)]
    if len(rivals) < 2:
        return (rivals or backends)[0]
    key = torch.cuda.get_device_name(graph.device), graph.dtype, frozenset(layers.items()), *(b.name for b in rivals)
    if key not in FASTEST:
        chunks = {layer: chunk(layer, graph.dtype, graph.device) for layer in layers}
        answers: dict[LayerSpec, Tensor] = {}
        times = {}
        for rival in rivals:
            total, agrees = 0.0, True
            for layer, inputs in chunks.items():
                milliseconds, out = _timed(rival, inputs)
                agrees &= torch.allclose(out, answers.setdefault(layer, out), *TOLERANCE)
                total += layers[layer] * milliseconds
            if agrees:
                times[total] = rival
        FASTEST[key] = times[min(times)]
    return FASTEST[key]


@torch.no_grad()
def _timed(backend: Backend, inputs: list) -> tuple[float, Tensor]:
    """The shortest time of a chunk in milliseconds, and the result."""
    op = backend.load(Use(backend.name, "prefill", captured=False))
    times = []
    for _ in range(1 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = op(*inputs)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:]), out


def chunk(layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> list:
    """The first arguments of `AttentionCall` for a chunk of a prompt."""
    kv, made = layer.kv_heads, dict(dtype=dtype, device=device)
    block = [torch.randn(1, CHUNK, heads, size, **made).transpose(1, 2)
             for heads, size in ((layer.heads, layer.key_dim), (kv, layer.key_dim), (kv, layer.value_dim))]  # fmt: skip
    caches = [torch.randn(1, kv, COMMITTED + CHUNK, size, **made) for size in (layer.key_dim, layer.value_dim)]
    lengths = torch.tensor([COMMITTED], device=device)
    positions = lengths + torch.arange(CHUNK, device=device)[None]
    sinks = torch.zeros(layer.heads, **made) if layer.sinks else None
    return [*block, *caches, lengths, None, positions, sinks, layer.scale, layer.softcap, layer.window]
