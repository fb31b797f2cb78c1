"""Time of tree attention on a GPU: one layer's launch inside a CUDA graph.

    python benchmarks/attention_kernel.py [--models llama-3.1-8b ...] [--nodes 1 4 16 64] [--contexts 1024 8192 32768]

A graph holds one launch for each of 32 different caches, so that none finds its keys and values in the L2 cache; times
are medians of repeated replays, a launch. `floor` is what reading the keys and values once takes at 4.3 TB/s, what an
H200 copies at. The last lines are `compact` over 32 layers, all of whose rows move.
"""

import argparse
import statistics
from functools import partial

import torch

from spec_compile.kernels.compact import compact
from spec_compile.kernels.tree_attention import launch
from spec_compile.runtime.tree import ancestry

MODELS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "qwen3-0.6b": (16, 8, 128)}
"""Query heads, KV heads, head size."""
LAYERS = 32
BANDWIDTH = 4.3e12


def replay_time(run, repeats: int = 15) -> float:
    """Median microseconds of a replay of what `run` launches."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the replay is queued before the clock starts
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def tree(nodes: int) -> torch.Tensor:
    """Parents of a tree that grows a branch at every third node."""
    return torch.tensor([[-1] + [max(0, i - 1 - (i % 3 == 0)) for i in range(1, nodes)]], device="cuda")


class Inputs:
    """One step of N nodes at a context: 32 layers' queries, keys, values and caches."""

    def __init__(self, heads: int, kv_heads: int, size: int, context: int):
        shape = (1, kv_heads, context + 64, size)
        self.heads, self.kv_heads, self.size, self.context = heads, kv_heads, size, context
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
        self.lengths = torch.tensor([context], device="cuda")

    def step(self, nodes: int, **options):
        """A function that launches the 32 layers' attention."""
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        product = torch.randn(1, nodes, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device="cuda")
        q, k, v = (part.transpose(1, 2) for part in product.split([heads, kv_heads, kv_heads], dim=2))
        ancestors, depth = ancestry(tree(nodes))
        positions = self.lengths[:, None] + depth
        rest = self.lengths, ancestors, positions, None, size**-0.5, None, None

        def run():
            for layer in range(LAYERS):
                launch(q, k, v, *self.caches[2 * layer : 2 * layer + 2], *rest, **options)

        return run

    @property
    def floor(self) -> float:
        """Microseconds to read one layer's keys and values."""
        return 2 * self.kv_heads * self.context * self.size * 2 / BANDWIDTH * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; µs a layer, bfloat16, batch 1")
    print(f"| {'model':13} | {'context':>7} | {'floor':>5} |" + "".join(f" N={n:<4} |" for n in args.nodes))
    for model in args.models:
        for context in args.contexts:
            inputs = Inputs(*MODELS[model], context)
            times = [replay_time(inputs.step(nodes)) / LAYERS for nodes in args.nodes]
            line = "".join(f" {time:6.1f} |" for time in times)
            print(f"| {model:13} | {context:7} | {inputs.floor:5.1f} |{line}", flush=True)
    for nodes in (16, 64):
        inputs = Inputs(*MODELS["llama-3.1-8b"], 1024)
        path = torch.arange(nodes, device="cuda")[None].clone()
        path[:, 1:-1] += 1
        still, count = torch.arange(nodes, device="cuda")[None], torch.tensor([nodes - 1], device="cuda")
        moves = [partial(compact, inputs.caches, inputs.lengths, which, count) for which in (path, still)]
        times = [replay_time(move) for move in moves]
        print(f"compact, {nodes} slots of {LAYERS} layers: {times[0]:.1f} µs, {times[1]:.1f} with nothing to move")


if __name__ == "__main__":
    main()
