"""Routed experts: the kernel against its plain meaning and its bits, and the markers against transformers' forwards.

Without a GPU the kernels run in Triton's interpreter, in float32; ``pytest -m gpu`` runs them on a CUDA device.
"""

from dataclasses import replace

import models
import mtp_checkpoints
import pytest
import torch
from counters import all_zero
from places import GPU, places
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from spec_compile.capture.experts import IMPLEMENTATION
from spec_compile.capture.trace import capture
from spec_compile.capture.yardstick import in_float32
from spec_compile.compat import EXPERTS_INTERFACES
from spec_compile.graph import calls
from spec_compile.kernels import experts
from spec_compile.kernels.experts import ExpertFormat, launch, plans
from spec_compile.kernels.linear.product_ops import plain_stream, stream_after
from spec_compile.quantised import mxfp4

route = pytest.importorskip("spec_compile.kernels.experts.route", exc_type=ImportError)
sort = pytest.importorskip("spec_compile.kernels.experts.wide_kernel", exc_type=ImportError)

PLACES = places(torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
TILE = plans.ExpertTile(32, 32, 16, stages=2)
SORTED = TILE._replace(sorted=True)
BOTH = pytest.mark.parametrize("tile", [TILE, SORTED], ids=["looked through", "sorted"])
SILU, CLAMPED = ExpertFormat("silu"), ExpertFormat("clamped", True, True, True, 1.702, 7.0)


def exact(part):
    """A part of weights in float64, unless it holds codes."""
    return part.double() if part.is_floating_point() else part


class Mixture:
    """Random experts, and tokens that are routed to them."""

    def __init__(self, place, tokens, top, count, size, inner, first):
        self.first = first
        self.second = ExpertFormat(transposed=first.transposed, biased=first.biased, block=first.block)
        outputs = inner * (1 if first.gate == "none" else 2)
        self.up, self.down = self.parts(place, count, outputs, size), self.parts(place, count, size, inner)
        self.x = torch.randn(tokens, size).to(*place)
        self.ids = torch.stack([torch.randperm(count)[:top] for _ in range(tokens)]).to(place[0])
        self.weights = torch.rand(tokens, top).to(place[0])

    def parts(self, place, count, outputs, inputs):
        weight = torch.randn(count, outputs, inputs) / inputs**0.5
        if self.first.block:
            blocks = [-(-size // self.first.block) for size in (outputs, inputs)]
            return [weight.to(place[0], torch.float8_e4m3fn), torch.rand(count, *blocks).to(place[0]) + 0.5]
        weight = weight.transpose(1, 2).contiguous() if self.first.transposed else weight
        return [each.to(*place) for each in (weight, *([torch.randn(count, outputs)] if self.first.biased else ()))]

    def plain(self):
        """The plain meaning in float64, in which a GPU has no kernel."""
        parts = [[exact(each.cpu()) for each in side] for side in (self.up, self.down)]
        ids, weights = self.ids.cpu(), self.weights.cpu().double()
        inner = experts.experts_up(self.x.cpu().double(), ids, parts[0], self.first.text)
        return experts.experts_down(inner, ids, weights, parts[1], self.second.text)

    def kernel(self, rows=slice(None), tile=TILE, stream=None):
        inner = launch.up(self.x[rows], self.ids[rows], self.up, self.first, tile)
        out = launch.down(inner, self.ids[rows], self.weights[rows], self.down, self.second, tile, stream)
        assert all_zero()
        return out

    def error(self, **options):
        """Of the kernel, relative to the plain meaning."""
        expected = self.plain()
        return ((self.kernel(**options).cpu().double() - expected).norm() / expected.norm()).item()


@BOTH
@pytest.mark.parametrize(
    "tokens, top, count, size, inner, kind",
    [
        (1, 2, 4, 48, 20, SILU),
        (3, 1, 9, 64, 40, ExpertFormat("none")),
        (17, 3, 5, 33, 34, SILU),  # more pairs than experts, and odd sizes
        (5, 2, 12, 64, 33, CLAMPED),
        (70, 2, 5, 32, 16, SILU),  # pairs that do not fit into one look
        (6, 2, 3, 80, 48, ExpertFormat("silu", biased=True)),
    ],
)
def test_experts(place, tokens, top, count, size, inner, kind, tile):
    assert Mixture(place, tokens, top, count, size, inner, kind).error(tile=tile) < TOLERANCE[place[1]]


@BOTH
@pytest.mark.parametrize("tokens, size, biased", [(1, 48, False), (17, 33, True), (35, 130, False)])
def test_experts_that_end_at_the_residual_stream(place, tokens, size, biased, tile):
    """As the product by itself, then the addition and the first half of the norm. Rows of the stream lie apart."""
    mixture = Mixture(place, tokens, 2, 5, size, 20, ExpertFormat("silu", biased=biased))
    norm, residual = torch.randn(size).to(*place), torch.randn(tokens, 2, size).to(*place)[:, 0]
    inner = launch.up(mixture.x, mixture.ids, mixture.up, mixture.first, tile)
    arguments = inner, mixture.ids, mixture.weights, mixture.down, mixture.second, tile
    after = stream_after(residual.contiguous(), norm, 1.0)
    after.scaled.fill_(torch.nan), after.squares.fill_(torch.nan)
    stream = launch.down(*arguments, stream=after)
    want = plain_stream(launch.down(*arguments), residual, norm, 1.0)
    assert torch.equal(stream, want[0]) and torch.equal(after.scaled, want[1]) and all_zero()
    torch.testing.assert_close(after.squares, want[2], rtol=1e-5, atol=1e-6)


def test_experts_down_to_stream_means_a_product_and_an_addition():
    mixture = Mixture(("cpu", torch.bfloat16), 6, 2, 4, 48, 32, SILU)
    inner, residual, norm = torch.randn(6, 2, 32), torch.randn(2, 3, 48), torch.randn(48)
    inner, residual, norm = (each.bfloat16() for each in (inner, residual, norm))
    arguments = inner, mixture.ids, mixture.weights, mixture.down, mixture.second.text
    got = experts.experts_down_to_stream(*arguments, residual, norm, 0.0)
    want = plain_stream(experts.experts_down(*arguments).view(2, 3, 48), residual, norm, 0.0)
    assert all(map(torch.equal, got, want))
    torch.library.opcheck(experts.experts_down_to_stream, (*arguments, residual, norm, 0.0))


def test_in_float32_experts_do_not_round_their_inputs():
    ids, weights = torch.tensor([[0, 2], [1, 2], [3, 0]]), torch.rand(3, 2)
    parts = [torch.randn(4, 48, 130).to(torch.float8_e4m3fn), torch.rand(4, 1, 2) + 0.5]
    x, residual, norm = torch.randn(3, 2, 130).bfloat16(), torch.randn(3, 48).bfloat16(), torch.ones(48).bfloat16()
    layout = ExpertFormat(block=128)
    with in_float32():
        alone = experts.experts_down(x, ids, weights, parts, layout.text)
        stream, _, _ = experts.experts_down_to_stream(x, ids, weights, parts, layout.text, residual, norm, 0.0)
    want = experts.experts_down(x.float(), ids, weights, parts, replace(layout, rounds=False).text)
    torch.testing.assert_close(alone, want)
    torch.testing.assert_close(stream, residual.float() + want)


@pytest.mark.parametrize("tokens, top, size", [(1, 2, 16), (40, 3, 1), (257, 2, 16), (700, 6, 64)])
@pytest.mark.parametrize("among", [7, 1])
def test_pairs_are_sorted_and_cut(place, tokens, top, size, among):
    """Pairs of experts that no token, some tokens and all tokens choose, in one look and in several."""
    ids = torch.randint(among, (tokens, top), device=place[0]) + 1
    order, tiles = sort.sort_pairs(ids, 0, 10, size, False)
    assert torch.equal(order.long(), ids.flatten().sort(stable=True).indices)
    rows, counts = [], torch.zeros(10, dtype=torch.int64)
    for expert, begin, count in tiles[tiles[:, 2] > 0].tolist():
        rows += range(begin, begin + count)
        assert count <= size and set(ids.flatten()[order[begin : begin + count].long()].tolist()) == {expert}
        counts[expert] += 1
    assert rows == [*range(ids.numel())]
    assert torch.equal(counts, -(-ids.flatten().bincount(minlength=10).cpu() // size))


@pytest.mark.parametrize(
    "kind, tokens, top, count, size, inner",
    [
        (ExpertFormat("none"), 3, 1, 9, 64, 40),
        (SILU, 70, 2, 5, 36, 52),
        (ExpertFormat("clamped", True, False, True, 1.702, 7.0), 20, 2, 3, 80, 48),
        (ExpertFormat("silu", biased=True), 6, 2, 3, 80, 48),
    ],
)
def test_tiles_that_descriptors_read(monkeypatch, place, kind, tokens, top, count, size, inner):
    """With outputs that end within a tile, so that it reaches into the next expert or beyond the last one."""
    monkeypatch.setattr(launch, "reads_tiles", lambda *arguments: True)
    tile = plans.ExpertTile(128, 64, 64, sorted=True) if GPU else SORTED
    size, inner = (size // 8 * 8, inner // 8 * 8) if GPU else (size, inner)  # rows of 16 bytes
    assert Mixture(place, tokens, top, count, size, inner, kind).error(tile=tile) < TOLERANCE[place[1]]


@pytest.mark.parametrize("count", [4, 42])
def test_all_tokens_at_the_same_experts_and_at_none_alike(place, count):
    mixture = Mixture(place, 20, 2, count, 32, 16, SILU)
    same, unlike = torch.tensor([[count - 1, 1]] * 20), torch.arange(40).view(20, 2) % count
    for ids in (same, unlike):  # 20 rows are two tiles
        mixture.ids = ids.to(place[0])
        for tile in (TILE, SORTED):
            assert mixture.error(tile=tile) < TOLERANCE[place[1]]


def test_a_row_has_the_same_bits_beside_any_others(place):
    mixture = Mixture(place, 40, 3, 7, 64, 32, SILU)
    mixture.ids[20:] = mixture.ids[20]
    large = plans.ExpertTile(32, 32, 64, stages=2)
    everything = mixture.kernel()
    for rows in ([0], [39, 20], [7, 3, 21, 22, 5], slice(None)):
        for tile in (TILE, SORTED, large) if GPU else (TILE, SORTED):  # numpy adds up by the size of a tile
            assert torch.equal(mixture.kernel(rows, tile), everything[rows])


@BOTH
@pytest.mark.parametrize(("tokens", "top", "kind"), [(1, 4, SILU), (2, 1, CLAMPED), (9, 3, SILU), (70, 4, SILU)])
def test_experts_of_which_each_rank_has_some(place, monkeypatch, tokens, top, kind, tile):
    """Sums over ranks are the whole mixture. Memory that nobody writes is NaN, or tiles of 3 pairs. One token may have
    more experts than a rank."""
    mixture, new_empty = Mixture(place, tokens, top, 6, 64, 32, kind), torch.Tensor.new_empty

    def poisoned(*arguments, **options):
        tensor = new_empty(*arguments, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 3)

    expected, total = mixture.plain(), 0
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    whole = mixture.first, mixture.second, mixture.up, mixture.down
    for first in (0, 3):
        mixture.first, mixture.second = (replace(each, first=first, of=6) for each in whole[:2])
        mixture.up, mixture.down = ([part[first : first + 3] for part in parts] for parts in whole[2:])
        plain = mixture.plain()
        got = mixture.kernel(tile=tile).cpu().double()
        assert (got - plain).norm() <= TOLERANCE[place[1]] * expected.norm()
        total = total + got
    assert (total - expected).norm() < 2 * TOLERANCE[place[1]] * expected.norm()


PUBLISHED = {
    "Qwen3-30B-A3B": (8, 128, 2048, 768, SILU),
    "Qwen3-30B-A3B in FP8": (8, 128, 2048, 768, ExpertFormat("silu", block=128)),
    "Mixtral": (2, 8, 4096, 14336, SILU),
    "gpt-oss-20b": (4, 32, 2880, 2880, CLAMPED),
    "gpt-oss-20b in MXFP4": (4, 32, 2880, 2880, None),
    "DeepSeek-V2-Lite": (6, 64, 2048, 1408, SILU),
}
"""Experts of a token, experts, inputs, columns between the products, format of the first product (None: MXFP4)."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_have_the_same_bits_in_rounds_and_prompts(name):
    *sizes, kind = PUBLISHED[name]
    place = "cuda", torch.bfloat16
    with torch.device("cuda"):
        mixture = Mixture(place, 4096, *sizes, kind) if kind else mxfp4_mixture(place, 4096, *sizes)
    everything = mixture.kernel(tile=None)
    residual, norm = torch.randn_like(everything), torch.randn_like(everything[0])
    whole = stream_after(residual, norm, 0.0)
    ends = mixture.kernel(tile=None, stream=whole), whole.scaled, whole.squares
    assert torch.equal(ends[0], everything + residual)
    for tokens in (1, 2, 17, 64, 300, 512, 513, 2048):
        first, some = torch.arange(tokens), torch.randperm(4096)[:tokens]
        for rows in (first.cuda(), some.cuda()):
            assert torch.equal(mixture.kernel(rows, None), everything[rows]), tokens
            after = stream_after(residual[rows], norm, 0.0)
            got = mixture.kernel(rows, None, after), after.scaled, after.squares
            assert all(torch.equal(each, want[rows]) for each, want in zip(got, ends, strict=True)), tokens


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tokens", [3, 20])
def test_experts_in_fp8(tokens):
    place = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    mixture = Mixture(place, tokens, 2, 4, 128, 256, ExpertFormat("silu", block=128))
    up, down = ([each.cpu() for each in parts] for parts in (mixture.up, mixture.down))
    x, ids, weights = mixture.x.cpu(), mixture.ids.cpu(), mixture.weights.cpu()
    tile = plans.ExpertTile(32, 128, 16, stages=2)
    got = launch.up(mixture.x, mixture.ids, mixture.up, mixture.first, tile)
    expected = experts.experts_up(x, ids, up, mixture.first.text)
    assert (got.cpu() - expected).norm() < TOLERANCE[place[1]] * expected.norm()
    expected = experts.experts_down(got.cpu(), ids, weights, down, mixture.second.text)
    got = launch.down(got, mixture.ids, mixture.weights, mixture.down, mixture.second, tile)
    assert (got.cpu() - expected).norm() < TOLERANCE[place[1]] * expected.norm()
    assert torch.equal(mixture.kernel(tile=tile._replace(sorted=True)), got)


def published(experts, outputs, inputs):
    """Random weights in MXFP4 as files have them."""
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(0, 129, blocks.shape[:3], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [64, 288, 512])
def test_mxfp4_is_decoded_as_by_transformers(inputs, dtype):
    """With all scales but NaN and those above 2, and in the order of the kernel, which can be undone."""
    blocks, scales = published(3, 10, inputs)
    words, units = mxfp4.pack(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    for expert in range(3):
        got = mxfp4.weight(words[expert], units[expert], inputs, dtype)
        assert torch.equal(got.view(torch.int16), expected[expert].contiguous().view(torch.int16))
    assert all(map(torch.equal, mxfp4.unpack(words, units, inputs), (blocks, scales)))


def test_mxfp4_that_has_no_place_in_the_order_of_the_kernel():
    blocks, scales = published(2, 4, 64)
    with pytest.raises(ValueError, match="expected uint8"):
        mxfp4.pack(blocks, scales[:, :, :1])
    scales[1, 3, 1] = 255
    with pytest.raises(ValueError, match="255 is NaN"):
        mxfp4.pack(blocks, scales)


def mxfp4_mixture(place, tokens, top, count, size, inner):
    """A mixture as that of gpt-oss, with random codes."""
    clamped, sides = ExpertFormat("clamped", True, False, True, 1.702, 7.0), []
    mixture = Mixture(place, tokens, top, count, size, inner, clamped)
    for weight, bias in (mixture.up, mixture.down):
        blocks, scales = published(*weight.shape)
        words, units = mxfp4.pack(blocks, scales % 8 + 118)
        sides.append([words.to(place[0]), units.to(place[0]), bias])
    mixture.up, mixture.down = sides
    mixture.first, mixture.second = replace(mixture.first, mxfp4=size), replace(mixture.second, mxfp4=inner)
    return mixture


CUT = pytest.param(2, (18, 2, 4, 544, 288), [1, 3], marks=pytest.mark.slow)


@pytest.mark.parametrize("parts, sizes, chosen", [(1, (18, 1, 2, 288, 32), [1]), CUT])
def test_experts_in_mxfp4(place, parts, sizes, chosen):
    """With sizes that are no multiples of a tile's, more rows than a tile has, and programs that share the columns."""
    mixture, tile = mxfp4_mixture(place, *sizes), plans.ExpertTile(128, 256, 16, stages=2, parts=parts)
    mixture.ids[2 if parts == 1 else 0 :] = torch.tensor(chosen)
    everything = mixture.kernel(tile=tile)
    assert mixture.error(tile=tile) < TOLERANCE[place[1]]
    for rows in (slice(None), [17], [3, 4, 5]):
        for each in (tile, tile._replace(sorted=True), *([tile._replace(shared=True)] if parts > 1 else [])):
            assert torch.equal(mixture.kernel(rows, each), everything[rows])


@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (4096, 14336)])
@pytest.mark.parametrize("scale_size", [0, 128, mxfp4.GROUP])
def test_the_tiles_of_any_number_of_rows_multiply_by_the_same_instructions(shape, scale_size):
    tiles = [plans.tile(tokens, 4, 32, shape, scale_size, 2) for tokens in (*range(1, 400), 2048, 1 << 15)]
    assert all(tile.block_o >= launch.LEAST_HEIGHT for tile in tiles)
    looked_through = 15 if scale_size == mxfp4.GROUP else 63  # less than 64 or 256 pairs
    assert [tile.sorted for tile in tiles] == [False] * looked_through + [True] * (401 - looked_through)


def test_the_columns_of_mxfp4_are_cut_alike_for_all_numbers_of_rows():
    for outputs, inputs, top in ((5760, 2880, 4), (2880, 2880, 4), (64, 32, 2), (1 << 16, 2880, 4), (64, 2816, 8)):
        tiles = {plans.tile(tokens, top, 32, (outputs, inputs), mxfp4.GROUP, 2) for tokens in range(1, 300)}
        (cut,) = {tile.parts for tile in tiles}
        assert -(-inputs // mxfp4.WIDTH) % cut == 0
        assert (cut > 1) == any(tile.shared for tile in tiles)


def test_all_values_of_mxfp4(place):
    """Each code at each place of a word, with each scale: the identity times the weights."""
    codes = (torch.arange(512)[None] + torch.arange(32)[:, None]) % 16
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(1, 32, 16, 16)
    scales = torch.arange(512).view(1, 32, 16).remainder(129).to(torch.uint8)
    parts = [part.to(place[0]) for part in mxfp4.pack(blocks, scales)]
    ids = torch.zeros(512, 1, dtype=torch.int64, device=place[0])
    tile = plans.ExpertTile(32, 256, 64, stages=2)
    got = launch.up(torch.eye(512).to(*place), ids, parts, ExpertFormat(mxfp4=512), tile)
    normal = scales[0].repeat_interleave(32, 1) > 1  # PyTorch's sums lose numbers below the smallest normal one
    expected = convert_moe_packed_tensors(blocks, scales, dtype=place[1])[0].T
    assert torch.equal(got.cpu()[:, 0].T[normal], expected[normal])


@pytest.mark.parametrize("among", route.AMONG)
@pytest.mark.parametrize("count, top", [(8, 2), (100, 6)])
def test_route(place, among, count, top):
    logits = (torch.randn(5, count) * 3).to(*place)
    weights, ids = route.launch(logits, top, among, torch.float32)
    expected_weights, expected_ids = route.route(logits.cpu(), top, among, torch.float32)
    distinct = logits.sort(dim=1).values.diff(dim=1).ne(0).all(dim=1).cpu()  # of equal ones PyTorch takes any
    assert torch.equal(ids.cpu()[distinct], expected_ids[distinct])
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-5, atol=1e-6)


def test_the_first_of_equal_experts_is_chosen(place):
    _, ids = route.launch(torch.zeros(2, 12, device=place[0]), 3, "all", torch.float32)
    assert ids.tolist() == [[0, 1, 2]] * 2


def gates_of(model, graph):
    """The gates of the graph's first products. Its logits are the model's."""
    ids, positions = torch.randint(3, models.VOCAB, (2, 9)), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        expected, got = model(input_ids=ids).logits, graph.gm(ids, positions)[0]
    assert (got - expected).abs().max() < 2e-5 * expected.std()
    return [node.args[-1].split()[0] for node in calls(graph.gm, experts.UP)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_markers_mean_what_the_library_computes(captured, name):
    model, graph = captured(name)
    assert model.config._experts_implementation != IMPLEMENTATION
    mixtures = sum(hasattr(module, "down_proj") and hasattr(module, "num_experts") for module in model.modules())
    assert len(gates_of(model, graph)) == len(calls(graph.gm, experts.DOWN)) == mixtures > 0


def test_a_gate_that_has_no_kernel_stays_in_the_graph():
    """Of an activation that is not SiLU, and of experts without a gate."""
    model = models.ADMITTED["mixtral"]()
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.GELU()
    assert {*gates_of(model, capture(model))} == {"none"}


def test_experts_that_do_not_ask_the_interface():
    """Of Step, in a layer without a bound and in one with a bound, whose gate stays in the graph."""
    build = mtp_checkpoints.MTP["step3p7"].target
    if build is None:
        pytest.skip("this version of transformers has no such model")
    model = build()
    assert gates_of(model, capture(model)) == ["silu", "none"]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_interfaces_keep_their_own_functions():
    assert all({"grouped_mm", "batched_mm", IMPLEMENTATION} <= {*table} for table in EXPERTS_INTERFACES)
