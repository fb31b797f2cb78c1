"""The all-reduce of tensor parallelism on the GPUs of one host: its bits, and its time beside NCCL's and torch's own.

    torchrun --nproc-per-node 2 benchmarks/all_reduce.py [--only check stress time layers deadline] [--limit 55]

check: sums of many sizes have the bits of their plain meaning. stress: so have 10,000 in captured graphs, while ranks
stall at random. time: microseconds of one in a graph of many; "alone" sums numbers of 16 bits, "added" float32 parts
with the residual stream and the norm's first half; then "added" by block. layers: milliseconds of the products of all
layers of a model of 8B parameters with their sums, without ("none") and by NCCL, and what one of our sums adds where
products send for themselves and where the kernel that sums does.
deadline: a rank that does not come is named. What is not done after --limit seconds is given up. Ranks may share a GPU
(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1) for all but the times.
"""

import argparse
import faulthandler
import functools
import os
import random
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from spec_compile.kernels import all_reduce, all_reduce_kernel, counters
from spec_compile.kernels.linear import product_ops, small_m
from spec_compile.kernels.linear.plans import squared_columns
from spec_compile.kernels.linear.product import Product

ops = torch.ops.spec_compile
DEVICE, DTYPE = "cuda", torch.bfloat16
PHASES = "check", "stress", "time", "layers", "deadline"
SHAPES = [(rows, size) for size in (4096, 8192) for rows in (1, 4, 16, 64)]
BLOCKS = {1: (128, 256, 512), 16: (512, 1024), 64: (1024, 2048, 4096)}
LAYER = (3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)
"""Weights of a layer of Llama-3.1-8B on each of two ranks: q, k and v; o; gate and up; down."""


def say(*words) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def parts_of(shape, seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    """The same parts of all ranks, on each rank."""
    numbers = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=numbers, device=DEVICE).to(dtype) for _ in range(dist.get_world_size())]


def in_order(parts) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def in_pairs(squares: torch.Tensor) -> torch.Tensor:
    """[..., 2 ** n] -> [...], the order of additions of `kernels.pairs`."""
    while squares.shape[-1] > 1:
        squares = squares[..., ::2] + squares[..., 1::2]
    return squares[..., 0]


def added(group_name: str, parts, residual, weight) -> tuple[torch.Tensor, ...]:
    """Stream, scaled and squares of this rank's part, as `product_to_stream` has them."""
    exchange, behind = all_reduce.EXCHANGES[group_name], product_ops.stream_after(residual, weight, 0.0)
    out, squared = torch.empty_like(residual), squared_columns(residual.shape[1])
    all_reduce_kernel.all_reduce_add(exchange, parts[dist.get_rank()], out, behind, squared)
    return out, behind.scaled, behind.squares


def wanted(parts, residual, weight) -> tuple[torch.Tensor, ...]:
    """What `added` has to be."""
    total, scaled, _ = product_ops.plain_stream(in_order(parts).to(residual.dtype), residual, weight, 0.0)
    return total, scaled, in_pairs(total.float().square().unflatten(1, (-1, squared_columns(total.shape[1]))))


def differences(got, want) -> torch.Tensor:
    """How many numbers have other bits."""
    size = {2: torch.int16, 4: torch.int32}
    return sum((a.view(size[a.itemsize]) != b.view(size[b.itemsize])).sum() for a, b in zip(got, want))


def captured(run) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which has run before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks the device meanwhile
        run()
    return graph


def graph_time(run, count: int, repeats: int = 7) -> float:
    """Microseconds of one of the `count` things that `run` does, in a graph."""
    graph = captured(run)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for begin, end in zip(events[::2], events[1::2]):
        graph.replay()  # brings the ranks together
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2]))
    return times[repeats // 2] * 1e3 / count


def check(group_name: str) -> None:
    bad = {}
    for rows, size in [*SHAPES[::2], (3, 4096), (300, 4096), (7, 1024), (2, 576)]:
        parts, residual = parts_of((rows, size), rows), parts_of((rows, size), 1, DTYPE)[0]
        weight = parts_of((size,), 2, DTYPE)[0]
        want = wanted(parts, residual, weight)
        first = added(group_name, parts, residual, weight)
        bad[rows, size, "added"] = differences(first, want)
        if rows == 64:
            alone = added(group_name, [part[5:6] for part in parts], residual[5:6], weight)
            bad[rows, size, "row"] = differences(alone, [each[5:6] for each in want])
    for count, dtype in (
        (8, DTYPE),
        (1001, torch.float32),
        (1 << 18, DTYPE),
        (3 << 20, torch.float16),
    ):
        parts = parts_of((count,), count, dtype)
        got = ops.all_reduce(parts[dist.get_rank()], group_name)
        bad[count, str(dtype)[6:]] = differences([got], [in_order(parts).to(dtype)])
    bad["product"] = differences(*products(group_name))
    odd = torch.full((64,), -1, dtype=torch.int32, device=DEVICE).view(torch.float32)
    bad["nan"] = (~ops.all_reduce(odd, group_name).isnan()).sum()
    report("check", {case: int(count) for case, count in bad.items()})


def products(group_name: str, rows: int = 16) -> tuple:
    """The op of a layer's end in a graph of this rank's product, and what it has to be by the products of all ranks."""
    x, weights = parts_of((rows, 2048), 4, DTYPE), parts_of((4096, 2048), 5, DTYPE)
    residual, norm = parts_of((rows, 4096), 6, DTYPE)[0], parts_of((4096,), 7, DTYPE)[0]
    rank, got = dist.get_rank(), []
    arguments = x[rank], weights[rank], None, residual, norm, 0.0
    captured(lambda: got.append(ops.product_to_stream(*arguments, group_name=group_name))).replay()
    parts = [small_m.run(Product(*each), small_m.plan_of(*each), torch.float32) for each in zip(x, weights)]
    return got[-1], wanted(parts, residual, norm)


def report(name: str, bad: dict) -> None:
    """Say which cases differ on any rank."""
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, {case: count for case, count in bad.items() if count})
    exchange = next(iter(all_reduce.EXCHANGES.values()))
    clear = bool((exchange.slots == -1).all())
    say(f"{name}: {len(bad)} cases,", "all bits as they should be" if not any(results) else f"DIFFERENT {results}")
    say(f"  turn {int(exchange.state[0])}, slots empty: {clear}, counters zero: {counters.all_zero()}")


class Stress:
    """Sums of parts that change each time, in graphs whose ranks stall at random."""

    def __init__(self, group_name: str):
        self.group_name = group_name
        self.numbers = parts_of((1 << 21,), 3)
        self.shift, self.bad = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
        self.weights = parts_of((4096, 512), 4, DTYPE)
        self.pause = random.Random(dist.get_rank())

    def sum(self, rows: int, size: int, kind: str) -> None:
        torch.cuda._sleep(self.pause.choice((1, 1, 5_000, 30_000)))
        index = (torch.arange(rows * size, device=DEVICE) + self.shift) % len(self.numbers[0])
        parts = [numbers[index].view(rows, size) for numbers in self.numbers]
        if kind == "product":
            residual, norm = self.numbers[0][:4096].to(DTYPE).expand(rows, -1), self.weights[0][:, 0]
            parts, products, rank = [part.to(DTYPE) for part in parts], [], dist.get_rank()
            for x, weight in zip(parts, self.weights):
                products.append(small_m.run(Product(x, weight), small_m.plan_of(x, weight), torch.float32))
            arguments = parts[rank], self.weights[rank], None, residual, norm, 0.0
            got = ops.product_to_stream(*arguments, group_name=self.group_name)
            want = wanted(products, residual, norm)
        elif kind == "added":
            residual, weight = parts[0].neg().to(DTYPE), parts[1][0].to(DTYPE)
            got, want = added(self.group_name, parts, residual, weight), wanted(parts, residual, weight)
        else:
            parts = [part.to(DTYPE) for part in parts]
            got = [ops.all_reduce(parts[dist.get_rank()], self.group_name)]
            want = [in_order(parts).to(DTYPE)]
        self.bad += differences(got, want)
        self.shift += 977


def stress(group_name: str, count: int) -> None:
    work, begun = Stress(group_name), time.perf_counter()
    sizes = (
        ((1, 4096, "added"), (16, 512, "product"), (1, 512, "product"), (1, 4096, "alone"), (64, 4096, "added")),
        ((1, 512, "product"), (9, 512, "product"), (3, 4096, "added")), ((5, 8192, "alone"),), ((300, 4096, "added"),),
    )  # fmt: skip
    graphs = [captured(lambda each=each: [work.sum(*size) for size in each]) for each in sizes]
    order, done = random.Random(5), 0  # alike on all ranks
    while done < count:
        number = order.choice((0, 0, 0, 1, 1, 1, 2, 2, 3))
        graphs[number].replay()
        done += len(sizes[number])
        if work.pause.random() < 0.03:
            torch.cuda.synchronize()
            time.sleep(work.pause.random() * 0.005)
    torch.cuda.synchronize()
    say(f"stress: {done} sums in {time.perf_counter() - begun:.1f} s")
    report("stress", {"numbers": int(work.bad)})


def measure(group_name: str) -> None:
    say("time: us of one in a graph of many")
    say("rows  size  KB |  NCCL one-shot two-shot | alone added | added by block")
    for rows, size in SHAPES:
        nccl, one, two, alone, fused, blocks = measure_shape(group_name, rows, size)
        start = f"{rows:4} {size:5} {rows * size * 2 >> 10:3} | {nccl:5.1f} {one:8.1f} {two:8.1f}"
        say(f"{start} | {alone:5.1f} {fused:5.1f} | {blocks}")


def measure_shape(group_name: str, rows: int, size: int, count: int = 64) -> tuple:
    """The figures of a line."""
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

    times = [
        again(lambda: dist.all_reduce(x)),
        again(lambda: symm_mem.one_shot_all_reduce(shared, "sum", group_name)),
        again(lambda: symm_mem.two_shot_all_reduce_(shared, "sum", group_name)),
        graph_time(lambda: chained(lambda x: ops.all_reduce(x, group_name)), count),
        graph_time(lambda: chained(add), count),
    ]
    blocks, usual = {}, all_reduce_kernel.block_for
    for block in BLOCKS.get(rows, ()):
        all_reduce_kernel.block_for = lambda *_, block=block: block
        blocks[block] = round(graph_time(lambda: chained(add), count), 1)
    all_reduce_kernel.block_for = usual
    return *times, blocks


def layers(group_name: str, counts, number: int = 32) -> None:
    say("layers: ms of the products of", number, "layers; N | none, products send, a kernel sends | us a sum adds")
    make = functools.partial(torch.empty, dtype=DTYPE, device=DEVICE)
    weights = [[make(shape).normal_(0, 0.01) for shape in LAYER] for _ in range(number)]
    norm = torch.ones(4096, dtype=DTYPE, device=DEVICE)
    exchange, reducer = all_reduce.EXCHANGES[group_name], all_reduce.REDUCERS[group_name]
    for rows in counts:
        x = torch.randn(rows, 4096, dtype=DTYPE, device=DEVICE)

        def run(group_name="", x=x):
            scaled, squares = x, torch.ones(len(x), 4096 // squared_columns(4096), device=DEVICE)
            for qkv, o, gate_up, down in weights:
                inside = ops.product(scaled, qkv, squares=squares, eps=1e-5)[:, :2048]
                x, scaled, squares = ops.product_to_stream(inside, o, None, x, norm, 0.0, group_name=group_name)
                inside = ops.product(scaled, gate_up, squares=squares, eps=1e-5, gated=True)
                x, scaled, squares = ops.product_to_stream(inside, down, None, x, norm, 0.0, group_name=group_name)

        none = graph_time(run, 1000)
        sent = graph_time(lambda: run(group_name), 1000)
        product_ops.product_sends, usual = lambda *_: False, product_ops.product_sends
        apart = graph_time(lambda: run(group_name), 1000)
        product_ops.product_sends = usual
        each = [round((time - none) * 1e3 / (2 * number), 2) for time in (sent, apart)]
        say(f"{rows:3} | {none:6.3f} {sent:6.3f} {apart:6.3f} | {each}")
        all_reduce.release(group_name)
        library = graph_time(lambda: run(group_name), 1000)
        all_reduce.EXCHANGES[group_name], all_reduce.REDUCERS[group_name] = exchange, reducer
        say(f"{rows:3} | NCCL {library:6.3f}")


def deadline(group_name: str) -> None:
    """The last phase, because the device of a rank that gave up is of no more use."""
    late, x = dist.get_world_size() - 1, torch.ones(4096, device=DEVICE)
    ops.all_reduce(x, group_name)
    all_reduce.set_deadline(group_name, 0.5)
    torch.cuda.synchronize()
    if dist.get_rank() == late:
        time.sleep(4)
        return
    begun = time.perf_counter()
    try:
        ops.all_reduce(x, group_name)
        torch.cuda.synchronize()
        error = "NO ERROR"
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    seconds = time.perf_counter() - begun
    named = all_reduce.missing_rank(group_name)
    say(f"deadline: after {seconds:.2f} s {error!r}; late: rank {named} (is {late})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--limit", type=float, default=55)
    parser.add_argument("--sums", type=int, default=10_000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="of the layers")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a rank that trapped reports before it ends
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here needs it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank, gpus, begun = int(os.environ["RANK"]), torch.cuda.device_count(), time.perf_counter()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    backend = {"backend": "nccl", "device_id": device} if gpus >= int(os.environ["WORLD_SIZE"]) else {"backend": "gloo"}
    dist.init_process_group(**backend, timeout=timedelta(seconds=arguments.limit))
    reason = all_reduce.prepare(dist.group.WORLD, device)
    counters.prepare(device)
    machine = f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    say(machine, f"no exchange: {reason}" if reason else "with an exchange")
    name = dist.group.WORLD.group_name
    phases = {
        "check": lambda: check(name), "stress": lambda: stress(name, arguments.sums), "time": lambda: measure(name),
        "layers": lambda: layers(name, arguments.rows), "deadline": lambda: deadline(name),
    }  # fmt: skip
    for phase in [each for each in PHASES if each in arguments.only and reason is None]:
        phases[phase]()
        say(f"[{time.perf_counter() - begun:.1f} s]")
    os._exit(0)  # without a word of NCCL's about a device that trapped


if __name__ == "__main__":
    main()
