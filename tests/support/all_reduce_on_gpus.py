"""The bits of the all-reduce of tensor parallelism on the GPUs of one host.

    torchrun --nproc-per-node 2 -m tests.support.all_reduce_on_gpus [--only check stress deadline] [--limit 55]

check: sums of many sizes have the bits of their plain meaning, in one shot and in two.
stress: so do 10,000 sums in captured graphs, which mix both, while ranks stall at random.
deadline: the error names a rank that does not come, to a sum of --shots.

The script ends after --limit seconds. Ranks may share a GPU (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1).
"""

import argparse
import os
import random
import time

import torch
import torch.distributed as dist

from benchmarks.kernels.all_reduce import ALWAYS, DEVICE, DTYPE, SHAPES, added, graph_of, ops, parts_of, say, start
from spec_compile.kernels import all_reduce
from spec_compile.kernels.linear import product_ops, skinny_gemm
from spec_compile.kernels.linear.plans import squared_columns
from spec_compile.kernels.linear.product import Product
from tests.support.counters import all_zero

PHASES = "check", "stress", "deadline"


def in_order(parts) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def in_pairs(squares: torch.Tensor) -> torch.Tensor:
    """[..., 2 ** n] -> [...], added in the order of `kernels.primitives`: [a, b, c, d] gives (a + b) + (c + d)."""
    while squares.shape[-1] > 1:
        squares = squares[..., ::2] + squares[..., 1::2]
    return squares[..., 0]


def wanted(parts, residual, weight) -> tuple[torch.Tensor, ...]:
    """The result that `added` must have."""
    total, scaled, _ = product_ops.plain_stream(in_order(parts).to(residual.dtype), residual, weight, 0.0)
    return total, scaled, in_pairs(total.float().square().unflatten(1, (-1, squared_columns(total.shape[1]))))


def differences(got, want) -> torch.Tensor:
    """The number of elements whose bits differ."""
    size = {2: torch.int16, 4: torch.int32}
    return sum((a.view(size[a.itemsize]) != b.view(size[b.itemsize])).sum() for a, b in zip(got, want))


def check(group_name: str) -> None:
    bad = {}
    for shots, all_reduce.HOP_BYTES in ALWAYS.items():
        bad |= {(shots, *case): int(count) for case, count in checked(group_name).items()}
    report("check", bad)


def checked(group_name: str) -> dict[tuple, torch.Tensor]:
    """How many numbers of each case have other bits than they should."""
    bad = {}
    for rows, size in [*SHAPES[::2], (3, 4096), (300, 4096), (7, 1024), (2, 576)]:
        parts, residual = parts_of((rows, size), rows), parts_of((rows, size), 1, DTYPE)[0]
        weight = parts_of((size,), 2, DTYPE)[0]
        want = wanted(parts, residual, weight)
        bad[rows, size, "added"] = differences(added(group_name, parts, residual, weight), want)
        if rows == 64:
            single = added(group_name, [part[5:6] for part in parts], residual[5:6], weight)
            bad[rows, size, "row"] = differences(single, [each[5:6] for each in want])
    for count, dtype in ((8, DTYPE), (1001, torch.float32), (1 << 18, DTYPE), (3 << 20, torch.float16)):
        parts = parts_of((count,), count, dtype)
        got = ops.all_reduce(parts[dist.get_rank()], group_name)
        bad[count, str(dtype)[6:]] = differences([got], [in_order(parts).to(dtype)])
    bad["product",] = differences(*products(group_name))
    for dtype, word in ((torch.float32, torch.int32), (DTYPE, torch.int16)):
        odd = torch.full((64,), -1, dtype=word, device=DEVICE).view(dtype)
        bad["nan", str(dtype)[6:]] = (~ops.all_reduce(odd, group_name).isnan()).sum()
    return bad


def products(group_name: str, rows: int = 16) -> tuple:
    """The op at a layer's end in a graph with this rank's product, and its result from the products of all ranks."""
    x, weights = parts_of((rows, 2048), 4, DTYPE), parts_of((4096, 2048), 5, DTYPE)
    residual, norm = parts_of((rows, 4096), 6, DTYPE)[0], parts_of((4096,), 7, DTYPE)[0]
    rank, got = dist.get_rank(), []
    arguments = x[rank], weights[rank], None, residual, norm, 0.0
    graph_of(lambda: got.append(ops.product_to_stream(*arguments, group_name=group_name))).replay()
    parts = [skinny_gemm.run(Product(*each), skinny_gemm.plan_of(*each), torch.float32) for each in zip(x, weights)]
    return got[-1], wanted(parts, residual, norm)


def report(name: str, bad: dict) -> None:
    """Print the cases that differ on any rank."""
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, {case: count for case, count in bad.items() if count})
    exchange = next(iter(all_reduce.EXCHANGES.values()))
    clear = bool((exchange.slots == -1).all())
    say(f"{name}: {len(bad)} cases,", "all bits as they should be" if not any(results) else f"DIFFERENT {results}")
    say(f"  turn {int(exchange.state[0])}, slots empty: {clear}, counters zero: {all_zero()}")


class Stress:
    """Sums of parts that change with each replay, in graphs whose ranks stall at random."""

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
                products.append(skinny_gemm.run(Product(x, weight), skinny_gemm.plan_of(x, weight), torch.float32))
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
        ((1, 4096, "added"), (16, 512, "product"), (1, 512, "product"), (1, 4096, "plain"), (64, 4096, "added")),
        ((1, 512, "product"), (9, 512, "product"), (3, 4096, "added")), ((5, 8192, "plain"),), ((300, 4096, "added"),),
    )  # fmt: skip
    graphs, shots = [], random.Random(4)  # the same on all ranks
    for each in sizes:

        def run(each=each):
            for size in each:
                all_reduce.HOP_BYTES = ALWAYS[shots.choice((1, 2))]
                work.sum(*size)

        graphs.append(graph_of(run))
    order, done = random.Random(5), 0  # the same on all ranks
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


def deadline(group_name: str, shots: int) -> None:
    """A rank that does not come. The last phase, because a rank that gave up can use its device no more."""
    late, x, all_reduce.HOP_BYTES = dist.get_world_size() - 1, torch.ones(4096, device=DEVICE), ALWAYS[shots]
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
    parser.add_argument("--shots", type=int, choices=ALWAYS, default=1, help="of the phase deadline")
    options = parser.parse_args()
    name, reason = start(options.limit)
    phases = {
        "check": lambda: check(name),
        "stress": lambda: stress(name, options.sums),
        "deadline": lambda: deadline(name, options.shots),
    }
    for phase in [each for each in PHASES if each in options.only and reason is None]:
        phases[phase]()
    os._exit(0)  # before NCCL reports a device that trapped


if __name__ == "__main__":
    main()
