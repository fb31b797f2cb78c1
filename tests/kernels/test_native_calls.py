"""Wrong calls of the native ops on a CPU: each names what is wrong, and none ends the process or writes outside."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from cpu_levels import NEEDS_KERNEL

from spec_compile.kernels.attention import cpu_attention
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.launching import plain_kernels
from spec_compile.kernels.linear.cpu_products import entries
from spec_compile.kernels.linear.product import Gate, Product, RmsNorm

pytestmark = [NEEDS_KERNEL, pytest.mark.skipif(cpu_attention.BEST is None, reason="needs the package built")]
OPS = torch.ops.spec_compile
HERE = Path(__file__).parent
BFLOAT16, INT64 = torch.bfloat16, torch.int64


def product(**changed):
    given = dict(x=torch.ones(2, 64), weight=torch.ones(24, 64), bias=None)
    return OPS.cpu_product(**{**given, **changed})


def quantised(kind="PerChannel 0", codes=torch.int8, rows=24, **changed):
    parts = [torch.ones(rows, 64).to(codes), torch.ones(rows, 1)]
    given = dict(x=torch.ones(2, 64), parts=parts, bias=None, kind=kind)
    return OPS.quantised_linear(**{**given, **changed})


def blocks(kind="CodeBlocks 4 32 0 0 0", words=8, units=2, **changed):
    parts = [torch.zeros(24, words, dtype=torch.int32), torch.ones(24, units)]
    return quantised(kind, **{"parts": parts, **changed})


SQUARE = torch.ones(64, 64, dtype=BFLOAT16)


def products(count=1, x=SQUARE[:2], residual=SQUARE[2:4], **changed):
    """Products that add and are normed, without biases or gates. An argument is the entry of each, or a list of all."""
    given = dict(
        weights=SQUARE, scales=None, biases=None, kinds="", norms=SQUARE[0], eps=1e-5, offsets=None, gated=False,
    )  # fmt: skip
    lists = (each if isinstance(each, list) else [each] * count for each in {**given, **changed}.values())
    made = []
    for weight, scales, bias, kind, norm, eps, offset, gated in zip(*lists):
        before = None if norm is None else RmsNorm(norm, eps, offset)
        made.append(entries(Product(x, weight, bias, scales, kind, before, Gate() if gated else None)))
    return OPS.cpu_products(x, residual, [*chain(*(each[0] for each in made))], "".join(each[1] for each in made))


def attention(heads=4, kv_heads=2, slots=8, **changed):
    q, k, v = (torch.ones(1, count, 3, 16) for count in (heads, kv_heads, kv_heads))
    caches = (torch.zeros(1, kv_heads, slots, 16) for _ in range(2))
    given = AttentionCall(q, k, v, *caches, torch.tensor([5]), None, torch.tensor([[5, 6, 7]]), None, 0.25, None, 4)
    return OPS.cpu_attention(**{**given._asdict(), **changed})


def paged(table=((3, 1, 0),), slots=64, pages=4, dtype=torch.int32, **changed):
    """A call whose row has slots 0 to 63 in page 3, and the next ones in page 1."""
    caches = {name: zeros(pages, 2, slots, 16) for name in ("key_cache", "value_cache")}
    return attention(**{**caches, "lengths": torch.tensor([70]), "positions": torch.tensor([[70, 71, 72]]),
                        "table": torch.tensor(table, dtype=dtype), **changed})  # fmt: skip


def over_caches(field):
    """A call whose caches have memory that it reads."""
    memory = torch.zeros(2048)
    caches = dict(key_cache=memory[:256].view(1, 2, 8, 16), value_cache=memory[256:512].view(1, 2, 8, 16))
    inside = {
        "k": memory[16:112].view(1, 2, 3, 16), "lengths": memory[:2].view(INT64), "value_cache": caches["key_cache"],
        "positions": memory[510:516].view(INT64)[None],
    }  # fmt: skip
    if field == "table":
        pools = dict(key_cache=memory.new_zeros(2, 2, 64, 16), value_cache=memory.new_zeros(2, 2, 64, 16))
        return attention(**pools, table=pools["value_cache"].view(torch.int32).flatten()[:2][None])
    return attention(**{**caches, field: inside[field]})


def odd(*shape, dtype=torch.float32):
    """Zeros at an address that is no multiple of a number's size."""
    x = torch.frombuffer(bytearray(9 + 8 * torch.Size(shape).numel()), dtype=torch.uint8)[1:]
    count = torch.Size(shape).numel()
    return torch.frombuffer(x.numpy(), dtype=dtype, count=count).view(shape)


zeros = torch.zeros


WRONG = {
    "cpu_product": (product, [
        ("inputs too many", dict(x=zeros(2, 640)), ValueError, "weight"),
        ("no inputs", dict(x=zeros(2, 0), weight=zeros(24, 0)), ValueError, "x"),
        ("a number", dict(x=torch.tensor(1.0)), ValueError, "x"),
        ("transposed weight", dict(weight=zeros(64, 24).t()), ValueError, "weight"),
        ("weight of three dimensions", dict(weight=zeros(1, 24, 64)), ValueError, "weight"),
        ("meta weight", dict(weight=zeros(24, 64, device="meta")), ValueError, "x"),
        ("integers", dict(x=zeros(2, 64, dtype=INT64)), TypeError, "x"),
        ("halves", dict(x=zeros(2, 64, dtype=torch.float16)), TypeError, "x"),
        ("weight of halves", dict(weight=zeros(24, 64, dtype=torch.float16)), TypeError, "weight"),
        ("short bias", dict(bias=zeros(23)), ValueError, "bias"),
        ("no weight", dict(weight=None), TypeError, "weight"),
        ("odd address", dict(weight=odd(24, 64)), ValueError, "weight"),
        ("freed weight", dict(weight=(w := zeros(24, 64), w.untyped_storage().resize_(0))[0]), ValueError, "weight"),
    ]),
    "quantised_linear": (quantised, [
        ("no parts", dict(parts=[]), ValueError, "parts"),
        ("no scales", dict(parts=[zeros(24, 64, dtype=torch.int8)]), ValueError, "parts"),
        ("few scales", dict(parts=[zeros(24, 64, dtype=torch.int8), zeros(3, 1)]), ValueError, "scales"),
        ("scales of integers", dict(parts=[zeros(24, 64, dtype=torch.int8), zeros(24, 1, dtype=INT64)]), TypeError,
         "scales"),
        ("inputs too many", dict(x=zeros(2, 128)), ValueError, "weight"),
        ("sums beyond int32", dict(x=zeros(1, 70000), parts=[zeros(1, 70000, dtype=torch.int8), zeros(1, 1)]),
         ValueError, "x"),
        ("integers", dict(x=zeros(2, 64, dtype=INT64)), TypeError, "x"),
        ("unknown kind", dict(kind="Unknown 1"), ValueError, "kind"),
        ("meta codes", dict(parts=[zeros(24, 64, device="meta"), zeros(24, 1)]), ValueError, "x"),
    ]),
    "code blocks": (blocks, [
        ("no group", dict(kind="CodeBlocks 4 0 0 0 0"), ValueError, "kind"),
        ("an odd group", dict(kind="CodeBlocks 4 7 0 0 0"), ValueError, "kind"),
        ("a second number that is none", dict(kind="CodeBlocks 4 32 9 0 0"), ValueError, "kind"),
        ("a dtype that is none", dict(kind="CodeBlocks 4 32 0 7 0"), ValueError, "kind"),
        ("few words", dict(words=1), ValueError, "weight"),
        ("few units", dict(units=1), ValueError, "scales"),
        ("other codes", dict(kind="CodeBlocks 8 32 0 0 0"), ValueError, "weight"),
    ]),
    "cpu_products": (products, [
        ("short norm", dict(norms=zeros(8, dtype=BFLOAT16)), ValueError, "norm"),
        ("norm of floats", dict(norms=zeros(64)), ValueError, "norm"),
        ("norm with steps", dict(norms=zeros(128, dtype=BFLOAT16)[::2]), ValueError, "norm"),
        ("wide residual", dict(residual=zeros(2, 640, dtype=BFLOAT16)), ValueError, "residual"),
        ("residual of floats", dict(residual=zeros(2, 64)), TypeError, "residual"),
        ("half of a gate", dict(weights=zeros(23, 64, dtype=BFLOAT16), gated=True), ValueError, "weight"),
        ("inputs too many", dict(weights=zeros(24, 640, dtype=BFLOAT16)), ValueError, "weight"),
        ("meta norm", dict(norms=zeros(64, dtype=BFLOAT16, device="meta")), ValueError, "x"),
        ("no rows' inputs", dict(x=zeros(2, 0, dtype=BFLOAT16)), ValueError, "x"),
        ("integers", dict(x=zeros(2, 64, dtype=INT64)), TypeError, "x"),
        ("codes of no dimension", dict(kinds="PerChannel 0", weights=zeros((), dtype=torch.int8), scales=zeros(1)),
         ValueError, "weight"),
        ("no products", dict(count=0), ValueError, "tensors"),
        ("no weight", dict(weights=None), ValueError, "tensors"),
        ("other sizes", dict(count=2, weights=[zeros(32, 64, dtype=BFLOAT16), zeros(8, 64, dtype=BFLOAT16)]),
         ValueError, "weight|norm"),
        ("nothing is added", dict(count=2, norms=None), ValueError, "norms"),
    ]),
    "cpu_attention": (attention, [
        ("beyond the cache", dict(lengths=torch.tensor([6])), ValueError, "lengths"),
        ("far beyond", dict(lengths=torch.tensor([(1 << 63) - 1])), ValueError, "lengths"),
        ("below the cache", dict(lengths=torch.tensor([-1])), ValueError, "lengths"),
        ("lengths of int32", dict(lengths=torch.tensor([5], dtype=torch.int32)), TypeError, "lengths"),
        ("more lengths", dict(lengths=torch.tensor([5, 5])), ValueError, "lengths"),
        ("positions below", dict(positions=torch.tensor([[4, 5, 6]])), ValueError, "positions"),
        ("positions that fall", dict(positions=torch.tensor([[5, 7, 6]])), ValueError, "positions"),
        ("lowest positions", dict(positions=torch.full((1, 3), -(1 << 63))), ValueError, "positions"),
        ("few ancestors", dict(ancestors=torch.ones(1, 1, dtype=INT64)), ValueError, "ancestors"),
        ("no heads", dict(heads=0), ValueError, "q"),
        ("heads in no groups", dict(heads=3), ValueError, "q"),
        ("no room", dict(slots=2), ValueError, "key_cache"),
        ("no keys", dict(k=None), TypeError, "k"),
        ("halves", dict(q=zeros(1, 4, 3, 16, dtype=torch.float16)), TypeError, "q"),
        ("three dimensions", dict(q=zeros(4, 3, 16)), ValueError, "q"),
        ("short keys", dict(k=zeros(1, 2, 2, 16)), ValueError, "k"),
        ("one head of values", dict(v=zeros(1, 1, 3, 16)), ValueError, "v"),
        ("keys of bfloat16", dict(k=zeros(1, 2, 3, 16, dtype=BFLOAT16)), TypeError, "k"),
        ("cache in bytes", dict(key_cache=zeros(1, 2, 8, 16, dtype=torch.float8_e4m3fn)), TypeError, "key_cache"),
        ("cache with steps", dict(value_cache=zeros(1, 2, 16, 16)[:, :, ::2]), ValueError, "value_cache"),
        ("one slot for all", dict(key_cache=zeros(1, 2, 1, 16).expand(1, 2, 8, 16)), ValueError, "key_cache"),
        ("other slots", dict(value_cache=zeros(1, 2, 4, 16)), ValueError, "value_cache"),
        ("few sinks", dict(sinks=zeros(1)), ValueError, "sinks"),
        ("sinks of integers", dict(sinks=zeros(4, dtype=INT64)), TypeError, "sinks"),
        ("cos alone", dict(cos=zeros(1, 3, 16)), TypeError, "cos, sin"),
        ("short angles", dict(cos=zeros(1, 3, 8), sin=zeros(1, 3, 8)), ValueError, "cos"),
        ("no scale", dict(scale=0.0), ValueError, "scale"),
        ("infinite cap", dict(softcap=float("inf")), ValueError, "scale, softcap"),
        ("no cap", dict(softcap=0.0), ValueError, "scale, softcap"),
        ("no window", dict(window=0), ValueError, "window"),
        ("wide softcap", dict(softcap=2.0**20), ValueError, "softcap"),
        ("wide scale", dict(scale=2.0**31), ValueError, "scale"),
        ("meta cache", dict(key_cache=zeros(1, 2, 8, 16, device="meta")), ValueError, "q"),
        ("odd address", dict(key_cache=odd(1, 2, 8, 16)), ValueError, "key_cache"),
    ]),
    "cpu_attention over its caches": (over_caches, [
        (field, dict(field=field), ValueError, field) for field in ("k", "lengths", "value_cache", "positions", "table")
    ]),
    "cpu_attention in pages": (paged, [
        ("a page beyond the pool", dict(table=[[3, 4, 0]]), ValueError, r"table\[0\]\[1\]"),
        ("a page below the pool", dict(table=[[-1, 1, 0]]), ValueError, r"table\[0\]\[0\]"),
        ("beyond the row", dict(table=[[3, 1]], lengths=torch.tensor([126])), ValueError, "lengths"),
        ("int64", dict(dtype=INT64), TypeError, "table"),
        ("one row of numbers", dict(table=[3, 1]), ValueError, "table"),
        ("two rows", dict(table=[[3, 1], [3, 1]]), ValueError, "table"),
        ("no pages in a row", dict(table=[[]]), ValueError, "table"),
        ("no pages", dict(pages=0), ValueError, "cache|table"),
        ("small pages", dict(slots=32), ValueError, "table"),
        ("large pages", dict(slots=128), ValueError, "table"),
        ("a pool for one page", dict(table=[[0]]), ValueError, "key_cache"),
        ("other pages of values", dict(value_cache=zeros(3, 2, 64, 16)), ValueError, "value_cache"),
        ("a table elsewhere", dict(table=[[3, 1, 0]], q=zeros(1, 4, 3, 16, device="meta")), ValueError, "q"),
    ]),
}  # fmt: skip
CASES = {f"{op}: {what}": (run, *rest) for op, (run, cases) in WRONG.items() for what, *rest in cases}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_is_refused_by_name(name):
    """One that is not refused may end the process."""
    run, changed, error, names = CASES[name]
    with pytest.raises(error, match=names):
        run(**changed)


@pytest.mark.parametrize("view", [torch.t, lambda weight: weight.view(torch.float16)], ids=["turned", "other numbers"])
def test_a_known_chain_serves_no_other_tensors_at_its_addresses(view):
    weight = torch.randn(64, 64).to(BFLOAT16) / 8
    products(2, weights=[weight, weight])
    with plain_kernels():
        want = products(2, weights=[view(weight), weight])
    for one, other in zip(products(2, weights=[view(weight), weight]), want):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def test_a_weight_of_another_dtype_is_rounded():
    weight = torch.randn(24, 64)
    stream, out = products(weights=weight)
    _, want = products(weights=weight.to(BFLOAT16))
    assert stream.isfinite().all()
    torch.testing.assert_close(out, want, rtol=0.03, atol=0.03)
    x, weight = SQUARE[:2], torch.randn(24, 64)
    torch.testing.assert_close(product(x=x, weight=weight), product(x=x, weight=weight.to(BFLOAT16)))


def test_calls_without_tokens_are_empty():
    assert product(x=zeros(0, 64)).shape == (0, 24) and product(weight=zeros(0, 64)).shape == (2, 0)
    none = dict(q=zeros(1, 4, 0, 16), k=zeros(1, 2, 0, 16), v=zeros(1, 2, 0, 16), positions=zeros(1, 0, dtype=INT64))
    assert attention(**none).shape == (1, 0, 4, 16)


def test_a_wrong_call_is_refused_while_it_is_traced():
    for run, changed in (
        (product, dict(x=zeros(2, 640))),
        (attention, dict(heads=3)),
        (products, dict(residual=zeros(1, dtype=BFLOAT16))),
    ):
        with pytest.raises((TypeError, ValueError)), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            run(**changed)


@pytest.mark.slow
def test_random_calls_under_sanitizers(tmp_path):
    """The C++ of the kernels with the sanitizers of addresses and undefined behaviour."""
    pytest.importorskip("nanobind")
    root, flags = HERE.parents[1], "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    options = (f"-DCMAKE_CXX_FLAGS={flags}", "-DCMAKE_BUILD_TYPE=Plain", f"-DPython_EXECUTABLE={sys.executable}")
    subprocess.run(["cmake", "-S", root, "-B", tmp_path, *options], check=True)
    modules = "_cpu_gemm", "_cpu_attention", "_cpu_trees"
    subprocess.run(["cmake", "--build", tmp_path, "-j2", "--target", *modules], check=True)
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan", "libubsan", "libstdc++")
    ]
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(root), str(HERE.parent / "support")]),
    }  # fmt: skip
    driver = [sys.executable, HERE.parent / "support" / "native_fuzz.py", "60", "1", tmp_path]
    done = subprocess.run(driver, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
