"""Rounds of a model with random weights that the GPUs of one host share.

    python -m benchmarks.rounds.tensor_parallel [--cases llama-70b llama-8b] [--gpus 4 2] [--minutes 8] [--json FILE]

A process for each GPU makes its part of the weights there. The time of a round is divided by its floor: the bytes that
the rank with the most must read, at the speed of a copy, and the bytes that its sums must send, at the speed of a copy
to another GPU. Each row is written when it is measured or refused. Any other error ends the processes of a case, and
the next case begins. The numbers of GPUs share the minutes equally; what takes longer is stopped.

--tiny, or a host without GPUs: a few small layers, which are not compiled.
"""

import argparse
import gc
import os
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import spec_compile
from benchmarks.common import command_line, save_rows, stamp
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.drafts import TREE, draft_bytes, make
from benchmarks.rounds.shapes import context_bytes
from benchmarks.rounds.shards import CASES, spread
from benchmarks.timers import bandwidth, launch_ranks, link_speed, sum_bytes
from spec_compile import UnsupportedModelError
from spec_compile.graph import ModelGraph, attribute, calls
from spec_compile.kernels import experts

ops, aten = torch.ops.spec_compile, torch.ops.aten
CONTEXT, CAPACITY = 1024, 2048
"""Tokens in the cache of each request, and slots."""
REQUESTS = 1, 16
REFUSALS = ValueError, UnsupportedModelError, NotImplementedError
"""Errors that all ranks raise alike, and after which the next system can be tried."""
LIMIT = timedelta(minutes=10)
KEYS = "shape", "gpus", "system", "context", "requests", "expert_parallel"
"""The fields that tell the rows of the results apart."""
HEAD = "EAGLE-3, tree of 16 in 5 steps"
SYSTEMS = {"n-gram": {1: [1, 16], 16: [1, 4]}, HEAD: {1: [16], 16: [16]}}
"""System -> nodes of its rounds, by the number of requests; one node is a plain step. `HEAD` has random weights."""


def rank_bytes(graph: ModelGraph, chosen: list[int], count: int) -> float:
    """Bytes of weights that a round reads on this rank. An embedding counts only if a product reads it, too.

    chosen: experts that the round chooses in each mixture. count: experts of a mixture on all ranks. Example: 5 of 8
    are chosen. If a rank has a part of each, and these take 24 MB, it reads 15 MB. If it has 4 whole ones of 24 MB,
    the mean of the ranks is 15 MB, too.
    """
    read: dict[int, float] = {}
    mixtures = 0
    for node in calls(graph.gm):
        share = 1.0
        if node.target in experts.PRODUCTS:
            share = chosen[mixtures] / count
            mixtures += node.target != experts.UP
        for source in node.all_input_nodes:
            if source.op == "get_attr" and node.target != aten.embedding.default:
                tensor = attribute(graph.gm, source.target)
                read[tensor.data_ptr()] = tensor.nbytes * share
    return sum(read.values())


def sums_of(graph: ModelGraph) -> int:
    """Sums over ranks in a forward."""
    return len(calls(graph.gm, ops.all_reduce.default)) + sum(
        bool(node.kwargs.get("group_name")) for node in calls(graph.gm, ops.product_to_stream.default)
    )


class Speeds(NamedTuple):
    """Bytes a second: of a copy in a GPU's memory (read plus written), and to another GPU; None: not measured."""

    copy: float
    link: float | None


class Measurement:
    """A model of a case on this rank, and the speeds of its machine. options: of the command line, with one case."""

    def __init__(self, options: argparse.Namespace):
        self.options, (case,) = options, options.cases
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # else captured collectives take streams of their own
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LIMIT)
        self.talk = dist.new_group(backend="gloo", timeout=LIMIT)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.model = spread(case, mesh, self.device, options.tiny, options.expert_parallel)
        copy = bandwidth(1 << 30 if on_gpu else 1 << 24, self.device.type)["copy"]
        self.speeds = Speeds(copy, link_speed(dist.group.WORLD.group_name) if on_gpu else None)
        self.row = {"shape": case, "gpus": mesh.size(), "context": CONTEXT}
        self.row |= {"expert_parallel": True} if options.expert_parallel else {}
        self.row |= {"copy_speed": self.speeds.copy, "link_speed": self.speeds.link}
        self.facts = stamp(self.device)

    def run(self) -> None:
        """Write a row for each system and number of requests that the options ask for."""
        for system in self.options.systems:
            fast = None
            gc.collect()
            for requests in (count for count in SYSTEMS[system] if count in self.options.requests):
                row = self.row | {"system": system, "requests": requests}
                begin = time.perf_counter()
                try:
                    fast = fast or self.speculate(system)
                    row |= self.measure(fast, system, requests) | {"ready_seconds": time.perf_counter() - begin}
                except REFUSALS as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:600]
                if dist.get_rank() == 0:
                    save_rows(self.options.json, [row], KEYS, self.facts)
                    print(f"{row['shape']} on {row['gpus']}: {system}, {requests} requests: {told(row)}", flush=True)

    def speculate(self, system: str) -> PreTrainedModel:
        """The model with a system's drafts."""
        options = dict(check=False, max_cache_len=CAPACITY, tensor_parallel="auto", compile=not self.options.tiny)
        options |= {"expert_parallel": True} if self.options.expert_parallel else {}
        if system != HEAD:
            return spec_compile.speculate(self.model, "ngram", num_draft_tokens=16, **options)
        torch.manual_seed(0)  # the same draft on every rank
        self.head = make("eagle3", self.model)
        return spec_compile.speculate(self.model, "eagle3", draft=self.head, **TREE, **options)

    def measure(self, fast: PreTrainedModel, system: str, requests: int) -> dict:
        """Times, bytes and floors of a round at each size."""
        counts: dict[int, list[int]] = {}
        times = rounds(fast, CONTEXT, requests, SYSTEMS[system][requests], counts=counts)
        runtime, size = fast.speculation.engine.runtime, dist.get_world_size()
        graph, drafted, sharing = runtime.verify, 0, ""
        if system == HEAD:
            sharing = runtime.algorithm.sharing
            drafted = draft_bytes(self.head, TREE["num_steps"]) / (size if "shared by" in sharing else 1)
        mixtures = [part for path, part in self.model.named_modules() if path.endswith(".experts")]
        count = len(next(mixtures[0].parameters())) if mixtures else 1
        row: dict = {"ms": times, "notes": fast.speculation.options.ranks.notes, "sharing": sharing}
        row |= {"gigabytes": {}, "floor_ms": {}, "over_floor": {}, "sums": sums_of(graph)}
        for nodes, ms in times.items():
            read = rank_bytes(graph, counts.get(nodes, []), count) + drafted + context_bytes(graph, CONTEXT) * requests
            most = self.most(read)
            sent = sums_of(graph) * sum_bytes(requests * nodes * graph.hidden_size, size)
            floor = 1e3 * (most / self.speeds.copy + (sent / self.speeds.link if self.speeds.link else 0.0))
            row["gigabytes"][nodes], row["floor_ms"][nodes], row["over_floor"][nodes] = most / 1e9, floor, ms / floor
        return row

    def most(self, value: float) -> float:
        """The largest value of all ranks."""
        values = [0.0] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.talk)
        return max(values)


def told(row: dict) -> str:
    """A line about a row: the error; or the milliseconds at each number of nodes, and how many floors they are."""
    if "error" in row:
        return row["error"]
    times = ((nodes, ms, row["over_floor"][nodes]) for nodes, ms in row["ms"].items())
    return ", ".join(f"N={nodes} {ms:.3f} ms ({over:.2f} floors)" for nodes, ms, over in times)


def main() -> None:
    parser = command_line(__doc__, results="tensor_parallel.json")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 2], help="GPUs that share a model")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--requests", type=int, nargs="+", choices=REQUESTS, default=REQUESTS)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--tiny", action="store_true", help="small models that are not compiled")
    parser.add_argument("--expert-parallel", action="store_true", help="share out experts by their number")
    options = parser.parse_args()
    options.tiny = options.tiny or not torch.cuda.is_available()
    if "RANK" in os.environ:
        Measurement(options).run()
        os._exit(0)  # destroying the group would wait for the captured graphs
    begin = time.monotonic()
    for number, size in enumerate(options.gpus, start=1):
        for case in options.cases:
            left = begin + 60 * options.minutes * number / len(options.gpus) - time.monotonic()
            if left <= 0 or not launch_ranks("benchmarks.rounds.tensor_parallel", size, ["--cases", case], left):
                print(f"{case} on {size}: not all was measured", flush=True)


if __name__ == "__main__":
    main()
