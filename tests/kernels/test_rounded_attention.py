"""Attention that ends with the codes of the product after it, and that product, against rounding in between.

Without a GPU the kernels run in Triton's interpreter, in float32; ``pytest -m gpu`` runs the same on a CUDA device.
"""

import pytest
import torch
from attention_cases import PLACES, SMALL, Case, bits, random_tree
from packed_layers import fp8_block
from places import ON_GPU

from spec_compile.kernels.attention import tree_attention as attention
from spec_compile.kernels.linear import quantised, small_m
from spec_compile.kernels.linear.activations import plain_blocks, rounded_blocks
from spec_compile.kernels.linear.plans import ProductTile
from spec_compile.kernels.linear.product import Product
from spec_compile.kernels.linear.product_ops import product_to_stream
from spec_compile.kernels.linear.quantised import fp8_block as blocks
from spec_compile.kernels.linear.quantised.fp8_block import Fp8Block

own = torch.ops.spec_compile


def same(one, other, rows):
    """True if codes are equal, and so are the scales of `rows` rows."""
    pairs = (one[0].flatten(), other[0].flatten()), (one[1][:, :rows], other[1][:, :rows])
    return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in pairs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "lengths, nodes, options",
    [([40, 7], 5, dict(heads=(4, 2), sizes=(16, 128))), ([130], 3, dict(sizes=(8, 256), sinks=True)),
     ([70], 66, dict(sizes=(8, 128), causal=True))],
    ids=["a tree", "heads of two blocks", "a causal chunk"],
)  # fmt: skip
def test_codes_are_those_of_the_output(place, lengths, nodes, options):
    case = Case(place, lengths, nodes, random_tree(nodes), **options)
    for config in (SMALL, SMALL._replace(whole=True, most=4)):
        out = attention.launch(case.inputs(), config)
        rows = len(lengths) * nodes
        codes, units = attention.launch(case.inputs(), config, rounds=True)
        assert codes.shape == out.shape
        assert same((codes, units), rounded_blocks(out.view(rows, -1), 128), rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_op_is_the_rounding_of_attention(device):
    case = Case((device, torch.float32 if device == "cpu" else torch.bfloat16), [9, 9], 3, sizes=(16, 128))
    out = own.tree_attention(*case.inputs()).flatten(2)
    codes, units = own.rounded_attention(*case.inputs())
    rounded = codes.float() * units[:, :6].T.reshape(2, 3, -1, 1)
    assert torch.equal(rounded.flatten(2).cpu(), blocks.rounded_blocks(out.cpu(), 128))
    torch.library.opcheck(attention.rounded_attention, case.inputs(), test_utils="test_faketensor")
    with quantised.unrounded_activations():
        codes, units = own.rounded_attention(*case.inputs())
        assert torch.equal(codes.flatten(2), out) and bool((units == 1).all())


def test_a_product_of_codes_is_that_of_the_numbers():
    """In the kernel, and in the plain meaning of the op, with and without rounding."""
    layout, (weight, scales) = Fp8Block(128, 128), fp8_block(256, 384)[1]
    x, residual = torch.randn(3, 384), torch.randn(3, 256)
    codes, units = rounded_blocks(x, 128)
    outs = []
    for each in (dict(x=x), dict(x=codes, units=units)):
        outs.append(torch.empty(3, 256))
        product = Product(weight=weight, scales=scales, kind=layout.kind, **each)
        small_m.launch(product, outs[-1], 1, ProductTile(64, 128, 16, 4, 2, bits=8))
    assert torch.equal(*outs)
    rest = weight, None, residual, residual[0], 0.0, scales, layout.kind, ""
    got = product_to_stream(codes, *rest, units)[0]
    assert torch.equal(got, layout.product(x, [weight, scales], None) + residual)
    with quantised.unrounded_activations():
        got = product_to_stream(*plain_blocks(x, 128)[:1], *rest, plain_blocks(x, 128)[1])[0]
    torch.testing.assert_close(got, layout.unrounded(x, [weight, scales], None) + residual)
    torch.library.opcheck(product_to_stream, (codes, *rest, units), test_utils="test_faketensor")


@pytest.mark.parametrize("rows", [pytest.param(each, marks=ON_GPU) for each in (1, 5, 64, 300)])
def test_the_stream_after_a_product_of_codes(rows):
    """On a GPU the bits are those of activations that are rounded before the product."""
    layout, (weight, scales) = Fp8Block(128, 128), [part.cuda() for part in fp8_block(4096, 4096)[1]]
    x, residual = torch.randn(2, rows, 4096, device="cuda", dtype=torch.bfloat16)
    rest = weight, None, residual, residual[0], 0.0, scales, layout.kind, ""
    codes, units = rounded_blocks(x, 128)
    for got, want in zip(product_to_stream(codes, *rest, units), product_to_stream(x, *rest)):
        assert torch.equal(bits(got), bits(want))
