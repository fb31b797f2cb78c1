"""Random calls of the native ops on a CPU, most of them damaged: each gives its plain result, or names what is wrong.

``python native_fuzz.py SECONDS SEED [FOLDER]``, with the compiled modules of a folder, such as those with sanitizers.
It prints the numbers of calls, of right results and of refusals, and fails with the first call that gives neither.
Trees get right calls only, those of their own tests: their arguments are addresses, which cannot be checked.
"""

import importlib.util
import random
import sys
import time
from itertools import chain
from pathlib import Path

MODULES = "kernels.native._cpu_gemm", "kernels.native._cpu_attention", "contrib.kernels._cpu_trees"
if len(sys.argv) > 3:
    for module in MODULES:
        (file,) = Path(sys.argv[3]).glob(f"{module.split('.')[-1]}*.so")
        spec = importlib.util.spec_from_file_location(f"spec_compile.{module}", file)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])

import pytest  # noqa: E402
import torch  # noqa: E402
from packed_layers import DRAWN, OF_CPU, prepared  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from spec_compile.cache import PAGE  # noqa: E402
from spec_compile.kernels.attention import cpu_attention  # noqa: E402
from spec_compile.kernels.launching import plain_kernels  # noqa: E402
from spec_compile.kernels.linear import cpu_gemm, cpu_products  # noqa: E402
from spec_compile.kernels.linear.product import Gate, Product, RmsNorm  # noqa: E402
from spec_compile.tree import ancestry  # noqa: E402

OPS = torch.ops.spec_compile
LAYOUTS = [name for name in (*DRAWN, *OF_CPU) if not name.startswith("w4a8")]
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.float8_e4m3fn, torch.bool,
)  # fmt: skip
INTEGERS = -(1 << 63), -(1 << 31), -65, -1, 0, 1, 3, 63, 64, 65, 511, 1 << 31, 1 << 32, (1 << 63) - 1
NUMBERS = -1.0, 0.0, 0.01, 1.0, 1e300, float("nan"), float("inf")
KINDS = "", "PerChannel 0", "CodeBlocks 4 0 0 0 0", "CodeBlocks 8 7 2 2 0", "CodeBlocks 4 32 1 1 0", "Fp8Block 128 128"
REFUSALS = TypeError, ValueError, RuntimeError  # the last is PyTorch's, where the kernel does not serve


def reshaped(x: torch.Tensor, pick: random.Random) -> torch.Tensor:
    """x with another shape, or other strides."""
    if not x.dim():
        return x[None]
    dim, other = pick.randrange(x.dim()), pick.randrange(x.dim())
    size = pick.choice((0, 1, x.shape[dim] + 1, 2 * x.shape[dim], max(x.shape[dim] - 1, 0)))
    index = torch.arange(size) % max(x.shape[dim], 1)
    return pick.choice((
        lambda: x.index_select(dim, index) if x.shape[dim] else x[None],
        lambda: x.transpose(dim, other),
        lambda: x.transpose(dim, other).contiguous(),
        lambda: x.repeat_interleave(2, dim).unflatten(dim, (-1, 2)).select(dim + 1, 0) if x.shape[dim] else x[None],
        lambda: x[None],
        lambda: x.flatten(),
        lambda: x.sum(dim, dtype=x.dtype) if x.dtype != torch.float8_e4m3fn else x.flatten(),
        lambda: x[(0,) * x.dim()] if x.numel() else x,
        lambda: x.narrow(dim, 0, 1).expand(x.shape) if x.shape[dim] else x,
    ))()  # fmt: skip


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """x at an address that is no multiple of the size of its numbers."""
    if not x.numel():
        return x
    memory = torch.empty(x.nbytes + 1, dtype=torch.uint8)
    moved = torch.frombuffer(memory.numpy(), dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)
    return moved.copy_(x)


def damaged(value, pick: random.Random):
    """Another value in the place of one of a call's."""
    if isinstance(value, list):
        if not value or pick.random() < 0.2:
            return pick.choice((value[:-1], value + value[-1:], []))
        place = pick.randrange(len(value))
        return [*value[:place], damaged(value[place], pick), *value[place + 1 :]]
    if isinstance(value, str):
        return pick.choice(KINDS)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick.choice(INTEGERS)
    if isinstance(value, float):
        return pick.choice(NUMBERS)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype in (torch.int32, torch.int64) and value.numel() and pick.random() < 0.5:
        value, least = value.clone(), torch.iinfo(value.dtype).min
        value.view(-1)[pick.randrange(value.numel())] = pick.choice([x for x in INTEGERS if least <= x <= ~least])
        return value
    return pick.choice((
        lambda: reshaped(value, pick), lambda: reshaped(value, pick), lambda: value.to(pick.choice(DTYPES)),
        lambda: value.to("meta"), lambda: misaligned(value),
    ))()  # fmt: skip


def rows_of(inputs: int, dtype: torch.dtype, pick: random.Random) -> torch.Tensor:
    """x [..., I]."""
    return torch.randn(*pick.choice(((1,), (3,), (2, 2), (9,), (70,))), inputs).to(dtype)


def layer(outputs: int, inputs: int, pick: random.Random) -> tuple[str, list[torch.Tensor]]:
    """The kind and the parts of a quantised layer."""
    layout, parts = prepared(pick.choice(LAYOUTS), outputs, inputs, on_cpu=True)[1]
    return layout.kind, list(parts)


def linear_call(pick: random.Random) -> tuple:
    dtype, (outputs, inputs) = pick.choice(DTYPES[:2]), (pick.randrange(1, 70), pick.randrange(1, 200))
    bias = torch.randn(outputs).to(dtype) if pick.random() < 0.5 else None
    return OPS.cpu_product, [rows_of(inputs, dtype, pick), torch.randn(outputs, inputs).to(dtype), bias]


def quantised_call(pick: random.Random) -> tuple:
    outputs, inputs = pick.choice(((136, 384), (40, 640)))
    dtype, (kind, parts) = pick.choice(DTYPES[:2]), layer(outputs, inputs, pick)
    bias = torch.randn(outputs).to(dtype) if pick.random() < 0.5 else None
    return OPS.quantised_linear, [rows_of(inputs, dtype, pick), parts, bias, kind]


def products_call(pick: random.Random) -> tuple:
    """Four products that follow one another, or the second of them alone."""
    sizes = (384, 640, 0, 0), (640, 272, 1, 1), (136, 640, 0, 0), (640, 40, 1, 0)
    entries, sizes = [], pick.choice((sizes, sizes, sizes[1:2]))
    for inputs, outputs, is_normed, is_gated in sizes:
        kind, parts = "", [torch.randn(outputs, inputs).bfloat16() * inputs**-0.5, None]
        if pick.random() < 0.5 and inputs > 136:
            kind, parts = layer(outputs, inputs, pick)
        bias, norm = (torch.rand(size).bfloat16() if is_normed else None for size in (outputs, inputs))
        before = RmsNorm(norm, 1e-5, None if pick.random() < 0.5 else 1.0) if is_normed else None
        gate = Gate() if is_gated else None
        entries.append(cpu_products.entries(Product(None, parts[0], bias, parts[1], kind, before, gate)))
    x = rows_of(sizes[0][0], torch.bfloat16, pick)
    residual = torch.randn(*x.shape[:-1], 640).bfloat16() if len(sizes) > 1 or pick.random() < 0.5 else None
    tensors, layers = zip(*entries)
    return OPS.cpu_products, [x, residual, [*chain.from_iterable(tensors)], "".join(layers)]


def attention_call(pick: random.Random) -> tuple:
    dtype, batch, causal = pick.choice(DTYPES[:2]), pick.randrange(1, 4), pick.random() < 0.5
    nodes, kv_heads, group = pick.choice((1, 2, 7, 33, 64, 100)[: 6 if causal else 5]), pick.randrange(1, 4), 2
    key_dim, value_dim = pick.choice(((16, 16), (24, 40), (64, 64), (6, 5)))
    slots = nodes + pick.choice((0, 1, 70, 600))
    q, k, v = (
        torch.randn(batch, nodes, heads, size).to(dtype).transpose(1, 2)
        for heads, size in ((kv_heads * group, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    )
    caches = (torch.randn(batch, kv_heads, slots, size).to(dtype) for size in (key_dim, value_dim))
    lengths = torch.tensor([pick.randrange(slots - nodes + 1) for _ in range(batch)])
    parents = torch.tensor([[-1, *(pick.randrange(i) for i in range(1, nodes))] for _ in range(batch)])
    ancestors, depth = (None, torch.arange(nodes)[None]) if causal else ancestry(parents)
    sinks = torch.randn(kv_heads * group) if pick.random() < 0.3 else None
    angles = [torch.randn(batch, nodes, key_dim).to(dtype) for _ in range(2)] if pick.random() < 0.5 else [None, None]
    rest = [sinks, 0.3, pick.choice((None, 5.0)), pick.choice((None, 9, 70))]
    seen, columns = (lengths, ancestors, lengths[:, None] + depth), -(-slots // PAGE)
    table = torch.arange(batch, dtype=torch.int32)[:, None] if pick.random() < 0.5 else None
    if columns > 1 and pick.random() < 0.5:
        pages = batch * columns + 2
        table = 1 + torch.randperm(pages - 1, dtype=torch.int32)[: batch * columns].view(batch, columns)
        caches = (torch.randn(pages, kv_heads, PAGE, size).to(dtype) for size in (key_dim, value_dim))
    last = [None, None, 0.0, None, None, None, None, None, table]  # from q_norm on
    return OPS.cpu_attention, [q, k, v, *caches, *seen, *rest, None, *angles, *last]


CALLS = linear_call, quantised_call, products_call, attention_call


def copied(value):
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def as_numbers(value, dtype: torch.dtype):
    if isinstance(value, list):
        return [as_numbers(each, dtype) for each in value]
    return None if value is None else value.to(dtype)


def plain(op, arguments):
    """What the call means in plain PyTorch, on copies."""
    arguments = copied(arguments)
    if op is OPS.cpu_product:
        x, weight, bias = arguments
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
    if op is OPS.quantised_linear and arguments[2] is not None and arguments[0].dtype in DTYPES[:2]:
        arguments[2] = arguments[2].to(arguments[0].dtype)  # the kernel takes a bias of any dtype
    with plain_kernels():
        return op(*arguments)


def differ(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return True
    got, want = got.double(), want.double()
    if not want.isfinite().all():  # a damaged number made it so, and other orders of sums have others of these
        return False
    # Four products that round their rows to 8 bits differ by up to 0.032: one bit of bfloat16 may change a code of FP8.
    return bool((got - want).norm() > 0.06 * want.norm() + 1e-3)


def told(value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(told, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    is_short = value.dtype in (torch.int32, torch.int64) and not value.is_meta and value.numel() <= 300
    numbers = value.tolist() if is_short else ""
    return f"{value.dtype}{list(value.shape)}{value.stride()}{numbers}"


def main(seconds: float, seed: int) -> None:
    pick, right, refused, levels = random.Random(seed), 0, 0, (cpu_gemm.BEST, cpu_attention.BEST)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        op, arguments = pick.choice(CALLS)(pick)
        cpu_gemm.BEST, cpu_attention.BEST = pick.randint(1, levels[0]), pick.randint(0, levels[1])
        is_damaged = pick.random() < 0.7
        if is_damaged:
            place = pick.randrange(len(arguments))
            arguments[place] = damaged(arguments[place], pick)
        call = f"{op} {told(arguments)} at {cpu_gemm.BEST} and {cpu_attention.BEST}"
        try:
            given = copied(arguments) if pick.random() < 0.5 else arguments
            before = copied(given)
            got = op(*given)
        except REFUSALS as error:
            assert is_damaged, f"a valid call was refused: {error!r}: {call}"
            refused += 1
            continue
        for one, other in zip((got,) if isinstance(got, torch.Tensor) else got, expected(op, before, call)):
            assert not differ(one, other), f"a wrong result: {call}"
        right += 1
    cpu_products._known.clear()
    print(f"{right + refused} calls, {right} right, {refused} refused")


def expected(op, before: list, call: str) -> tuple:
    if op is OPS.cpu_attention and before[-1] is not None and before[-1].shape[1] > 1 and not before[-1].all():
        return ()  # page 0 is a scratch page, whose numbers mean nothing
    try:
        want = plain(op, before)
    except Exception as error:
        # Kernels take biases of any dtype, and need indices of used pages only.
        if "same dtype" in str(error) or "Promotion for Float8" in str(error) or isinstance(error, IndexError):
            return ()
        raise AssertionError(f"a result where plain PyTorch has none, {error!r}: {call}") from error
    return (want,) if isinstance(want, torch.Tensor) else want


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
    sys.exit(pytest.main([str(Path(__file__).parents[1] / "contrib" / "test_cpu_trees.py")]))
