"""Products of few rows on a GPU: all linear layers of a model, one after another, ours against cuBLAS.

    python benchmarks/matmul_kernel.py [--models 8B,1B,0.6B] [--rows 1,16] [--between] [--tune]

Each figure is the time of a CUDA graph that multiplies with every layer's weights once, each layer its own, so that
none are in a cache. "floor" is the time in which the GPU reads as many bytes. --between puts an RMSNorm between the
products. --tune tries plans, in a stack of a few layers, and prints the best.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import time

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from spec_compile.kernels.linear import small_m as kernel
from spec_compile.kernels.linear.plans import Plan

PARTS = ("qkv", "o", "gate_up", "down", "lm_head")
MODELS = {  # layers, and of each part the shape of the weights
    "8B": (32, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
                "lm_head": (128256, 4096)}),
    "1B": (16, {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192),
                "lm_head": (128256, 2048)}),
    "0.6B": (28, {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072),
                  "lm_head": (151936, 1024)}),
}  # fmt: skip


BETWEEN = {  # what is put between two products
    None: "nothing between",
    0: "RMSNorm between",
    1: "RMSNorm between that lets the next kernel begin when its own input is there",
    2: "RMSNorm between that lets the next kernel begin at once",
}


@triton.jit
def norm(x, out, x_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of rows; with PDL 1 the next kernel may begin when x is there, with 2 at once."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * x_stride + at, mask=at < size, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / size + 1e-6)
    tl.store(out + tl.program_id(0) * size + at, value.to(out.dtype.element_ty), mask=at < size)


def graph_time(run, repeats: int = 5) -> float:
    """Microseconds that a replay of the captured `run` takes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))[repeats // 2] * 1e3


class Stack:
    """All weights of a model's linear layers, random."""

    def __init__(self, model: str):
        self.layers, self.shapes = MODELS[model]
        elements = {part: rows * columns for part, (rows, columns) in self.shapes.items()}
        count = {part: 1 if part == "lm_head" else self.layers for part in PARTS}
        self.bytes = 2 * sum(elements[part] * count[part] for part in PARTS)
        store = torch.empty(self.bytes // 2, dtype=torch.bfloat16, device="cuda")
        for part in store.split(1 << 27):
            part.normal_(0, 0.02)
        pieces = store.split([elements[part] for _ in range(self.layers) for part in PARTS[:4]] + [elements["lm_head"]])
        names = [*PARTS[:4] * self.layers, "lm_head"]
        self.weights = [(name, piece.view(self.shapes[name])) for name, piece in zip(names, pieces)]

    def of(self, part: str) -> list:
        """The weights of one part; the head's four times, as one is too few to time."""
        return [(name, weight) for name, weight in self.weights if name == part] * (4 if part == "lm_head" else 1)

    def time(self, rows: int, multiply, weights=None, between: int | None = None, chain: bool = True) -> float:
        """Microseconds. Each product reads the first columns of the one before it, or all read the same."""
        weights = self.weights if weights is None else weights
        x = torch.randn(rows, max(columns for _, columns in self.shapes.values()), device="cuda").bfloat16()
        normed = torch.empty_like(x)

        def run():
            y = x
            for name, weight in weights:
                columns = weight.shape[1]
                y = (y if chain else x)[:, :columns]
                if between is not None:
                    target = normed.view(-1)[: rows * columns].view(rows, columns)
                    options = {"launch_pdl": True} if between else {}
                    block = triton.next_power_of_2(columns)
                    norm[(rows,)](y, target, y.stride(0), columns, block, between, num_warps=8, **options)
                    y = target
                y = multiply(name, y, weight)

        return graph_time(run)


def cublas(name, x, weight):
    return F.linear(x, weight)


def ours(name, x, weight):
    return kernel.small_m_matmul(x, weight, None)


def planned(plans: dict):
    """A product by the plans of the parts; with none, or of a part without, cuBLAS."""

    def multiply(name, x, weight):
        if plans[name] is None:
            return F.linear(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        kernel.launch(x, weight, None, out, plans[name])
        return out

    return multiply


@triton.jit
def _swiglu(x, out, half, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = x + tl.program_id(1) * 2 * half
    gate = tl.load(row + at, mask=at < half).to(tl.float32)
    up = tl.load(row + half + at, mask=at < half).to(tl.float32)
    tl.store(out + tl.program_id(1) * half + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), at < half)


def then_swiglu(multiply, pdl: int):
    """The product, then a kernel for the activation."""

    def run(name, x, weight):
        y = multiply(name, x, weight)
        half = y.shape[1] // 2
        out = y.new_empty(y.shape[0], half)
        _swiglu[(triton.cdiv(half, 1024), y.shape[0])](y, out, half, 1024, pdl, **({"launch_pdl": True} if pdl else {}))
        return out

    return run


def swiglu(plan):
    """Both in one kernel."""

    def run(name, x, weight):
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        kernel.launch(x, weight, None, out, plan or Plan(64, 128, 132, late=1), gated=True)
        return out

    return run


@triton.jit
def _read(x, out, blocks, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        total += tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads."""
    x = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(528, device="cuda")
    return x.numel() * 2 / graph_time(lambda: _read[(528,)](x, out, x.numel() // 4096, 4096)) * 1e6


def compare(models, counts, between) -> None:
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    print(f"reading alone: {bandwidth / 1e12:.2f} TB/s. Microseconds for each product, ours / cuBLAS, in a row of its")
    print("kind; then milliseconds for all in the model's order.")
    for model in models:
        stack = Stack(model)
        floor = stack.bytes / bandwidth * 1e3
        print(f"\n| {model}, N | " + " | ".join(PARTS) + " | all: ours | cuBLAS | floor | ours, TB/s |")
        print("|---|" + "---|" * (len(PARTS) + 4))
        for rows in counts:
            cells = []
            for part in PARTS:
                some = stack.of(part)
                pair = [stack.time(rows, how, some, chain=False) / len(some) for how in (ours, cublas)]
                cells.append("{:.2f} / {:.2f}".format(*pair))
            a, b = (stack.time(rows, how) / 1e3 for how in (ours, cublas))
            cells += [f"{a:.3f}", f"{b:.3f}", f"{floor:.3f}", f"{stack.bytes / a / 1e9:.2f}"]
            print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)
            if between:
                for kind, text in [*BETWEEN.items()][1:]:
                    a, b = (stack.time(rows, how, between=kind) / 1e3 for how in (ours, cublas))
                    print(f"  {text}: {a:.3f} / {b:.3f}", flush=True)
        del stack


TILES = {  # block_o, block_k, warps, stages; for up to so many rows, 1 to 4 of them without tensor cores
    16: [(64, 128, 4, 5), (64, 128, 4, 8), (64, 256, 4, 3), (64, 256, 4, 4), (32, 256, 4, 4), (32, 256, 4, 6),
         (128, 128, 8, 3), (128, 128, 8, 4), (64, 64, 4, 10), (64, 128, 4, 3), (32, 128, 4, 6), (32, 512, 4, 3),
         (16, 256, 2, 6), (16, 512, 2, 4), (16, 512, 4, 4), (16, 1024, 4, 2)],
    64: [(64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (128, 64, 8, 6), (128, 128, 8, 3), (128, 128, 8, 4),
         (64, 64, 4, 6), (32, 128, 4, 5), (32, 256, 4, 4)],
    1: [(8, 512, 4, 4), (8, 512, 4, 9), (16, 512, 4, 4), (4, 1024, 4, 4), (16, 256, 4, 4)],
    4: [(8, 256, 4, 4), (8, 256, 4, 14), (4, 512, 4, 4), (8, 512, 8, 4)],
}  # fmt: skip
TILES[32] = [*TILES[16][:7], (64, 128, 4, 4), (32, 128, 4, 5)]
TILES[2] = [*TILES[4], (8, 512, 4, 4)]
NOW = 1 << 30


def plans(rows: int, outputs: int, inputs: int):
    """The tiles to try for a product."""
    choices = [(True, tile) for tile in TILES[max(16, triton.next_power_of_2(rows))]]
    if rows <= 4:
        choices += [(False, tile) for tile in TILES[triton.next_power_of_2(rows)]]
    for dot, (block_o, block_k, warps, stages) in choices:
        room = 220 * 1024 // (stages * 2 * block_k * (block_o + (max(16, rows) if dot else 0)) + 1024)
        if room < 1:
            continue
        tiles = -(-outputs // block_o)
        most = min(room, 3 if dot else 4)
        grids = {132, 132 * most}
        for count in {1, most}:
            times = max(1, 132 * count // tiles)
            if 0.9 * 132 * count < tiles * times <= 132 * count:
                grids = grids - {132 * count} | {tiles * times}
        if tiles > 132 * most // 2:
            grids.add(tiles)
        for programs in sorted(grids):
            total = -(-inputs // block_k) * tiles
            if programs <= total and kernel.shared_by(total // tiles, total, programs) <= 8:
                yield Plan(block_o, block_k, programs, warps, stages, dot, late=1)


def manners(plan: Plan) -> list[Plan]:
    """A plan with other ways to follow and to precede a kernel."""
    ways = [(late, prefetch) for late in (1, 4, NOW) for prefetch in ((0, 2, 4, 8) if plan.dot else (0,))]
    return [plan._replace(pdl=False), *(plan._replace(late=late, prefetch=prefetch) for late, prefetch in ways)]


class _Warm:
    """A kernel that only compiles."""

    def __init__(self, jitted):
        self.jitted = jitted

    def __getitem__(self, grid):
        return functools.partial(self.jitted.warmup, grid=grid)


def _compile(job) -> None:
    rows, shape, plan = job
    if not isinstance(kernel.small_m_kernel, _Warm):
        kernel.small_m_kernel = _Warm(kernel.small_m_kernel)
    x, weight, out = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((rows, shape[1]), shape, (rows, 1)))
    try:
        kernel.launch(x, weight, None, out, plan)
    except Exception as error:
        return f"{plan}: {type(error).__name__} {str(error)[:100]}"


def compile_all(jobs) -> None:
    """Into Triton's cache, with all processors."""
    unique = {}
    for rows, (outputs, inputs), plan in jobs:
        width = max(16, triton.next_power_of_2(rows)) if plan.dot else rows
        steps, tiles = -(-inputs // plan.block_k), -(-outputs // plan.block_o)
        parts = kernel.shared_by(steps, steps * tiles, min(plan.programs, steps * tiles))
        key = width, parts, plan._replace(programs=0, late=0, prefetch=0)
        unique.setdefault(key, (rows, (outputs, inputs), plan))
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        errors = [e for e in pool.imap_unordered(_compile, list(unique.values()), chunksize=2) if e]
    print(f"compiled {len(unique)} kernels in {time.perf_counter() - begin:.0f} s", *errors[:5], sep="\n", flush=True)


def short(plan) -> str:
    if plan is None:
        return "cuBLAS"
    words = [f"{plan.block_o}x{plan.block_k}", f"w{plan.warps}", f"s{plan.stages}", f"p{plan.programs}"]
    words += ["cores"] * (not plan.dot) + [f"late{plan.late}"] * (plan.late < NOW)
    return " ".join(words + [f"pf{plan.prefetch}"] * (plan.prefetch > 0) + ["plain"] * (not plan.pdl))


def tune(models, counts, seconds: float) -> None:
    """Coordinate descent over the plans of the parts, on the time of a stack of few layers with RMSNorms between."""
    begin = time.perf_counter()
    shapes = [(rows, shape) for model in models for rows in counts for shape in MODELS[model][1].values()]
    jobs = [
        (*shape, plan._replace(pdl=pdl)) for shape in shapes for plan in plans(shape[0], *shape[1]) for pdl in (0, 1)
    ]
    compile_all(jobs)
    for model in models:
        stack = Stack(model)
        few = stack.weights[: 4 * {"8B": 4, "1B": 6, "0.6B": 10}[model]]
        for rows in counts:
            if time.perf_counter() - begin > seconds:
                print("out of time before", model, rows)
                break

            def measure(choice, weights=few, between=1, stack=stack, rows=rows, **options):
                try:
                    return stack.time(rows, planned(choice), weights, between, **options)
                except triton.runtime.errors.OutOfResources:
                    return float("inf")

            def descend(best, current, options, measure=measure):
                for part, choices in options.items():
                    for plan in choices:
                        if plan != current[part]:
                            taken = measure({**current, part: plan})
                            if taken < best:
                                best, current = taken, {**current, part: plan}
                return best, current

            order = ("gate_up", "down", "qkv", "o")
            options = {part: list(plans(rows, *stack.shapes[part])) for part in order}
            current = {part: next(iter(options[part]), None) for part in order}
            best, current = descend(measure(current), current, options)
            for _ in range(2):
                chosen = {part: plan for part, plan in current.items() if plan}
                ways = {part: manners(plan) + [None] * (rows > 8) for part, plan in chosen.items()}
                best, current = descend(best, current, ways)
                chosen = {part: plan._asdict() for part, plan in current.items() if plan}
                manner = {part: {key: old[key] for key in ("late", "prefetch", "pdl")} for part, old in chosen.items()}
                again = {part: [plan._replace(**way) for plan in options[part]] for part, way in manner.items()}
                best, current = descend(best, current, again)
            scale = len(few) / 4
            without = dict.fromkeys(PARTS)
            text = f"{best / scale:.2f}, cuBLAS {measure(without) / scale:.2f}"
            print(f"\n{model} N={rows}, us a layer with RMSNorms between: {text}")
            for part in order:
                print(f"  {part}: {short(current[part])}")
            head = stack.of("lm_head")
            choices = [*plans(rows, *stack.shapes["lm_head"]), None]
            taken = [measure({"lm_head": choice}, head, None, chain=False) / len(head) for choice in choices]
            current["lm_head"] = choices[taken.index(min(taken))]
            print(f"  lm_head: {short(current['lm_head'])}, {min(taken):.1f}; cuBLAS {taken[-1]:.1f}")
            for between, text in BETWEEN.items():
                a, b = (stack.time(rows, planned(c), between=between) / 1e3 for c in (current, without))
                print(f"  all, in ms, {text}: {a:.3f}, cuBLAS {b:.3f}")
            print(f"  [{time.perf_counter() - begin:.0f} s]", flush=True)
            if rows not in (1, 16):
                continue
            gates = stack.of("gate_up")[: len(few)]
            times = [
                stack.time(rows, how, gates, chain=False) / len(gates)
                for how in (
                    then_swiglu(planned(current), 0),
                    then_swiglu(planned(current), 1),
                    swiglu(current["gate_up"]),
                )
            ]
            print("  gate_up, silu and product: apart {:.2f} (dependent launch {:.2f}), in one {:.2f}".format(*times))
        del stack


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--between", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further shape after so long")
    options = parser.parse_args()
    models, counts = options.models.split(","), [int(n) for n in options.rows.split(",")]
    if options.tune:
        tune(models, counts, options.seconds)
    else:
        compare(models, counts, options.between)


if __name__ == "__main__":
    main()
