"""Weights of 4 bits with activations of 8: the kernel's exact sums, in the interpreter."""

import pytest
import torch

from spec_compile.kernels.linear import skinny_gemm
from spec_compile.kernels.linear.plans import ProductTile
from spec_compile.kernels.linear.product import Product
from spec_compile.quantised.rows import FP8, W4A8, rounded_rows


@pytest.mark.parametrize(("inputs", "group"), [(40, 40), (160, 32), (192, 64), (384, 128), (512, 256)])
def test_sums_of_codes_are_exact(inputs, group):
    """With scales of 1 and rows whose largest number is 127.5, results are whole numbers, which bits must equal."""
    layout, codes = W4A8(group, 0, 0), torch.randint(-8, 8, (24, inputs), dtype=torch.int8)
    parts = [codes, torch.ones(24, inputs // group)]
    x = torch.randint(-127, 128, (3, inputs)).float()
    x[:, 0] = 127.5
    packed, ours = layout.for_few_rows(parts, inputs)
    pytest.importorskip("triton")
    out = torch.full((3, 24), torch.nan)
    skinny_gemm.launch(Product(x, ours[0], None, ours[1], packed.kind), out, 1, ProductTile(64, 256, 16, 4, 2, bits=4))
    assert torch.equal(out.double(), x.round().clamp(-128, 127).double() @ codes.double().T)
    assert torch.equal(out, layout.product(x, parts, None))
    assert torch.equal(layout.restored(0, packed, ours, inputs), codes)


def test_groups_that_the_kernel_does_not_read():
    for group in (16, 48):
        parts = [torch.zeros(8, 96, dtype=torch.int8), torch.ones(8, 96 // group)]
        assert W4A8(group, 0, 0).for_few_rows(parts, 96) is None


def test_activations_are_of_the_dtype_that_the_layout_names():
    codes, scales = torch.randint(-8, 8, (8, 64), dtype=torch.int8), torch.rand(8, 2)
    x = torch.randn(2, 64)
    for fp8, dtype in ((0, torch.int8), (1, FP8)):
        wanted = rounded_rows(x, dtype).double() @ (codes * scales.repeat_interleave(32, 1)).double().T
        assert torch.equal(W4A8(32, fp8, 0).product(x, [codes, scales], None), wanted.float())
