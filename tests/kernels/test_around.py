"""Products on a CPU with the norm before them and the gate after them, against plain PyTorch, at every level."""

import pytest
import torch
from cpu_levels import NEEDS_KERNEL

from spec_compile.kernels.launching import plain_kernels
from spec_compile.kernels.linear import around, few_rows
from spec_compile.kernels.linear.few_rows import NUMBERS, Around, multiply
from spec_compile.quantised.rounded import int8

pytestmark = NEEDS_KERNEL
BFLOAT16 = torch.bfloat16
ULP = 2**-7
"""The distance of two neighbours in bfloat16, relative to them, is at most this."""


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("size", [64, 77])
def test_a_norm_of_a_sum(size, offset, level):
    """The product with a unit matrix is the normed row."""
    x, residual, norm, unit = drawn(9, size), 3 * drawn(9, size, seed=1), drawn(size, seed=2), torch.eye(size)
    stream = torch.empty_like(x)
    places = Around(norm, 1e-5, offset, residual, stream)
    got = multiply(NUMBERS[BFLOAT16], x, unit.to(BFLOAT16), None, None, level, places)
    assert torch.equal(stream, x + residual)
    wide = stream.float() * torch.rsqrt(stream.float().square().mean(1, keepdim=True) + 1e-5)
    want = norm * wide.to(BFLOAT16) if offset is None else (wide * (norm.float() + offset)).to(BFLOAT16)
    torch.testing.assert_close(got, want, rtol=ULP, atol=0)
    assert (got == want).float().mean() > 0.99


def test_a_gate(level):
    """Gates of every size. Products with zeros leave the biases, of which these are the first half."""
    small = torch.linspace(-20, 20, 200)
    gates = torch.cat([small, torch.tensor([-0.0, -86.0, -100.0, 3e38, -3e38, torch.inf, torch.nan])]).to(BFLOAT16)
    x, bias = torch.zeros(1, 4, dtype=BFLOAT16), torch.cat([gates, torch.full_like(gates, 2.0)])
    weight = torch.zeros(len(bias), 4, dtype=BFLOAT16)
    got = multiply(NUMBERS[BFLOAT16], x, weight, None, bias, level, Around(is_gated=True))
    want = torch.nn.functional.silu(gates) * 2
    torch.testing.assert_close(got[0], want, rtol=ULP, atol=1e-35, equal_nan=True)
    assert (got[0] == want)[:200].float().mean() > 0.99


@pytest.mark.parametrize("kind", ["", "Int8Weight"])
def test_a_row_has_the_same_bits_with_any_number_of_rows(kind, level):
    x, residual, norm, weight = drawn(1, 20, 96), drawn(1, 20, 96, seed=1), drawn(96, seed=2), drawn(80, 96, seed=3)
    parts, bias = [*int8(weight).parts.values()] if kind else [weight], drawn(80, seed=4)
    rest = 1e-5, None, parts, bias, kind, True
    stream, out = around.ADD_AROUND(x, residual, norm, *rest)
    for rows in (1, 3, 7):
        some = around.ADD_AROUND(x[:, -rows:], residual[:, -rows:], norm, *rest)
        assert torch.equal(some[0], stream[:, -rows:]) and torch.equal(some[1], out[:, -rows:])
    assert torch.equal(around.AROUND(stream, norm, *rest), out)
    with plain_kernels():
        plain = around.ADD_AROUND(x, residual, norm, *rest)
    assert torch.equal(plain[0], stream)
    assert (plain[1].float() - out.float()).norm() < 0.01 * out.float().norm()
    wide = around.AROUND(stream.float(), norm.float(), *rest[:2], parts, bias.float(), *rest[4:])
    assert wide.dtype == torch.float32 and (wide - out.float()).norm() < 0.01 * wide.norm()


def test_weights_that_the_kernel_does_not_take(level):
    weight = drawn(8, 16)
    assert not around.serves(torch.float32, [weight], "") and not around.serves(BFLOAT16, [weight.t()], "")
    assert around.serves(BFLOAT16, [*int8(weight).parts.values()], "Int8Weight")
    assert around.serves(BFLOAT16, [weight], "") == (level >= few_rows.WIDE)
