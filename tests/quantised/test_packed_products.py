"""Products of few rows with quantised weights against the plain meaning of their formats, and their bits.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

from types import SimpleNamespace

import pytest
import torch
from counters import all_zero
from packed_layers import DRAWN, FP8, prepared
from places import ON_GPU
from torch.nn import functional as F

from spec_compile import quantised
from spec_compile.kernels.linear import skinny_gemm
from spec_compile.kernels.linear.plans import ProductTile, packed_plan
from spec_compile.kernels.linear.product import Gate, Product
from spec_compile.kernels.linear.product_ops import product, product_to_heads
from spec_compile.quantised.compressed_tensors import read
from spec_compile.quantised.fp8 import Fp8Block
from spec_compile.quantised.rows import rounded_rows

HALF = {name: torch.float16 if name in ("ct64 fp16", "gptq", "awq") else torch.bfloat16 for name in DRAWN}
TILES = {8: ProductTile(64, 128, 16, 4, 2, bits=8), 4: ProductTile(64, 256, 16, 4, 2, bits=4)}


def launch(x, layout, parts, count, tile, **around):
    out = x.new_full((len(x), len(parts[0]) // (2 if isinstance(around.get("after"), Gate) else 1)), torch.nan)
    skinny_gemm.launch(Product(x, parts[0], None, parts[1], layout.kind, **around), out, count, tile)
    assert all_zero()
    return out


NUMBERS = "ct128,ct32,ct,ct64 fp16,ao int4,gptq,table,nvfp4,mxfp4".split(",")


@pytest.mark.parametrize("name", [*NUMBERS, "awq", "nested", "w4a8", "w4a8 32", "w4a8 rows", "w4a8 fp8"])
def test_repacked_weights_are_equal(name):
    for outputs, inputs in ((48, 512), (16, 384)):
        (layout, parts), (packed, ours) = prepared(name, outputs, inputs)
        assert torch.equal(packed.weight(ours, inputs), layout.weight(parts, inputs))
        assert quantised.layout_of(packed.kind) == packed
        assert quantised.repacked(layout, parts, inputs)[1][0] is ours[0]  # one copy for all graphs
        both = [torch.cat([part, part], dim) for part, dim in zip(ours, packed.dims)]
        assert packed.merges and packed.fits([ours, ours])
        assert torch.equal(packed.weight(both, inputs), packed.weight(ours, inputs).repeat(2, 1))
        for index, part in enumerate(parts):
            restored = layout.restored(index, packed, ours, inputs)
            assert torch.equal(restored, part) if index == 0 or restored is not None else index > 0


@pytest.mark.parametrize("name", DRAWN)
def test_weights_are_made_numbers_by_parts(name, monkeypatch):
    (layout, parts), ours = prepared(name, 640, 256)
    x, bias = torch.randn(2, 3, 256), torch.randn(640)
    wanted = layout.product(x, parts, bias)
    monkeypatch.setattr(quantised.codes, "WEIGHTS", 256 * 256)
    for each, tensors in [(layout, parts), *([ours] if ours else [])]:
        made = made_weights(type(each), monkeypatch)
        torch.testing.assert_close(each.product(x, tensors, bias), wanted, rtol=1e-4, atol=1e-4)
        assert {len(weight) for weight in made} <= {128, 256}
        assert made or name not in ("table", "nested")


def made_weights(layout, monkeypatch):
    """A list of the weights that a class of layouts makes from now on."""
    weight, made = layout.weight, []
    monkeypatch.setattr(layout, "weight", lambda *given: made.append(weight(*given)) or made[-1])
    return made


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_layout(name):
    """Of every seventh column, to the last bit, with zero points of 8 and others, and with scales that are too large
    for centred codes."""
    for factor in (1, 100):
        layout, parts = DRAWN[name](16, 384)
        if name.startswith("ct"):
            parts[1] *= factor
        packed, ours = layout.for_few_rows(parts, 384)
        got = launch(torch.eye(384)[::7], packed, ours, 1, ProductTile(64, 256, 64, 4, 2, bits=4))
        assert torch.equal(got, packed.weight(ours, 384).float().T[::7])
        if name.startswith("ct"):
            assert packed.centred == (factor == 1)


def test_repacked_weights_follow_their_layer():
    (layout, parts), (packed, ours) = prepared("ct128", 16, 256)
    parts[0].add_(1)
    quantised.update()
    assert torch.equal(packed.weight(ours, 256), layout.weight(parts, 256))
    before = parts[1].clone()
    parts[1].fill_(1.0)
    with pytest.raises(ValueError, match=r"'Nibbles 128 0 0', not 'Nibbles 128 0 1'.*load the model again"):
        quantised.update()
    parts[1].copy_(before)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("rows, outputs, inputs, count", [(1, 72, 768, 2), (18, 136, 384, 1)])
def test_products(name, rows, outputs, inputs, count):
    (layout, parts), (packed, ours) = prepared(name, outputs, inputs)
    x = torch.randn(rows, inputs)
    got = launch(x, packed, ours, count, TILES[packed.bits])
    torch.testing.assert_close(got, layout.product(x, parts, None), rtol=1e-4, atol=1e-5)
    if name in ("fp8", "ct128", "ct int8", "w4a8"):
        gate, up = layout.product(x, parts, None).chunk(2, -1)
        gated = launch(x, packed, ours, count, TILES[packed.bits], after=Gate())
        torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, rows, count", [("ct128", 18, 4), ("table", 1, 4), ("ct32", 3, 2), ("w4a8", 5, 4)])
def test_parts_in_turn_have_the_same_bits(name, rows, count):
    """Programs that multiply a pair of parts, or all of them, one after the other."""
    packed, ours = prepared(name, 72, 1024)[1]
    x = torch.randn(rows, 1024)
    want = launch(x, packed, ours, count, TILES[4])
    torch.testing.assert_close(want, packed.product(x, ours, None), rtol=1e-4, atol=1e-5)
    for turns in {2, count}:
        assert torch.equal(launch(x, packed, ours, count, TILES[4]._replace(turns=turns)), want)


def test_turns_of_4_bits():
    """The example of `sizes_in_turns`; turns divide the parts, and tiles have one kind of instructions."""
    plan = packed_plan(4096, 14336, 4)
    assert [plan.parts, *(plan.tile(rows).turns for rows in (16, 64, 256, 2048))] == [8, 1, 2, 8, 8]
    for outputs in (64, 576, 2048, 3072, 6144, 16384, 28672):
        for inputs in (512, 1536, 4096, 14336, 28672):
            plan = packed_plan(outputs, inputs, 4)
            assert all(plan.parts % tile.turns == 0 and tile.block_o >= 64 for tile in plan.tiles)
            assert all(tile.turns == 1 or tile.turns % 2 == 0 for tile in plan.tiles)


def test_all_values_of_fp8():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # NaN
    x = torch.zeros(1, 128)
    x[0, 0] = 448.0
    for part in codes.view(4, 64):
        weight = F.pad(part[:, None], (0, 127)).view(FP8)
        got = launch(x, Fp8Block(128, 128), [weight, torch.ones(1, 1)], 1, TILES[8])
        assert torch.equal(got[0], part.view(FP8).float() * 448)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_rows_are_rounded_as_the_library_does(dtype):
    """With ties and a row of zeros; where the codes are numbers of x's dtype, too."""
    x = torch.randn(5, 48)[:, :40]
    x[1], x[2, :4], x[2, 4:] = 0, torch.tensor([255.0, 1.0, 3.0, -5.0]), 0.5
    for kept in {dtype, torch.uint8 if dtype == FP8 else dtype}:
        codes, units = skinny_gemm._rounded_rows(x, kept, early=False, static=None)
        assert torch.equal(codes.float() * units[:, None], rounded_rows(x, dtype))


def test_layers_with_one_scale_are_read():
    """Of compressed-tensors, without the library: static activations, weights by channel or with one scale."""
    layer = torch.nn.Linear(64, 32, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.to(FP8), requires_grad=False)
    layer.quantization_status, layer.input_scale = "compressed", torch.tensor([0.5])
    eight = dict(num_bits=8, type="float", symmetric=True)
    for strategy, dynamic, shape in (("tensor", False, (1,)), ("channel", False, (32, 1)), ("tensor", True, (1,))):
        layer.weight_scale = torch.rand(shape)
        rows = SimpleNamespace(**eight, strategy="token" if dynamic else "tensor", dynamic=dynamic)
        weights = SimpleNamespace(**eight, strategy=strategy)
        layer.quantization_scheme = SimpleNamespace(
            weights=weights, input_activations=rows, output_activations=None, format="float-quantized"
        )
        packed, x = read(layer), torch.randn(2, 3, 64)
        unit = x.abs().amax(-1, keepdim=True) / 448 if dynamic else layer.input_scale
        rounded = (x / unit).clamp(-448, 448).to(FP8).float() * unit
        want = F.linear(rounded.double(), (layer.weight.float() * layer.weight_scale).double()).float()
        assert torch.equal(packed.layout.product(x, list(packed.parts.values()), None), want)
        rows.strategy = "channel"
        with pytest.raises(quantised.UnreadError, match="a scale for each token or a constant one"):
            read(layer)


def test_activations_are_rounded_as_pytorch_does():
    """All codes and what lies halfway between two of them, against the identity."""
    codes = torch.arange(126, dtype=torch.uint8).view(FP8).float()
    x = torch.stack([codes, (codes + torch.arange(1, 127, dtype=torch.uint8).view(FP8).float()) / 2, codes * 1.01])
    x = F.pad(x, (0, 2), value=448.0)
    layout, parts = Fp8Block(128, 128), [torch.eye(128).to(FP8), torch.ones(1, 1)]
    assert torch.equal(launch(x, layout, parts, 1, TILES[8]), layout.product(x, parts, None))


@pytest.mark.parametrize("exponent", [pytest.param(each, marks=ON_GPU) for each in (0, 1, 20, 60, 61, 127, 254)])
def test_codes_are_those_of_quotients(exponent):
    """Of the largest number of a block with every mantissa, and of numbers down to less than 2 ** -12 of it."""
    from spec_compile.kernels.linear.quantised_kernel import rounded_blocks

    largest = torch.arange(128, device="cuda")[:, None, None] + (exponent << 7)
    below = (largest - torch.arange(127 * 13, device="cuda").view(13, 127)).clamp(min=0)
    x = torch.cat([largest.expand(-1, 13, 1), below], 2).short().view(torch.bfloat16).flatten(1)
    for signed in (x, -x):
        codes, units = rounded_blocks(signed, 128, False)
        got = codes.float().unflatten(1, (13, 128)) * units.T[:128, :, None]
        wanted = quantised.fp8.rounded_blocks(signed.cpu(), 128)  # on a GPU, PyTorch multiplies by 1 / 448
        assert torch.equal(got.flatten(1).cpu(), wanted)


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in DRAWN])
def test_bits_of_rows(name):
    """A row's bits are those of the row alone, in every form."""
    for outputs, inputs in ((4096, 4096), (1536, 1024), (512, 2048)):
        _, (packed, (weight, scales)) = prepared(name, outputs, inputs, "cuda")
        x = torch.randn(300, inputs, device="cuda", dtype=HALF[name])
        alone = torch.cat([product(row[None], weight, None, scales, packed.kind) for row in x[:64]])
        for rows in (2, 16, 17, 64, 300):
            got = product(x[:rows], weight, None, scales, packed.kind)
            assert torch.equal(got[:64], alone[:rows]), rows
        wide = x if packed.row_dtype(weight) else x.float()  # a row is rounded in its dtype
        want = packed.product(wide, [weight, scales], None).float()
        got = product(x, weight, None, scales, packed.kind).float()
        assert (got - want).norm() < (4e-3 if x.dtype == torch.bfloat16 else 6e-4) * want.norm()


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in DRAWN])
def test_bits_of_heads(name):
    """Queries, keys and values are the same every time, and those of rows alone."""
    _, (packed, (weight, scales)) = prepared(name, 960, 1024, "cuda")
    x = torch.randn(1, 229, 1024, device="cuda", dtype=HALF[name])
    cos, sin = torch.randn(2, 1, 229, 64, device="cuda", dtype=HALF[name])

    def heads(begin, end):
        caches = x.new_zeros(2, 1, 3, 256, 64).unbind()
        rows, first = slice(begin, end), torch.tensor([begin], device="cuda")
        parts = x[:, rows], weight, None, cos[:, rows], sin[:, rows], None, None, 0.0, None, *caches, first, None
        return [product_to_heads(*parts, scales, packed.kind), *(cache[:, :, rows].transpose(1, 2) for cache in caches)]

    together = heads(0, 229)
    for _ in range(20):
        assert all(map(torch.equal, heads(0, 229), together))
    for row in range(0, 229, 16):
        alone = heads(row, row + 1)
        assert all(torch.equal(one, many[:, row : row + 1]) for one, many in zip(alone, together)), row
