"""Attention on a CPU: all layers of published models at some contexts, compared with a read of their keys and values.

    python -m benchmarks.kernels.cpu_attention [--models 135M 1B] [--dtypes bfloat16 float32] [--contexts 512 8192]
                                               [--nodes 1 4 16] [--threads 2] [--json FILE]

A figure is the milliseconds of all layers of a step, each with its own cache, so that none holds them: the least of
some turns, in which the systems alternate. "floor" is the time of a sum over the bytes of all visible keys and values,
measured in the same turns. "ours" is the backend "cpu"; "sdpa" is plain PyTorch with one mask for all layers.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import pin, save_rows, show, stamp
from spec_compile.kernels import ops
from spec_compile.kernels.attention import cpu_attention
from spec_compile.kernels.attention.backends import sdpa
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.tree import ancestry

MODELS = {"135M": (30, 9, 3, 64), "1B": (16, 32, 8, 64), "8B": (32, 32, 8, 128)}
"""Layers, heads, KV heads and head size of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B."""
TURNS, SECONDS = 12, 6.0
"""At most so many turns, and so long, for a row."""
KEYS = ("model", "dtype", "context", "nodes")
"""The fields that tell the rows of the results apart."""


def systems(model: str, dtype: torch.dtype, context: int, nodes: int) -> dict[str, Callable[[], None]]:
    """The floor, ours and plain PyTorch, each a step of all layers at `context` committed tokens."""
    layers, heads, kv_heads, size = MODELS[model]
    caches = [torch.randn(2, 1, kv_heads, context + nodes, size).to(dtype) for _ in range(layers)]
    ancestors, depth = ancestry(torch.tensor([[(node + 1) // 2 - 1 for node in range(nodes)]]))
    lengths = torch.tensor([context])
    positions = lengths[:, None] + depth
    q, k, v = (torch.randn(1, nodes, count, size).to(dtype).transpose(1, 2) for count in (heads, kv_heads, kv_heads))

    def attend(system: Callable) -> None:
        for keys, values in caches:
            system(AttentionCall(q, k, v, keys, values, lengths, ancestors, positions, None, size**-0.5, None, None))

    def floor() -> None:
        for cache in caches:
            cache.view(-1).view(torch.int32).sum()

    def plain() -> None:
        mask = ops.tree_mask(positions, lengths, ancestors, context + nodes, None, heads // kv_heads, dtype)
        attend(lambda call: sdpa(*call, mask=mask))

    return {"floor": floor, "ours": partial(attend, cpu_attention.attend), "sdpa": plain}


def times(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The least milliseconds of each in some turns."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + SECONDS
    for _ in range(TURNS):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - begin) * 1e3)
        if time.perf_counter() > end:
            break
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["135M", "1B"], choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=("bfloat16", "float32"))
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    pin(options.threads)
    rows = []
    for model in options.models:
        for dtype in options.dtypes:
            for context in options.contexts:
                for nodes in options.nodes:
                    figures = times(systems(model, getattr(torch, dtype), context, nodes))
                    rows.append({"model": model, "dtype": dtype, "context": context, "nodes": nodes, **figures})
    cells = [
        (
            *(str(row[key]) for key in KEYS), f"{row['floor']:.2f}",
            *(f"{row[name]:.2f} = {row[name] / row['floor']:.2f}" for name in ("ours", "sdpa")),
        ) for row in rows
    ]  # fmt: skip
    show((*KEYS, "floor", "ours", "sdpa"), cells, "milliseconds = over the floor")
    if options.json:
        save_rows(options.json, rows, KEYS, stamp(torch.device("cpu")))


if __name__ == "__main__":
    main()
