"""`Backend`: the op that a way to run attention puts into a graph, and what that op can do."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...graph import LayerSpec, ModelGraph

FEATURES = {
    "window": "sliding windows",
    "softcap": "capped scores",
    "sinks": "sinks",
    "unequal": "keys and values of different head sizes",
    "chunk": "attention within chunks of positions",
    "slopes": "ALiBi, biases that grow with the distance",
    "indexed": "attention to the tokens that an indexer chooses",
}
"""Features of attention besides softmax(q k^T) v, with their names in error texts."""
ALL = frozenset(FEATURES)
USUAL = ALL - {"chunk", "slopes", "indexed"}
"""The features of a backend that lists none."""


@dataclass(frozen=True)
class Use:
    """How a graph uses a backend.

    name: of a backend, or "auto".
    role: "prefill" (causal chunks only), "verify" or "draft" (trees and chunks).
    captured: the graph runs inside a CUDA graph.
    compiled: Inductor compiles the graph.
    fp8: the cache is of float8_e4m3fn.
    scaled: the cache is of float8_e4m3fn with a scale for each token and KV head.
    """

    name: str = "auto"
    role: str = "verify"
    captured: bool = True
    compiled: bool = True
    fp8: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Backend:
    """A way to run attention.

    load: ``load(use)`` returns the op of `AttentionCall`, or raises ImportError that says what to install.
    devices: types of the devices that it runs on.
    dtypes: of queries, keys and values.
    causal: the `FEATURES` that it has with causal chunks.
    trees: the `FEATURES` that it has with trees.
    captured: the `FEATURES` that it has with trees inside a CUDA graph, where it reads lengths only on the device.
    uncompiled: a CUDA graph can hold it without Inductor.
    takes: the arguments of `call.SPECIAL` that its op has; with "cos" it rotates.
    sizes: its head sizes; None: all.
    fp8: it takes caches of float8_e4m3fn.
    scaled: it takes caches of float8_e4m3fn with scales.
    prompts_captured: inside a CUDA graph it takes chunks of any size as fast as outside.
    room: ``room(layer, dtype, device)`` is a text if heads need more shared memory than the device has; None if not.
    prepare: ``prepare(graph)`` computes once what the attention calls of a graph share, each time the calls were
        edited, and returns a text for the report.
    """

    name: str
    load: Callable[[Use], Callable]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    causal: frozenset[str] = USUAL
    trees: frozenset[str] = USUAL
    captured: frozenset[str] = USUAL
    uncompiled: bool = True
    takes: frozenset[str] = frozenset()
    sizes: frozenset[int] | None = None
    fp8: bool = False
    scaled: bool = False
    prompts_captured: bool = False
    room: Callable[[LayerSpec, torch.dtype, torch.device], str | None] | None = None
    prepare: Callable[[ModelGraph], str] | None = None

    def lack(self, layer: LayerSpec, dtype: torch.dtype, use: Use, device: torch.device) -> str | None:
        """A noun for what the backend lacks for this use of a layer, for an error text; None if it lacks nothing."""
        if dtype not in self.dtypes:
            return str(dtype).removeprefix("torch.")
        if use.scaled and not self.scaled:
            return "caches of 8 bits with scales (kv_cache_dtype='auto' needs none)"
        if use.fp8 and not (self.fp8 or use.scaled):
            return "caches of 8 bits (kv_cache_dtype='auto' needs none)"
        if use.captured and not (use.compiled or self.uncompiled):
            return "a form that a CUDA graph can capture uncompiled (compile=True or cuda_graphs=False needs none)"
        needs = {
            "window": layer.window is not None,
            "softcap": layer.softcap is not None,
            "sinks": layer.sinks,
            "unequal": layer.key_dim != layer.value_dim,
            "chunk": layer.chunk is not None,
            "slopes": layer.slopes,
            "indexed": layer.indexed,
        }
        features, form = (self.causal, "causal chunks") if use.role == "prefill" else (self.trees, "token trees")
        if use.captured:
            features, form = self.captured, f"{form} in a CUDA graph"
        for feature, needed in needs.items():
            if needed and feature not in features:
                return f"{FEATURES[feature]} with {form}"
        foreign = {layer.key_dim, layer.value_dim} - (self.sizes or {layer.key_dim, layer.value_dim})
        if foreign:
            return f"heads of {max(foreign)}"
        return self.room(layer, dtype, device) if self.room else None
