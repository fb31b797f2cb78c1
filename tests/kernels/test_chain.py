"""Products in one call against the same ops one by one, whose bits they have."""

import itertools
from unittest import mock

import pytest
import torch
from cpu_levels import NEEDS_KERNEL

from spec_compile import quantised
from spec_compile.kernels.launching import plain_kernels
from spec_compile.kernels.linear import around, chain, few_rows
from spec_compile.kernels.linear.chain import CHAIN, Link, links_of
from spec_compile.quantised.rounded import int4, int8

pytestmark = NEEDS_KERNEL
SIZES = (64, 128, False, False), (128, 384, True, True), (192, 128, False, False), (128, 320, True, False)
"""Inputs and outputs of each product, if it adds, and if it is gated."""


def chain_of(make=None, biased=False, sizes=SIZES):
    """The arguments of a chain after x and residual, and its links."""
    links, norms, parts, biases = [], [], [], []
    for inputs, outputs, adds, is_gated in sizes:
        kind, own = "", [torch.randn(outputs, inputs).bfloat16() * inputs**-0.5]
        if make is not None:
            packed = make(own[0])
            layout, own = quantised.for_kernel(packed.layout, [*packed.parts.values()], inputs, True)
            kind = layout.kind
        links.append(Link(kind, len(own), adds, biased, is_gated, None if is_gated else 1.0))
        parts += own
        norms += [torch.rand(inputs).bfloat16()] if adds else []
        biases += [torch.randn(outputs).bfloat16()] if biased else []
    text = ";".join(link.text for link in links)
    assert links_of(text) == tuple(links)
    return (norms, [1e-5, 1e-6][: len(norms)], parts, biases, text), links


def one_by_one(x, stream, arguments, links):
    norms, eps, parts, biases, _ = arguments
    norms, eps, parts, biases = map(iter, (norms, eps, parts, biases))
    for link in links:
        norm, each = (next(norms), next(eps)) if link.adds else (None, 0.0)
        own = [next(parts) for _ in range(link.parts)]
        tail = each, link.offset, own, next(biases) if link.has_bias else None, link.kind, link.is_gated
        if link.adds:
            stream, x = around.ADD_AROUND(x, stream, norm, *tail)
        else:
            x = around.AROUND(x, None, *tail)
    return stream, x


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [None, int8, int4])
def test_the_bits_of_single_ops(make, biased, level):
    arguments, links = chain_of(make, biased)
    for rows in (1, 5, 16, 70):  # weights of bfloat16 are multiplied by a library from 65 rows on
        x, residual = torch.randn(2, rows, 64).bfloat16()[:1], torch.randn(1, rows, 128).bfloat16()
        for got, want in zip(CHAIN(x, residual, *arguments), one_by_one(x, residual, arguments, links)):
            assert torch.equal(got, want)


def test_chains_of_other_lengths(level):
    """That begin or end with an addition, or have only one."""
    x, residual = torch.randn(1, 3, 128).bfloat16(), torch.randn(1, 3, 128).bfloat16()
    falling = (128, 64, True, False), (64, 32, False, False), (32, 8, False, False)
    for sizes, make in itertools.product((SIZES[1:3], SIZES[1:], falling), (None, int8)):
        arguments, links = chain_of(make, sizes=sizes)
        for got, want in zip(CHAIN(x, residual, *arguments), one_by_one(x, residual, arguments, links)):
            assert torch.equal(got, want)


def test_other_activations_take_the_single_ops(level):
    """Of float32, and where no kernel of ours runs."""
    arguments, links = chain_of(int8)
    x, residual = torch.randn(1, 3, 64), torch.randn(1, 3, 128)
    with mock.patch.object(few_rows, "made_chain", side_effect=AssertionError):
        for got, want in zip(CHAIN(x, residual, *arguments), one_by_one(x, residual, arguments, links)):
            assert torch.equal(got, want)
        with plain_kernels():
            CHAIN(x.bfloat16(), residual.bfloat16(), *arguments)


def test_a_chain_is_made_once(monkeypatch, level):
    monkeypatch.setattr(chain, "_known", {})
    arguments, _ = chain_of(int8)
    x, residual = torch.randn(1, 3, 64).bfloat16(), torch.randn(1, 3, 128).bfloat16()
    with mock.patch.object(few_rows, "made_chain", wraps=few_rows.made_chain) as make:
        for _ in range(2):
            CHAIN(x, residual, *arguments)
        assert make.call_count == 1
        monkeypatch.setattr(chain, "KNOWN", 1)
        other, _ = chain_of(int8)
        CHAIN(x, residual, *other)
    assert make.call_count == 2 and len(chain._known) == 1


def test_shapes_without_values():
    (norms, eps, parts, biases, text), _ = chain_of(int4, biased=True)
    norms, parts, biases = ([each.to("meta") for each in some] for some in (norms, parts, biases))
    x, residual = (torch.empty(1, 3, size, dtype=torch.bfloat16, device="meta") for size in (64, 128))
    stream, out = CHAIN(x, residual, norms, eps, parts, biases, text)
    assert stream.shape == (1, 3, 128) and out.shape == (1, 3, 320)
