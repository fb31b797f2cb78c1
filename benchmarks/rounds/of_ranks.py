"""Rounds of a model of random weights that the processes of one group share; tensor_parallel.py starts such groups.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.rounds.of_ranks --case llama-8b --rows rows.jsonl

The first process appends a line of JSON for each system and number of requests as soon as it is measured, refused or
failed. The time of a round is divided by its floor: the bytes that the rank with the most must read, at the speed of a
copy, and the bytes that its sums must send, at the speed of a copy to another GPU.
"""

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import spec_compile
from benchmarks.common import stamp
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.drafts import TREE, draft_bytes, make
from benchmarks.rounds.families import families
from benchmarks.rounds.shapes import context_bytes
from benchmarks.rounds.shards import CASES, spread
from benchmarks.timers import alone, bandwidth, link_speed, sum_bytes
from spec_compile import UnsupportedModelError
from spec_compile.graph import ModelGraph, attribute, calls
from spec_compile.kernels import all_reduce, experts

ops, aten = torch.ops.spec_compile, torch.ops.aten
CONTEXT, CAPACITY = 1024, 2048
"""Tokens in the cache of each request, and slots."""
REQUESTS = 1, 16
REFUSALS = ValueError, UnsupportedModelError, NotImplementedError
"""Errors that all ranks raise alike, and after which the next system can be tried."""
LIMIT = timedelta(minutes=10)
TOLD = 3
"""Exit status of processes that have written a row about the error that ends them."""


class System(NamedTuple):
    """nodes: of rounds, by the number of requests; one node is a plain step. by_nccl: NCCL sums in place of our kernel.
    drafts: a random EAGLE-3 head does."""

    nodes: dict[int, list[int]]
    by_nccl: bool = False
    drafts: bool = False


SYSTEMS = {
    "n-gram": System({1: [1, 16], 16: [1, 4]}),
    "n-gram, sums by NCCL": System({1: [1, 16]}, by_nccl=True),
    "EAGLE-3, tree of 16 in 5 steps": System({1: [16], 16: [16]}, drafts=True),
}


class Selection(NamedTuple):
    """The measurements of a model: of each system with each number of requests that it is measured with."""

    systems: list[str]
    requests: list[int]
    tiny: bool
    expert_parallel: bool = False

    def pairs(self) -> list[tuple[str, int]]:
        """The system and the requests of each, in their order."""
        return [(name, count) for name in self.systems for count in SYSTEMS[name].nodes if count in self.requests]

    def arguments(self, skip: int) -> list[str]:
        """Options of this script that ask for all but the first `skip`."""
        words = ["--systems", *self.systems, "--requests", *map(str, self.requests), "--skip", str(skip)]
        return words + ["--tiny"] * self.tiny + ["--expert-parallel"] * self.expert_parallel


class Speeds(NamedTuple):
    """Bytes a second: of a copy in a GPU's memory (read plus written), and to another GPU; None: not measured."""

    copy: float
    link: float | None


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


class Measurement:
    """A model of a case on this rank, and the speeds of its machine. options: of the command line."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # else captured collectives take streams of their own
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LIMIT)
        self.talk = dist.new_group(backend="gloo", timeout=LIMIT)
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.row = {"shape": options.case, "gpus": dist.get_world_size(), "context": CONTEXT}
        self.row |= {"expert_parallel": True} if options.expert_parallel else {}
        self.facts = stamp(self.device)
        self.fast, self.system = None, ""

    def meet(self) -> None:
        dist.barrier(self.talk)

    def heard(self, value) -> list:
        """The values of all ranks."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def say(self, rows: list[dict]) -> None:
        """Append rows."""
        if dist.get_rank() == 0:
            with open(self.options.rows, "a") as file:
                file.writelines(json.dumps(self.row | row | {"stamp": self.facts}) + "\n" for row in rows)

    def run(self) -> None:
        """Measure all pairs that the options ask for."""
        options, begin = self.options, time.perf_counter()
        pairs = Selection(options.systems, options.requests, options.tiny).pairs()[options.skip :]
        rows = [{"system": name, "requests": requests} for name, requests in pairs]
        if not self.attempt(rows, self.prepare):
            return
        print(f"weights after {time.perf_counter() - begin:.1f} s", flush=True)
        for row in rows:
            self.attempt([row], lambda row=row: self.measure(**row))

    def attempt(self, rows: list[dict], run: Callable[[], dict | None]) -> bool:
        """Run a part on all ranks and write its rows, with what it returns or with its error. -> True if it succeeded.

        The process ends if the error is not one after which all ranks can go on.
        """
        more, error = None, None
        try:
            more = run()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:600]
            can_go_on = isinstance(raised, (*REFUSALS, torch.OutOfMemoryError))
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        heard = self.heard((error, error is None or can_go_on))
        error = next((text for text, _ in heard if text is not None), None)
        if more is not None or error is not None:
            self.say([row | ({"error": error} if error else more) for row in rows])
        if not all(goes_on for _, goes_on in heard):
            os._exit(TOLD)
        return error is None

    def prepare(self) -> None:
        """Make the weights, and measure the machine."""
        on_gpu = self.device.type == "cuda"
        self.model = spread(self.options.case, self.mesh, self.device, self.options.tiny, self.options.expert_parallel)
        name = dist.group.WORLD.group_name
        with alone(self.meet):
            copy = bandwidth(1 << 30 if on_gpu else 1 << 24, self.device.type)["copy"]
            link = link_speed(name) if on_gpu else None
        self.speeds = Speeds(copy, link)
        self.row |= {"copy_speed": copy, "link_speed": link}

    def speculate(self, system: System) -> PreTrainedModel:
        """The model with a system's drafts and sums."""
        options = dict(check=False, max_cache_len=CAPACITY, tensor_parallel="auto", compile=not self.options.tiny)
        options |= {"expert_parallel": True} if self.options.expert_parallel else {}
        if system.drafts:
            torch.manual_seed(0)  # the same draft on every rank
            self.head = make("eagle3", self.model)
            return spec_compile.speculate(self.model, "eagle3", draft=self.head, **TREE, **options)
        fast = spec_compile.speculate(self.model, "ngram", num_draft_tokens=16, **options)
        if system.by_nccl:
            name = fast.speculation.options.ranks.name
            self.ours = all_reduce.EXCHANGES.get(name), all_reduce.REDUCERS.get(name)
            all_reduce.release(name)
            all_reduce.REDUCERS[name] = summed_by_library
        return fast

    def measure(self, system: str, requests: int) -> dict:
        """The figures of a row."""
        kind, begin, counts = SYSTEMS[system], time.perf_counter(), {}
        if system != self.system:
            self.fast = None
            gc.collect()
            self.fast, self.system = self.speculate(kind), system
        fast = self.fast
        try:
            ms = rounds(fast, CONTEXT, requests, kind.nodes[requests], counts=counts)
        finally:
            if kind.by_nccl:
                self.restore(fast.speculation.options.ranks.name)
        row = {"ms": ms, "ready_seconds": time.perf_counter() - begin, "notes": fast.speculation.options.ranks.notes}
        if self.device.type == "cuda" and requests == 1:
            spent, kernels = families(fast, kind.nodes[requests][-1])
            row |= {"us_by_family_at_last": spent, "kernels_at_last": kernels}
        return row | self.floors(fast, kind, requests, ms, counts)

    def restore(self, name: str) -> None:
        """Let our kernel sum again."""
        all_reduce.release(name)
        exchange, reducer = self.ours
        if exchange is not None:
            all_reduce.EXCHANGES[name], all_reduce.REDUCERS[name] = exchange, reducer

    def floors(self, fast, kind: System, requests: int, ms: dict[int, float], counts: dict[int, list[int]]) -> dict:
        """Bytes and floors of a round at each size, and its time divided by its floor."""
        runtime, size = fast.speculation.engine.runtime, self.mesh.size()
        graph, drafted, sharing = runtime.verify, 0, ""
        if kind.drafts:
            sharing = runtime.algorithm.sharing
            drafted = draft_bytes(self.head, TREE["num_steps"]) / (size if "shared by" in sharing else 1)
        mixtures = [part for path, part in self.model.named_modules() if path.endswith(".experts")]
        count = len(next(mixtures[0].parameters())) if mixtures else 1
        row: dict = {"sharing": sharing, "gigabytes": {}, "floor_ms": {}, "over_floor": {}}
        for nodes, spent in ms.items():
            read = rank_bytes(graph, counts.get(nodes, []), count) + drafted + context_bytes(graph, CONTEXT) * requests
            most = max(self.heard(read))
            sent = sums_of(graph) * sum_bytes(requests * nodes * graph.hidden_size, size)
            floor = most / self.speeds.copy + (sent / self.speeds.link if self.speeds.link else 0.0)
            row["gigabytes"][nodes], row["floor_ms"][nodes] = most / 1e9, floor * 1e3
            row["over_floor"][nodes] = spent / (floor * 1e3)
        return row | {"sums": sums_of(graph)}


def summed_by_library(part: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' parts by torch.distributed's own all_reduce."""
    total = part.clone()
    dist.all_reduce(total)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--rows", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--requests", type=int, nargs="+", choices=REQUESTS, default=REQUESTS)
    parser.add_argument("--skip", type=int, default=0, help="the first measurements that are left out")
    parser.add_argument("--tiny", action="store_true", help="a few small layers that are not compiled, to try it")
    parser.add_argument("--expert-parallel", action="store_true", help="each rank has some experts, and all of these")
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # tells where a process hangs that is stopped
    Measurement(options).run()
    sys.stdout.flush()
    os._exit(0)  # destroying the group would wait for the captured graphs


if __name__ == "__main__":
    main()
