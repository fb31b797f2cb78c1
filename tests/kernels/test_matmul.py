"""Products of few rows against float64, the ops against their plain-PyTorch meaning, and their bits.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

import pytest
import torch
from counters import all_zero
from places import GPU, places
from torch.nn import functional as F

from spec_compile.kernels.card import Card
from spec_compile.kernels.linear import skinny_gemm as kernel
from spec_compile.kernels.linear.plans import CUT, ProductTile, appending, plan, squared_columns
from spec_compile.kernels.linear.product import Gate, Normed, Product, ResidualStream
from spec_compile.kernels.linear.product_ops import product, product_to_stream

PLACES = places(torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 3e-3}
ROWS = [1, 2, 5, 16, 17, 33, 64, 70]
PLANS = {  # programs that share the columns, and a tile
    "alone": (1, ProductTile(32, 32, 64, 4, 2)),
    "two": (2, ProductTile(64, 64, 16, 4, 3, late=2, prefetch=3)),
    "three": (3, ProductTile(16, 128, 32, 4, 4, prefetch=0)),
    "wide": (1, ProductTile(128, 64, 16, 4, 3) if GPU else ProductTile(32, 64, 16, 4, 2)),
    "wide, two": (2, ProductTile(128, 64, 32, 4, 3) if GPU else ProductTile(32, 64, 32, 4, 2)),
}
WIDE = [PLANS["wide"], PLANS["wide, two"]]
"""Plans of the kernel of many rows."""
EPS = 1e-5


def draw(place, rows, outputs, inputs):
    """x [rows, inputs], weight [outputs, inputs] of unit variance in the result, bias [outputs]."""
    device, dtype = place
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    return [t.to(device, dtype) for t in (x, weight, bias)]


def launch(x, weight, bias, parts, tile, **around):
    """The kernel's answer, checked to be whole and to leave its counters zero."""
    gated = isinstance(around.get("after"), Gate)
    out = x.new_full((x.shape[0], weight.shape[0] // (2 if gated else 1)), torch.nan)
    if (parts, tile) in WIDE and x.shape[1] % 16:
        pytest.skip("descriptors read no such rows")
    run = kernel.launch_many_rows if (parts, tile) in WIDE else kernel.launch
    run(Product(x, weight, bias, **around), out, parts, tile)
    assert all_zero()
    return out


def error(out, x, weight, bias=None, gated=False):
    """Relative to the product in float64."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    return ((out.double() - expected).norm() / expected.norm()).item()


SHAPES = [*((rows, 72, 2 * CUT + 80) for rows in ROWS)]
SHAPES += [(3, *shape) for shape in ((1, 1), (3, 200), (65, 17), (33, 127), (130, 8), (64, 64), (7, 1000))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows, outputs, inputs", SHAPES)
def test_any_shape(place, rows, outputs, inputs, plan):
    x, weight, bias = draw(place, rows, outputs, inputs)
    for b in (None, bias):
        assert error(launch(x, weight, b, *plan), x, weight, b) < TOLERANCE[place[1]]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("outputs, inputs", [(2, 16), (70, 48), (128, 600)])
def test_gated(place, outputs, inputs, plan):
    x, weight, _ = draw(place, 4, outputs, inputs)
    assert error(launch(x, weight, None, *plan, after=Gate()), x, weight, gated=True) < 2 * TOLERANCE[place[1]]


def test_rows_apart(place):
    """Rows of a wider matrix, as a split of a merged product gives them."""
    x, weight, bias = draw(place, 5, 40, 64)
    whole = torch.full((5, 200), torch.nan, dtype=x.dtype, device=x.device)
    whole[:, 64:128] = x
    assert torch.equal(launch(whole[:, 64:128], weight, bias, *PLANS["two"]), launch(x, weight, bias, *PLANS["two"]))


def layer(place, rows, inputs, size, outputs):
    """x [rows, inputs], weights and biases of two linear layers inputs -> size -> outputs, residual, norm weight."""
    x, first, first_bias = draw(place, rows, size, inputs)
    _, second, second_bias = draw(place, 1, outputs, size)
    residual, norm = (torch.randn(*shape).to(*place) for shape in ((rows, size), (size,)))
    return x, first, first_bias, residual, norm, second, second_bias


def exact_stream(x, first, first_bias, residual, norm, offset):
    """The residual stream, and the norm behind it, in float64."""
    stream = F.linear(x.double(), first.double(), first_bias.double()) + residual.double()
    rms = torch.rsqrt(stream.square().mean(dim=1, keepdim=True) + EPS)
    return stream, stream * rms * (norm.double() + offset)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows, size, offset", [(1, 48, 0.0), (3, 40, 1.0), (17, 600, 0.0), (70, 272, 1.0)])
def test_residual_stream_and_norm(place, rows, size, offset, plan):
    parts, tile = plan
    x, first, first_bias, residual, norm, second, second_bias = layer(place, rows, 520, size, 34)
    squares = torch.full((rows, -(-size // 16)), torch.nan, device=x.device)
    scaled = torch.full_like(residual, torch.nan)
    around = ResidualStream(residual, norm, offset, scaled, squares)
    stream = launch(x, first, first_bias, parts, tile, after=around)
    wanted, normed = exact_stream(x, first, first_bias, residual, norm, offset)
    close = 2 * TOLERANCE[place[1]]
    assert (stream.double() - wanted).norm() < close * wanted.norm()
    assert torch.equal(scaled, (stream.float() * (norm.float() + offset)).to(x.dtype))
    torch.testing.assert_close(squares.sum(dim=1), stream.float().square().sum(dim=1), rtol=1e-5, atol=1e-5)
    before = Normed(squares, EPS)
    assert error(launch(scaled, second, second_bias, parts, tile, before=before), normed, second, second_bias) < close
    gated = launch(scaled, second, None, parts, tile, before=before, after=Gate())
    assert error(gated, normed, second, gated=True) < 2 * close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_on_a_cpu(dtype):
    x, weight, bias = draw(("cpu", dtype), 6, 24, 16)
    for y in (x, x.view(2, 3, 16), x.t().contiguous().t(), x[:0]):
        assert torch.equal(product(y, weight, bias), F.linear(y, weight, bias))
        gate, up = F.linear(y, weight).chunk(2, -1)
        assert torch.equal(product(y, weight, gated=True), F.silu(gate) * up)
    torch.library.opcheck(product, (x.view(2, 3, 16), weight, bias))
    torch.library.opcheck(product, (x.view(2, 3, 16), weight), dict(gated=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_around_the_residual_stream_on_a_cpu(dtype):
    x, first, first_bias, residual, norm, second, second_bias = layer(("cpu", dtype), 6, 16, 40, 24)
    x, residual = x.view(2, 3, 16), residual.view(2, 3, 40)
    stream, scaled, squares = product_to_stream(x, first, first_bias, residual, norm, 1.0)
    assert torch.equal(stream, F.linear(x, first, first_bias) + residual) and squares.shape == (6, 3)
    _, normed = exact_stream(x.view(6, 16), first, first_bias, residual.view(6, 40), norm, 1.0)
    begun = dict(squares=squares, eps=EPS)
    out = product(scaled, second, second_bias, **begun)
    assert out.shape == (2, 3, 24) and error(out.view(6, 24), normed, second, second_bias) < 3 * TOLERANCE[dtype]
    gated = product(scaled, second, gated=True, **begun)
    assert error(gated.view(6, 12), normed, second, gated=True) < 6 * TOLERANCE[dtype]
    torch.library.opcheck(product_to_stream, (x, first, first_bias, residual, norm, 0.0))
    torch.library.opcheck(product, (scaled, second), begun)
    torch.library.opcheck(product, (scaled, second), dict(gated=True, **begun))


MODELS = [
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (3072, 2048), (2048, 8192), (1024, 2048), (1024, 3072), (960, 576), (576, 1536), (8, 2048), (5000, 784),
]  # fmt: skip
"""Outputs and inputs."""


@pytest.mark.parametrize("processors, memory", [(132, 232_448), (108, 166_912), (128, 101_376), (24, 101_376)])
@pytest.mark.parametrize("outputs, inputs", MODELS)
def test_plans_fit(outputs, inputs, processors, memory):
    """What a plan takes of a GPU is there, and its tiles differ in nothing that decides bits."""
    how = plan(outputs, inputs, processors, memory)
    assert 1 <= how.parts <= max(1, inputs // CUT) and how.tiles[-1].block_n >= 128
    for tile in how.tiles:
        assert tile.stages * 2 * tile.block_k * (tile.block_o + tile.block_n) <= memory
        assert CUT % tile.block_k == 0 and tile.block_o % squared_columns(outputs) == 0
    for head in (0, 32, 64, 128):
        tiles = [appending(tile, head, memory) for tile in how.tiles]
        for tile in tiles:
            assert tile.block_o >= head and (tile.block_o >= 64) == (tiles[0].block_o >= 64)
            assert tile.stages * 2 * tile.block_k * (tile.block_o + tile.block_n) <= memory


def test_no_plan_for_what_the_kernel_cannot_read():
    on_cpu = torch.zeros(64, 48, dtype=torch.bfloat16)
    assert kernel.why_not(on_cpu) == "it is on cpu, not on a GPU" and kernel.plan_of(on_cpu, on_cpu) is None


LAYERS = [(6144, 4096), (4096, 14336), (1024, 2048), (3072, 1000), (4094, 1024), (1024, 4100), (576, 1536), (64, 576)]
EVERY_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 65, 100, 128, 192, 256, 300, 384, 512, 700, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [*ROWS, 300, 513])
def test_op_on_a_gpu(rows, dtype):
    for outputs, inputs in LAYERS:
        x, weight, bias = draw(("cuda", dtype), rows, outputs, inputs)
        tolerance = {**TOLERANCE, torch.float32: 2e-3}[dtype]  # TF32 may be allowed
        tolerance *= 3 if kernel.plan_of(x, weight) is None else 1  # cuBLAS may add partial sums in 16 bits
        for b in (None, bias):
            assert error(product(x, weight, b), x, weight, b) < tolerance
        assert error(product(x, weight, gated=True), x, weight, gated=True) < 3 * tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [*MODELS, (1024, 1040)])
def test_same_bits_in_any_number_of_rows(monkeypatch, outputs, inputs, dtype, early):
    """Every row alone, among few and among many, with all that may stand around a product."""
    if not early:
        monkeypatch.setattr(kernel, "launches_early", lambda device: False)
    rows = EVERY_ROWS[-1]
    x, weight, bias = draw(("cuda", dtype), rows, outputs, inputs)
    residual, norm = torch.randn(rows, outputs).to("cuda", dtype), torch.randn(outputs).to("cuda", dtype)
    squares = torch.rand(rows, -(-inputs // squared_columns(inputs)), device="cuda")
    ops = {
        "product": lambda n: (product(x[:n], weight, bias),),
        "swiglu": lambda n: (product(x[:n], weight, gated=True),),
        "stream": lambda n: product_to_stream(x[:n], weight, bias, residual[:n], norm, 1.0),
        "norm": lambda n: (product(x[:n], weight, squares=squares[:n], eps=EPS),),
        "norm, swiglu": lambda n: (product(x[:n], weight, squares=squares[:n], eps=EPS, gated=True),),
    }
    for name, op in ops.items():
        wanted = op(rows)
        for n in EVERY_ROWS[:-1]:
            assert all(torch.equal(out, want[:n]) for out, want in zip(op(n), wanted, strict=True)), (name, n)


@pytest.mark.parametrize(
    "outputs, rows, parts, processors, expected",
    [(28672, 64, 1, 132, False), (28672, 65, 1, 132, True), (28672, 128, 1, 132, True), (28672, 256, 1, 132, True),
     (28672, 512, 1, 132, False), (28672, 128, 2, 132, False), (16384, 128, 1, 132, False), (36864, 128, 1, 132, False),
     (28672, 128, 1, 108, False), (28672, 128, 1, 114, True)],
)  # fmt: skip
def test_tiles_of_a_gate_are_taken_where_they_fill_the_gpu(outputs, rows, parts, processors, expected, monkeypatch):
    monkeypatch.setattr(kernel, "card_of", lambda device: Card("a GPU", (9, 0), processors, 232_448))
    x, weight = torch.empty(rows, 4096, dtype=torch.bfloat16), torch.empty(outputs, 1, dtype=torch.bfloat16)
    tile = plan(28672, 4096).tile(rows)
    assert kernel.supports_many_rows(Product(x, weight, None, after=Gate()), parts, tile) == (
        expected or rows >= kernel.LEAST_ROWS
    )
    assert not kernel.supports_many_rows(Product(x[:300], weight, None), parts, tile)


@pytest.mark.parametrize("rows, outputs, parts, width", [
    (512, 6144, 1, 256), (513, 6144, 1, 128), (1024, 6144, 1, 128), (2048, 6144, 1, 256), (512, 28672, 1, 128),
    (576, 28672, 1, 128), (1024, 28672, 1, 256), (384, 28672, 1, 128), (2048, 4096, 2, 128),
])  # fmt: skip
def test_the_tile_of_many_rows_takes_least_time(rows, outputs, parts, width):
    """By the turns of 132 multiprocessors: 513 rows fill little of a third block of 256 rows."""
    assert kernel.tile_of_many(rows, outputs, parts, 132).block_n == width
