"""Attention backends on a GPU, one layer each: token trees inside a CUDA graph.

    python -m benchmarks.kernels.attention [--models llama-3.1-8b ...] [--backends triton sdpa flashinfer]
        [--nodes 1 16 64] [--contexts 1024 8192 32768 131072] [--tree branches] [--batch 1]
        [--output results/attention.json]

A graph launches the kernel once for each of several caches, more than the L2 cache holds; times are medians of replays,
for one launch. `floor` is the time to read the keys and values once at the speed of a large copy, `math` the time of
the two matrix products at the speed of a large product. A run replaces the rows of its models in the file, so give
another --output with another --batch: the documented rows are of batch 1.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import RESULTS, command_line, stamp, write_json
from benchmarks.rounds.shapes import TEXT_TREE
from benchmarks.timers import bandwidth, captured, product_speed, replay_us
from spec_compile.kernels.attention import BACKENDS, Use
from spec_compile.tree import ancestry

MODELS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "qwen3-0.6b": (16, 8, 128)}
"""Model -> query heads, KV heads, head size."""
LAYERS, MARGIN = 32, 128
ENOUGH = 300e6
"""Bytes of caches, more than any L2 cache holds."""
DENSE = {"sdpa"}
"""Backends that read the whole cache they are given, so they get only the slots that they need."""
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


def trees(caches: Caches, args, copies: float, products: float) -> list[dict]:
    """A row for each context and number of nodes, printed as soon as it is measured."""
    print(f"| {'context':>7} | {'N':>2} | {'floor':>6} | {'math':>6} |" + "".join(f" {n:>10} |" for n in args.backends))
    rows = []
    for nodes in args.nodes:
        ops = {name: BACKENDS[name].load(Use(name)) for name in args.backends}
        for context in args.contexts:
            work = 4 * caches.batch * nodes * caches.heads * context * caches.size
            row = {"context": context, "nodes": nodes, "tree": args.tree, "batch": caches.batch}
            row |= {"floor": caches.bytes(context) / copies * 1e6, "math": work / products * 1e6}
            row |= {name: tree_time(caches, name, op, nodes, context, args.tree) for name, op in ops.items()}
            rows.append(row)
            times = "".join(f" {row[name]:10.1f} |" for name in args.backends)
            print(f"| {context:7} | {nodes:2} | {row['floor']:6.1f} | {row['math']:6.1f} |{times}", flush=True)
    return rows


def available(name: str) -> bool:
    try:
        BACKENDS[name].load(Use(name))
    except ImportError as error:
        print(error)
        return False
    return True


def main():
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768, 131072])
    parser.add_argument("--tree", default="branches", choices=TREES)
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
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
        caches = Caches(*MODELS[model], max(args.contexts), args.batch)
        rows = [{**row, "stamp": facts} for row in trees(caches, args, copies, products)]
        results["models"][model] = {"trees": rows}
        write_json(args.output, results)
        del caches


if __name__ == "__main__":
    main()
