"""Attention backends on a GPU, one layer each: token trees inside a CUDA graph, and prompts in chunks.

    python -m benchmarks.kernels.attention [--models llama-3.1-8b ...] [--backends triton sdpa flex flashinfer]
        [--nodes 1 16 64] [--contexts 1024 8192 32768 131072] [--tree branches] [--batch 1] [--prompts 8192 32768]
        [--output results/attention.json]

Trees: a graph launches the kernel once for each of several caches, more than the L2 cache holds; times are medians of
replays, for one launch. `floor` is the time to read the keys and values once at the speed of a large copy, `math` the
time of the two matrix products at the speed of a large product. Prompts go through a cache in chunks of 2048, as in a
session; they are compared with PyTorch's own causal attention over the whole prompt at once. A run replaces the rows of
its models in the file, so give another --output with another --batch: the documented rows are of batch 1.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import RESULTS, stamp, write_json
from benchmarks.rounds.shapes import TEXT_TREE
from benchmarks.timers import bandwidth, captured, median_ms, product_speed, replay_us
from spec_compile.kernels.attention import BACKENDS, Use
from spec_compile.tree import ancestry

MODELS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "qwen3-0.6b": (16, 8, 128)}
"""Model -> query heads, KV heads, head size."""
LAYERS, CHUNK, MARGIN = 32, 2048, 128
ENOUGH = 300e6
"""Bytes of caches, more than any L2 cache holds."""
DENSE = {"sdpa"}
"""Backends that read the whole cache they are given, so they get only the slots that they need."""
COMPILED = {"flex"}
WHOLE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


TREES = {
    "branches": [-1, *(max(0, i - 1 - (i % 3 == 0)) for i in range(1, 64))],
    "text": TEXT_TREE,
    "chain": [*range(-1, 63)],
    "star": [-1] + [0] * 63,
}
"""Parents of 64 nodes. "branches" has a branch at every third node: [-1, 0, 1, 1, 3, 4, 4, ...]. A root without drafts
is a "chain" in a round of more nodes (see `State.tree`)."""


class Caches:
    """Keys and values of several layers of a model, for `batch` contexts of up to `most` tokens."""

    def __init__(self, heads: int, kv_heads: int, size: int, most: int, batch: int):
        self.heads, self.kv_heads, self.size, self.batch = heads, kv_heads, size, batch
        shape = 2, batch, kv_heads, most + MARGIN, size
        self.layers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").unbind() for _ in range(LAYERS)]

    def bytes(self, context: int) -> int:
        """Bytes of the keys and values of one layer."""
        return 2 * self.batch * self.kv_heads * context * self.size * 2

    def used(self, context: int, name: str) -> list:
        """The caches of enough layers to exceed the L2 cache."""
        count = min(max(-(-int(ENOUGH) // self.bytes(context)), 2), LAYERS)
        slots = context + MARGIN if name in DENSE else None
        return [[cache[:, :, :slots] for cache in layer] for layer in self.layers[:count]]

    def block(self, tokens: int) -> list:
        """Queries, keys and values [B, heads, T, D] with the strides of a merged projection."""
        heads = self.heads, self.kv_heads, self.kv_heads
        product = torch.randn(self.batch, tokens, sum(heads), self.size, dtype=torch.bfloat16, device="cuda")
        return [part.transpose(1, 2) for part in product.split(heads, dim=2)]


def op_of(name: str, use: Use) -> Callable:
    op = BACKENDS[name].load(use)
    return torch.compile(op, fullgraph=True, dynamic=False) if name in COMPILED else op


def tree_time(caches: Caches, name: str, op: Callable, nodes: int, context: int, shape: str) -> float:
    """Microseconds of a layer's attention over a tree of `TREES`."""
    block, lengths = caches.block(nodes), torch.full((caches.batch,), context, device="cuda")
    ancestors, depth = ancestry(torch.tensor([TREES[shape][:nodes]] * caches.batch, device="cuda"))
    rest = lengths, ancestors, lengths[:, None] + depth, None, caches.size**-0.5, None, None
    layers = caches.used(context, name)

    def run():
        for layer in layers:
            op(*block, *layer, *rest)

    return replay_us(captured(run)) / len(layers)


def prompt_time(caches: Caches, name: str, op: Callable, tokens: int) -> float:
    """Microseconds of a layer's attention over a prompt in chunks."""
    block, steps = caches.block(CHUNK), torch.arange(CHUNK, device="cuda").expand(caches.batch, -1)
    starts = torch.arange(0, tokens, CHUNK, device="cuda")[:, None].expand(-1, caches.batch)
    positions, scale = [start[:, None] + steps for start in starts], caches.size**-0.5

    def run():
        for number, start in enumerate(starts):
            slots = (number + 1) * CHUNK if name in DENSE else None
            layer = [cache[:, :, :slots] for cache in caches.layers[0]]
            op(*block, *layer, start, None, positions[number], None, scale, None, None)

    return median_ms(run, 5) * 1e3


def whole_time(caches: Caches, backend: SDPBackend, tokens: int) -> float:
    """Microseconds of PyTorch's causal attention over a whole prompt."""
    q, k, v = caches.block(tokens)
    with sdpa_kernel(backend):
        return median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 5) * 1e3


def trees(caches: Caches, args, copies: float, products: float) -> list[dict]:
    """A row for each context and number of nodes, printed as soon as it is measured."""
    print(f"| {'context':>7} | {'N':>2} | {'floor':>6} | {'math':>6} |" + "".join(f" {n:>10} |" for n in args.backends))
    rows = []
    for nodes in args.nodes:
        ops = {name: op_of(name, Use(name)) for name in args.backends}
        for context in args.contexts:
            work = 4 * caches.batch * nodes * caches.heads * context * caches.size
            row = {"context": context, "nodes": nodes, "tree": args.tree, "batch": caches.batch}
            row |= {"floor": caches.bytes(context) / copies * 1e6, "math": work / products * 1e6}
            row |= {name: tree_time(caches, name, op, nodes, context, args.tree) for name, op in ops.items()}
            rows.append(row)
            times = "".join(f" {row[name]:10.1f} |" for name in args.backends)
            print(f"| {context:7} | {nodes:2} | {row['floor']:6.1f} | {row['math']:6.1f} |{times}", flush=True)
    return rows


def prompts(caches: Caches, args) -> list[dict]:
    """A row for each length of a prompt and each way to attend: tokens and operations a second."""
    rows = []
    for tokens in args.prompts:
        ways = {name: partial(prompt_time, caches, name, op_of(name, Use(name, "prefill", False)), tokens)
                for name in args.backends}  # fmt: skip
        ways |= {f"{name}, whole": partial(whole_time, caches, backend, tokens) for name, backend in WHOLE.items()}
        for name, measure in ways.items():
            seconds = measure() / 1e6 / caches.batch
            work = 2 * tokens * (tokens + 1) * caches.heads * caches.size
            row = {"tokens": tokens, "way": name, "tokens_per_second": tokens / seconds, "flops": work / seconds}
            rows.append(row)
            speed = f"{tokens / seconds / 1e6:.2f} M tokens/s, {work / seconds / 1e12:.0f} TFLOP/s"
            print(f"{tokens} tokens, {name}: {speed}", flush=True)
    return rows


def available(name: str) -> bool:
    try:
        BACKENDS[name].load(Use(name))
    except ImportError as error:
        print(error)
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768, 131072])
    parser.add_argument("--tree", default="branches", choices=TREES)
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--prompts", nargs="*", type=int, default=[8192, 32768])
    parser.add_argument("--output", type=Path, default=RESULTS / "attention.json")
    args = parser.parse_args()
    args.backends = [name for name in args.backends if available(name)]
    copies, products = bandwidth()["copy"], product_speed()
    facts = stamp(torch.device("cuda")) | {"copy_bytes_per_second": copies, "product_flops": products}
    results = json.loads(args.output.read_text()) if args.output.exists() else {"models": {}}
    print(f"{facts['gpu']}, torch {torch.__version__}: copies {copies / 1e12:.2f} TB/s, products "
          f"{products / 1e12:.0f} TFLOP/s; µs a layer, bfloat16, batch {args.batch}")  # fmt: skip
    for model in args.models:
        print(f"\n{model}")
        caches = Caches(*MODELS[model], max(args.contexts + args.prompts), args.batch)
        parts = results["models"][model] = {}
        for name, measure in {"trees": partial(trees, copies=copies, products=products), "prompts": prompts}.items():
            parts[name] = [{**row, "stamp": facts} for row in measure(caches, args)]
            write_json(args.output, results)
        del caches


if __name__ == "__main__":
    main()
