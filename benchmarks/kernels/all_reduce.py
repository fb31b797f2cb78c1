"""The time of the all-reduce of tensor parallelism on the GPUs of one host, next to NCCL's and torch's.

    python -m benchmarks.kernels.all_reduce [--gpus 2 4 8] [--limit 200] [--json FILE]

A figure is the microseconds of one sum in a graph of many, by each number of shots (see `Exchange.shots`); "plain" sums
numbers of 16 bits, "added" float32 parts with the residual stream and the norm's first half. The floor is that of the
fewest bytes, 16 bits a number, at the speed of a copy to another GPU. Then come the bounds between which `HOP_BYTES`
makes the faster choice, and "added" for each block size.

The processes for each number of GPUs, of which the host has enough, end after --limit seconds.
tests/support/all_reduce_on_gpus.py compares the bits.
"""

import faulthandler
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from benchmarks.common import command_line, save_rows, stamp
from benchmarks.timers import captured, launch_ranks, link_speed, replay_us, sum_bytes
from spec_compile.kernels import all_reduce, all_reduce_kernel, launching
from spec_compile.kernels.linear import product_ops
from spec_compile.kernels.linear.plans import squared_columns

ops = torch.ops.spec_compile
DEVICE, DTYPE = "cuda", torch.bfloat16
SHAPES = [(rows, size) for size in (4096, 8192) for rows in (1, 4, 16, 64, 128, 256, 512)]
BLOCKS = {1: (128, 256, 512), 16: (512, 1024), 64: (1024, 2048, 4096)}
ALWAYS, USUAL = {1: float("inf"), 2: -1.0}, all_reduce.HOP_BYTES
"""Values of `HOP_BYTES` with which all sums take so many shots, and its own."""


def say(*words) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def parts_of(shape, seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    """The parts of all ranks, the same on each rank."""
    numbers = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=numbers, device=DEVICE).to(dtype) for _ in range(dist.get_world_size())]


def added(group_name: str, parts, residual, weight) -> tuple[torch.Tensor, ...]:
    """Stream, scaled stream and squares, as `product_to_stream` returns them, from this rank's part."""
    exchange, behind = all_reduce.EXCHANGES[group_name], product_ops.stream_after(residual, weight, 0.0)
    out, squared = torch.empty_like(residual), squared_columns(residual.shape[1])
    all_reduce_kernel.all_reduce_add(exchange, parts[dist.get_rank()], out, behind, squared)
    return out, behind.scaled, behind.squares


def graph_of(run) -> torch.cuda.CUDAGraph:
    """A graph of `run`. NCCL's own thread asks the device during the capture."""
    return captured(run, capture_error_mode="thread_local")


def graph_time(run, count: int, repeats: int = 7) -> float:
    """Microseconds in a graph of one of the `count` steps of `run`. A replay before each brings the ranks together."""
    graph = graph_of(run)
    return replay_us(graph, repeats, before=graph.replay) / count


def measure(group_name: str) -> list[dict]:
    """A row for each shape."""
    ranks, link, rows = dist.get_world_size(), link_speed(group_name), []
    say(f"time: us of one in a graph of many; {link / 1e9:.0f} GB/s to another GPU")
    say("rows  size    KB | floor   NCCL torch's 1, 2 | plain 1, 2 shots | added 1, 2 | added by block")
    for shape in SHAPES:
        row = {"gpus": ranks, "rows": shape[0], "size": shape[1], "link_speed": link}
        row |= {"floor": sum_bytes(shape[0] * shape[1], ranks) / link * 1e6} | measure_shape(group_name, *shape)
        rows.append(row)
        fields = "floor", "NCCL", "torch 1", "torch 2", "plain 1", "plain 2", "added 1", "added 2"
        start = f"{shape[0]:4} {shape[1]:5} {shape[0] * shape[1] * 2 >> 10:5} |"
        say(start, *(f"{row[name]:6.1f}" for name in fields), "|", row["blocks"])
    choice(rows)
    return rows


def choice(rows: list[dict]) -> None:
    """Print how many bytes two shots must save to be faster, where sums are added to the residual stream."""
    saved = [(all_reduce.bytes_saved(row["gpus"], row["rows"] * row["size"]), row) for row in rows]
    one = max((each for each, row in saved if row["added 1"] <= row["added 2"]), default=0)
    two = min((each for each, row in saved if row["added 1"] > row["added 2"]), default=float("inf"))
    say(f"bytes saved: one shot is faster up to {one:,.0f}, two shots are from {two:,.0f}; HOP_BYTES is {USUAL:,}")


def measure_shape(group_name: str, rows: int, size: int) -> dict:
    """Microseconds of each way of a sum."""
    count = 64 if rows <= 64 else 16
    x = torch.zeros(rows, size, dtype=DTYPE, device=DEVICE)
    parts, weight, symm_mem = parts_of((rows, size), 0), x[0].clone(), torch.ops.symm_mem
    shared = symmetric_memory.empty(rows * size, dtype=DTYPE, device=DEVICE).zero_()
    symmetric_memory.rendezvous(shared, group_name)

    def chained(function, x=x):
        for _ in range(count):
            x = function(x)

    def add(x):
        return added(group_name, parts, x, weight)[0]

    def again(function):
        return graph_time(lambda: [function() for _ in range(count)], count)

    times = {
        "NCCL": again(lambda: dist.all_reduce(x)),
        "torch 1": again(lambda: symm_mem.one_shot_all_reduce(shared, "sum", group_name)),
        "torch 2": again(lambda: symm_mem.two_shot_all_reduce_(shared, "sum", group_name)),
    }
    for shots, all_reduce.HOP_BYTES in ALWAYS.items():
        times[f"plain {shots}"] = graph_time(lambda: chained(lambda x: ops.all_reduce(x, group_name)), count)
        times[f"added {shots}"] = graph_time(lambda: chained(add), count)
    all_reduce.HOP_BYTES = USUAL
    blocks, usual = {}, all_reduce_kernel.block_for
    for block in BLOCKS.get(rows, ()):
        all_reduce_kernel.block_for = lambda *_, block=block: block
        blocks[block] = round(graph_time(lambda: chained(add), count), 1)
    all_reduce_kernel.block_for = usual
    return {**times, "blocks": blocks}


def start(limit: float) -> tuple[str, str | None]:
    """Begin the process group of a script that ends after `limit` seconds.

    Returns the name of the group, and the reason why there is no exchange of our own, or None.
    """
    faulthandler.dump_traceback_later(limit, exit=True)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a rank that trapped reports before it ends
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here needs it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    backend = {"backend": "nccl", "device_id": device} if gpus >= int(os.environ["WORLD_SIZE"]) else {"backend": "gloo"}
    dist.init_process_group(**backend, timeout=timedelta(seconds=limit))
    reason = all_reduce.prepare(dist.group.WORLD, device)
    launching.prepare(device)
    machine = f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    say(machine, f"no exchange: {reason}" if reason else "with an exchange")
    return dist.group.WORLD.group_name, reason


def main() -> None:
    parser = command_line(__doc__, results="")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--limit", type=float, default=200)
    options = parser.parse_args()
    if "RANK" not in os.environ:  # a process for each GPU runs this script
        for count in [count for count in options.gpus if count <= torch.cuda.device_count()]:
            launch_ranks("benchmarks.kernels.all_reduce", count, [])
        return
    name, reason = start(options.limit)
    if reason is None:
        rows = measure(name)
        if options.json and dist.get_rank() == 0:
            save_rows(options.json, rows, ("gpus", "rows", "size"), stamp(torch.device("cuda")))
    os._exit(0)  # destroying the group would wait for the captured graphs


if __name__ == "__main__":
    main()
