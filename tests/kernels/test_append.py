"""The product that ends in the cache, against the same in float64, and its bits.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

import pytest
import torch
from attention_cases import FP8, bits, normed, turn
from counters import all_zero
from places import GPU, places
from torch.nn import functional as F

from spec_compile.kernels.linear import skinny_gemm
from spec_compile.kernels.linear.plans import ProductTile, squared_columns
from spec_compile.kernels.linear.product import Normed, Product, QkvHeads
from spec_compile.kernels.linear.product_ops import product_to_heads, why_not_append
from spec_compile.kernels.ops import first_slots

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
EPS = 1e-6
INPUTS = 208
PLACES = places(torch.bfloat16, torch.float16)


class Case:
    """Random inputs of one product [B, N, INPUTS] -> heads, whose caches are full of NaN."""

    def __init__(
        self, place, lengths, nodes, heads=(4, 2), size=64, *, bias=False, scaled=False, norms=False, offset=None,
        capacity=None, kept=None, inputs=INPUTS,
    ):  # fmt: skip
        device, dtype = place
        batch, kv_heads = len(lengths), heads[1]
        self.heads, self.nodes, self.size = heads, nodes, size
        outputs = (heads[0] + 2 * kv_heads) * size
        self.x = torch.randn(batch, nodes, inputs).to(*place)
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).to(*place)
        self.bias = torch.randn(outputs).to(*place) if bias else None
        terms = -(-inputs // squared_columns(inputs))
        self.squares = torch.rand(batch * nodes, terms).to(device) * inputs if scaled else None
        angles = torch.randn(2, batch, nodes, size).to(*place)  # not even those of the two halves are equal
        norm = (1 + 0.3 * torch.randn(2, size)).to(*place) if norms else (None, None)
        capacity = capacity or max(lengths) + nodes + 3
        self.caches = [
            torch.full((batch, kv_heads, capacity, size), torch.nan, dtype=dtype).to(kept or dtype).to(device)
            for _ in "kv"
        ]
        self.ends = QkvHeads(*angles, *norm, EPS, offset, *self.caches, torch.tensor(lengths, device=device))

    def op(self, rows=slice(None)):
        """The op, of some nodes of all rows of the batch -> queries [B, N, H, D]."""
        squares = self.squares
        if squares is not None:
            squares = squares.view(len(self.x), self.nodes, -1)[:, rows].flatten(0, 1).contiguous()
        ends = self.ends._replace(cos=self.ends.cos[:, rows], sin=self.ends.sin[:, rows])
        return product_to_heads(self.x[:, rows], self.weight, self.bias, *ends, squares=squares, eps=EPS)

    def launch(self, parts, tile, launch=skinny_gemm.launch):
        """A kernel -> queries [B, N, H, D]."""
        flat = self.x.flatten(0, 1)
        out = flat.new_full((len(flat), self.heads[0] * self.size), torch.nan)
        around = None if self.squares is None else Normed(self.squares, EPS)
        layer = Product(flat, self.weight, self.bias, before=around, after=self.ends)
        launch(layer, out, parts, tile)
        assert all_zero()
        return out.view(*self.x.shape[:2], -1, self.size)

    def expected(self):
        """Queries, keys and values [B, heads, N, D], rounded where the op rounds."""
        product = F.linear(self.x.double(), self.weight.double())
        if self.squares is not None:
            scale = torch.rsqrt(self.squares.double().sum(1) / self.x.shape[2] + EPS)
            product *= scale.view(*self.x.shape[:2], 1)
        product = product if self.bias is None else product + self.bias.double()
        parts = product.to(self.x.dtype).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = parts.split([self.heads[0], self.heads[1], self.heads[1]], 1)
        if self.ends.q_norm is not None:
            q, k = (normed(x, weight, self.ends.offset) for x, weight in ((q, self.ends.q_norm), (k, self.ends.k_norm)))
        return *(turn(x, self.ends.cos, self.ends.sin) for x in (q, k)), v

    def check(self, queries):
        """Queries and what was appended are right; all other slots are as they were."""
        q, *new = self.expected()
        close = dict(atol=TOLERANCE[self.x.dtype], rtol=TOLERANCE[self.x.dtype])
        torch.testing.assert_close(queries.transpose(1, 2), q, **close)
        for cache, block in zip(self.caches, new):
            untouched = torch.ones(cache.shape[2], dtype=torch.bool).repeat(len(cache), 1)
            for row, length in enumerate(self.ends.lengths.tolist()):
                end = min(length + self.nodes, cache.shape[2])
                untouched[row, length:end] = False
                wanted = block[row, :, : max(end - length, 0)]
                if cache.dtype == FP8:
                    close = dict(atol=2**-5, rtol=2**-3)  # a number may round to the next one
                    wanted = wanted.clamp(-448, 448)
                torch.testing.assert_close(cache[row, :, length:end].to(wanted.dtype), wanted, **close)
            assert cache.float().isnan().all(3).all(1).cpu().equal(untouched)


WIDE, NARROW = ProductTile(128, 32, 16, 8, 2), ProductTile(64, 64, 16, 4, 3, late=2, prefetch=3)


NARROW_HEADS = NARROW._replace(block_o=16)  # several tiles share a head
CASES = [  # lengths, nodes, parts of the product, tile, options
    *(([5, 0, 9], 7, *how) for size in (64, 128) for how in (
        (1, NARROW, dict(size=size)), (1, WIDE, dict(size=size)), (2, NARROW_HEADS, dict(size=size, bias=True)),
        (3, NARROW, dict(size=size, scaled=True)),
    )),
    *(([3, 30], 5, 2, tile, dict(heads=(2, 1), size=size, scaled=True, norms=True, offset=offset))
      for size, tile in ((16, NARROW), (64, WIDE), (128, WIDE)) for offset in (None, 1.0)),
    *(([4], nodes, 1, NARROW, dict(heads=heads, size=size))
      for heads, size, nodes in (((3, 3), 48, 3), ((7, 1), 80, 1), ((6, 2), 32, 33), ((1, 1), 256, 17))),
    ([0, 6, 12, 20], 8, 1, NARROW, dict(heads=(2, 1), capacity=13)),  # nothing is written beyond the last slot
]  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("lengths, nodes, parts, tile, options", CASES)
def test_queries_keys_and_values(place, lengths, nodes, parts, tile, options):
    case = Case(place, lengths, nodes, **options)
    case.check(case.launch(parts, tile))


@pytest.mark.parametrize("parts", [1, 2])
def test_rotation_of_many_rows(place, parts):
    case = Case(place, [5, 0, 9], 23, size=128, bias=parts == 2, scaled=parts == 1)
    case.check(case.launch(parts, ProductTile(128 if GPU else 64, 64, 32, 4, 3), skinny_gemm.launch_many_rows))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("how", ["op", "few rows", "many rows"])
def test_pages(place, how, norms):
    """With a table the caches are a pool: each slot has the bits that it has without one, and the rest is untouched."""
    lengths = [5, 62, 125, 190]  # the kernel leaves out what does not fit
    if how == "op":
        place, lengths = ("cpu", torch.bfloat16), [5, 62, 125, 185]
    case = Case(place, lengths, 7, bias=True, norms=norms, capacity=3 * 64)
    plain = case.caches
    table = 1 + torch.randperm(15)[:12].view(4, 3).int()
    table[2, 0] = table[1, 0]
    table = table.to(case.x.device)
    case.caches = [cache.new_full((16, *cache.shape[1:2], 64, cache.shape[3]), torch.nan) for cache in plain]
    paged = case.ends._replace(key_cache=case.caches[0], value_cache=case.caches[1], table=table)
    results = []
    for ends in (case.ends, paged):
        case.ends = ends
        if how == "op":
            results.append(case.op())
        elif how == "few rows":
            results.append(case.launch(2, WIDE))
        else:
            results.append(case.launch(1, ProductTile(64, 64, 32, 4, 3), skinny_gemm.launch_many_rows))
    assert torch.equal(*results)
    for cache, pool in zip(plain, case.caches):
        rows = first_slots(pool, 3 * 64, table).clone()
        rows[2, :, :64] = torch.nan  # another row writes there, too
        assert torch.equal(bits(rows), bits(cache))
        unused = sorted({*range(16)} - {*table.flatten().tolist()})
        assert pool[unused].isnan().all()


def test_caches_of_8_bits(place):
    if not GPU:
        pytest.skip("Triton's interpreter loses the carry of numbers that it rounds to 8 bits")
    case = Case(place, [2, 0], 5, (2, 1), norms=True, kept=FP8)
    case.weight[-1] *= 4000  # beyond what 8 bits can hold
    case.check(case.launch(1, NARROW))


@pytest.mark.parametrize("options", [{}, dict(bias=True, scaled=True, kept=FP8), dict(norms=True, offset=1.0)])
def test_op_on_a_cpu(options):
    case = Case(("cpu", torch.bfloat16), [2, 0], 5, size=16, inputs=48, **options)
    case.check(case.op())
    if case.caches[0].dtype != FP8:  # torch cannot compare it
        arguments = case.x, case.weight, case.bias, *case.ends
        torch.library.opcheck(product_to_heads, arguments, dict(squares=case.squares, eps=EPS))


def test_what_the_kernel_cannot_append_is_named():
    assert why_not_append(64, 64, True) is why_not_append(256, 256, False) is None
    assert why_not_append(192, 128, False) == "keys of 192 and values of 128"
    assert why_not_append(128, 128, True) == "norms of heads of 128" and why_not_append(48, 48, True)


SHAPES = {
    "8B": ((32, 8), 128, 4096, dict(scaled=True)),
    "1B": ((32, 8), 64, 2048, dict(scaled=True)),
    "135M": ((9, 3), 64, 576, dict(scaled=True)),
    "biases": ((14, 2), 64, 896, dict(bias=True)),
    "norms": ((16, 8), 128, 1024, dict(scaled=True, norms=True)),
    "small norms": ((9, 3), 64, 576, dict(norms=True, offset=1.0)),
    "wide": ((8, 1), 256, 2048, dict()),
    "fp8": ((32, 8), 128, 4096, dict(kept=FP8)),
}
ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 64, 65, 100, 128, 192, 256, 300, 384, 512, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_any_number_of_rows(monkeypatch, shape, dtype, early):
    """Queries, keys and values of every row, alone, among few and among many."""
    if not early:
        monkeypatch.setattr(skinny_gemm, "launches_early", lambda device: False)
    heads, size, inputs, options = SHAPES[shape]
    case = Case(("cuda", dtype), [7], ROWS[-1], heads, size, inputs=inputs, **options)
    queries, wanted = case.op(), [cache.clone() for cache in case.caches]
    case.check(queries)
    for rows in ROWS[:-1]:
        for cache in case.caches:
            cache.fill_(torch.nan)
        assert torch.equal(bits(case.op(slice(0, rows))), bits(queries[:, :rows])), rows
        for cache, want in zip(case.caches, wanted):
            assert torch.equal(bits(cache[:, :, : 7 + rows]), bits(want[:, :, : 7 + rows])), rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_batch_on_a_gpu(shape):
    heads, size, inputs, options = SHAPES[shape]
    case = Case(("cuda", torch.bfloat16), [100, 0, 65], 17, heads, size, inputs=inputs, capacity=110, **options)
    case.check(case.op())
    assert all_zero()
