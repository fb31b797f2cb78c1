"""What an attention backend is: the op it puts into a graph, and what that op can do."""

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
}
"""What attention may do besides softmax(q k^T) v, and how to say it."""
ALL = frozenset(FEATURES)
USUAL = ALL - {"chunk", "slopes"}
"""Those that a backend has unless it says otherwise."""


@dataclass(frozen=True)
class Use:
    """What a graph wants of a backend. name: that of one, or "auto". role: "prefill" (causal chunks only), "verify" or
    "draft" (trees and chunks). captured: the graph runs inside a CUDA graph. compiled: Inductor has made code of it.
    fp8: the cache is of float8_e4m3fn; scaled: with a scale for each token and KV head."""

    name: str = "auto"
    role: str = "verify"
    captured: bool = True
    compiled: bool = True
    fp8: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Backend:
    """A way to run attention. ``load(use)`` gives its op, which takes the arguments of `call.Call` and means what they
    mean, or raises ImportError that says what to install.

    devices, dtypes: of the tensors. causal, trees, captured: the `FEATURES` it has with causal chunks, with trees, and
    with trees inside a CUDA graph, where it reads lengths on the device alone. uncompiled: whether a CUDA graph can
    hold it as it is, without Inductor. sizes: the head sizes it has (None: all). ready: whether "auto" may measure it
    with a layer (None: it may not), for its kernels need no long compilation. fp8: it takes caches of float8_e4m3fn;
    scaled: and those with scales. prompts_captured: inside a CUDA graph it takes chunks of any size, too, as fast as
    outside. rotates: it takes the arguments `call.ROTATION`, too. prepare: computes once what several calls of a graph
    share, each time that they were edited, and returns what to say of it.
    """

    name: str
    load: Callable[[Use], Callable]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    causal: frozenset[str] = USUAL
    trees: frozenset[str] = USUAL
    captured: frozenset[str] = USUAL
    uncompiled: bool = True
    rotates: bool = False
    sizes: frozenset[int] | None = None
    ready: Callable[[LayerSpec, torch.dtype], bool] | None = None
    fp8: bool = False
    scaled: bool = False
    prompts_captured: bool = False
    prepare: Callable[[ModelGraph], str] | None = None

    def lack(self, layer: LayerSpec, dtype: torch.dtype, use: Use) -> str | None:
        """What the layer needs, used so, and the backend does not have; None if it has all."""
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
        }
        features, form = (self.causal, "causal chunks") if use.role == "prefill" else (self.trees, "token trees")
        if use.captured:
            features, form = self.captured, f"{form} in a CUDA graph"
        for feature, needed in needs.items():
            if needed and feature not in features:
                return f"{FEATURES[feature]} with {form}"
        foreign = {layer.key_dim, layer.value_dim} - (self.sizes or {layer.key_dim, layer.value_dim})
        return f"heads of {max(foreign)}" if foreign else None
