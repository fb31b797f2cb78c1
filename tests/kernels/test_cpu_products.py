"""Products on a CPU in one call, with what stands around them, against plain PyTorch, at every level."""

from itertools import chain
from unittest import mock

import pytest
import torch
from cpu_levels import NEEDS_KERNEL

from spec_compile import quantised
from spec_compile.kernels.launching import plain_kernels
from spec_compile.kernels.linear import cpu_gemm, cpu_products
from spec_compile.kernels.linear.cpu_products import CPU_PRODUCTS
from spec_compile.kernels.linear.product import Gate, Product, RmsNorm
from spec_compile.quantised.rounded import int4, int8

pytestmark = NEEDS_KERNEL
BFLOAT16 = torch.bfloat16
ULP = 2**-7
"""The distance of two neighbours in bfloat16, relative to them, is at most this."""
SIZES = (64, 128, False, False), (128, 384, True, True), (192, 128, False, False), (128, 320, True, False)
"""Inputs and outputs of each product, if it is normed, and if it is gated."""


def entry(weight, scales=None, bias=None, kind="", norm=None, eps=1e-5, offset=None, gated=False):
    """The op's arguments for one product."""
    before = None if norm is None else RmsNorm(norm, eps, offset)
    return cpu_products.entries(Product(None, weight, bias, scales, kind, before, Gate() if gated else None))


def run(x, residual, *products):
    tensors, layers = zip(*products)
    return CPU_PRODUCTS(x, residual, [*chain.from_iterable(tensors)], "".join(layers))


def of_codes(numbers):
    """A layer whose weights are small whole numbers, which the kernel multiplies at every level."""
    parts = [numbers.to(torch.int8), torch.ones(len(numbers), 1)]
    return dict(zip(("weight", "scales"), parts), kind="Int8Weight")


def chain_of(make=None, biased=False, sizes=SIZES):
    entries = []
    for inputs, outputs, is_normed, is_gated in sizes:
        kind, parts = "", [torch.randn(outputs, inputs).bfloat16() * inputs**-0.5, None]
        if make is not None:
            packed = make(parts[0])
            layout, parts = quantised.for_kernel(packed.layout, [*packed.parts.values()], inputs, True)
            kind = layout.kind
        norm = torch.rand(inputs).bfloat16() if is_normed else None
        bias = torch.randn(outputs).bfloat16() if biased else None
        entries.append(entry(*parts, bias, kind, norm, 1e-5, None if is_gated else 1.0, is_gated))
    return entries


def one_by_one(x, stream, entries):
    for each in entries:
        adds = cpu_products.products_of(x, None, *each)[0].before is not None
        after, x = run(x, stream if adds else None, each)
        stream = after if adds else stream
    return stream, x


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("size", [64, 77])
def test_a_norm_of_a_sum(size, offset, level):
    """The product with a unit matrix is the normed row."""
    x, residual, norm = drawn(9, size), 3 * drawn(9, size, seed=1), drawn(size, seed=2)
    stream, got = run(x, residual, entry(**of_codes(torch.eye(size)), norm=norm, offset=offset))
    assert torch.equal(stream, x + residual)
    wide = stream.float() * torch.rsqrt(stream.float().square().mean(1, keepdim=True) + 1e-5)
    want = norm * wide.to(BFLOAT16) if offset is None else (wide * (norm.float() + offset)).to(BFLOAT16)
    torch.testing.assert_close(got, want, rtol=ULP, atol=0)
    assert (got == want).float().mean() > 0.99
    assert torch.equal(run(stream, None, entry(**of_codes(torch.eye(size)), norm=norm, offset=offset))[1], got)


def test_a_gate(level):
    """Gates of every size. Products with zeros leave the biases, of which these are the first half."""
    small = torch.linspace(-20, 20, 200)
    gates = torch.cat([small, torch.tensor([-0.0, -86.0, -100.0, 3e38, -3e38, torch.inf, torch.nan])]).to(BFLOAT16)
    x, bias = torch.zeros(1, 4, dtype=BFLOAT16), torch.cat([gates, torch.full_like(gates, 2.0)])
    _, got = run(x, None, entry(**of_codes(torch.zeros(len(bias), 4)), bias=bias, gated=True))
    want = torch.nn.functional.silu(gates) * 2
    torch.testing.assert_close(got[0], want, rtol=ULP, atol=1e-35, equal_nan=True)
    assert (got[0] == want)[:200].float().mean() > 0.99


@pytest.mark.parametrize("make", [None, int8])
def test_a_row_has_the_same_bits_with_any_number_of_rows(make, level):
    (each,) = chain_of(make, True, [(96, 80, True, True)])
    x, residual = drawn(1, 20, 96), drawn(1, 20, 96, seed=1)
    stream, out = run(x, residual, each)
    for rows in (1, 3, 7):
        some = run(x[:, -rows:], residual[:, -rows:], each)
        assert torch.equal(some[0], stream[:, -rows:]) and torch.equal(some[1], out[:, -rows:])
    assert torch.equal(run(stream, None, each)[1], out)
    with plain_kernels():
        plain = run(x, residual, each)
    assert torch.equal(plain[0], stream)
    assert (plain[1].float() - out.float()).norm() < 0.01 * out.float().norm()
    wider = [part.float() if part.dtype == BFLOAT16 and part.dim() == 1 else part for part in each[0]]
    _, wide = run(stream.float(), None, (wider, each[1]))
    assert wide.dtype == torch.float32 and (wide - out.float()).norm() < 0.01 * wide.norm()


def test_weights_that_the_kernel_does_not_take(level):
    weight, serves = drawn(8, 16), cpu_products.supports
    assert not serves(torch.float32, [weight], "") and not serves(BFLOAT16, [weight.t()], "")
    assert serves(BFLOAT16, [*int8(weight).parts.values()], "Int8Weight")
    assert serves(BFLOAT16, [weight], "") == (level > 0)


FALLING = (128, 64, True, False), (64, 32, False, False), (32, 8, False, False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [None, int8, int4])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[1:3], SIZES[1:], FALLING])
def test_chains_have_the_bits_of_single_products(make, biased, sizes, level):
    """Also those that begin or end with an addition, or have only one."""
    entries = chain_of(make, biased, sizes)
    for rows in (1, 5, 16, 70) if sizes is SIZES else (3,):  # a library multiplies 70 with AVX-512
        x, residual = drawn(1, rows, sizes[0][0]), drawn(1, rows, 128, seed=1)
        for got, want in zip(run(x, residual, *entries), one_by_one(x, residual, entries)):
            assert torch.equal(got, want)


def test_other_activations_are_multiplied_in_plain_pytorch(level):
    """Of float32, and where no kernel of ours runs."""
    entries = chain_of(int8)
    x, residual = torch.randn(1, 3, 64), torch.randn(1, 3, 128)
    with mock.patch.object(cpu_gemm, "new_chain", side_effect=AssertionError):
        for got, want in zip(run(x, residual, *entries), one_by_one(x, residual, entries)):
            assert torch.equal(got, want)
        with plain_kernels():
            run(x.bfloat16(), residual.bfloat16(), *entries)


def test_a_chain_is_made_once(monkeypatch, level):
    monkeypatch.setattr(cpu_products, "_known", {})
    entries, x, residual = chain_of(int8), torch.randn(1, 3, 64).bfloat16(), torch.randn(1, 3, 128).bfloat16()
    with mock.patch.object(cpu_gemm, "new_chain", wraps=cpu_gemm.new_chain) as make:
        for _ in range(2):
            run(x, residual, *entries)
        assert make.call_count == 1
        monkeypatch.setattr(cpu_products, "KNOWN", 1)
        run(x, residual, *chain_of(int8))
    assert make.call_count == 2 and len(cpu_products._known) == 1


def test_other_tensors_at_the_same_address(level):
    weight, x = of_codes(drawn(8, 64).sign()), drawn(3, 64)
    whole = run(x, None, entry(**weight))[1]
    half = run(x, None, entry(weight["weight"][:4], weight["scales"][:4], kind=weight["kind"]))[1]
    assert torch.equal(half, whole[:, :4])


def test_the_arguments_of_products_are_read_back():
    norm = RmsNorm(torch.ones(3), 1e-5, None)
    layers = [
        Product(None, torch.ones(4, 3), torch.ones(4), torch.ones(4, 1), "Int8Weight", norm, Gate()),
        Product(None, torch.ones(4, 2)),
        Product(None, torch.ones(2, 4), before=norm._replace(offset=1.0)),
    ]
    made = [cpu_products.entries(each) for each in layers]
    tensors, text = [*chain.from_iterable(each for each, _ in made)], "".join(each for _, each in made)
    assert cpu_products.products_of(None, None, tensors, text) == layers


def test_shapes_without_values():
    entries = [([each.to("meta") for each in tensors], layer) for tensors, layer in chain_of(int4, biased=True)]
    x, residual = (torch.empty(1, 3, size, dtype=BFLOAT16, device="meta") for size in (64, 128))
    stream, out = run(x, residual, *entries)
    assert stream.shape == (1, 3, 128) and out.shape == (1, 3, 320)
    assert run(x, None, entries[0])[0].shape == (0,)
