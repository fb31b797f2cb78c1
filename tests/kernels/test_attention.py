"""Tree attention against its plain-PyTorch meaning.

Without a GPU the kernels run in Triton's interpreter, in float32; ``pytest -m gpu`` runs the same on a CUDA device.
"""

import pytest
import torch
from attention_cases import FP8, SMALL, TOLERANCE, Case, bits, chain, paths, random_tree, star
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GPU, ON_GPU
from sweeps import thinned
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_compile.kernels import copies, ops
from spec_compile.kernels.attention import tree_attention as attention
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.card import Card
from spec_compile.tree import ancestry

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # rows that fill up a tile, in NumPy


@pytest.mark.sweep(2)
@pytest.mark.parametrize("nodes, causal", [(1, False), (7, False), (70, True)])
@pytest.mark.parametrize("run", [attention.tree_attention, lambda *call: attention.launch(AttentionCall(*call), SMALL)])
def test_a_block_that_lies_in_the_cache_already(place, nodes, causal, run):
    case = Case(place, [40] if causal else [40, 7], nodes, random_tree(nodes), heads=(4, 2), causal=causal)
    call = case.inputs()
    out = run(*call)
    caches = [cache.clone() for cache in (call.key_cache, call.value_cache)]
    again = run(*call._replace(k=None, v=None))
    assert torch.equal(bits(again), bits(out))
    for cache, before in zip((call.key_cache, call.value_cache), caches):
        assert torch.equal(bits(cache), bits(before))


EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129]
WHOLE = SMALL._replace(whole=True, most=4)
"""A program takes all spans of its rows. Spans double at 64 positions and at 128."""


@pytest.mark.parametrize("config", [SMALL, WHOLE], ids=["a span a program", "all spans a program"])
def test_lengths(place, config):
    """Every remainder of blocks and splits, in one batch of different lengths."""
    Case(place, EDGES, 5, random_tree(5)).check(config)


@pytest.mark.parametrize(
    "options",
    [dict(window=20, sinks=True), dict(window=70, rotary=True, distances=9), dict(softcap=2.0, slopes=torch.float32),
     dict(heads=(3, 1), sizes=(24, 40))],
    ids=["window, sinks", "wide window", "softcap, slopes", "odd sizes"],
)  # fmt: skip
def test_all_spans_in_a_program(options, place):
    """The bits of programs of a span each, where a tree reaches larger spans, too."""
    for lengths, nodes in (([0, 130], 5), ([60, 127], 9)):
        case = Case(place, lengths, nodes, random_tree(nodes), **options)
        case.check(WHOLE)
        outs = [attention.launch(case.inputs(), each) for each in (WHOLE, WHOLE._replace(whole=False))]
        assert torch.equal(*map(bits, outs))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("nodes, shape", thinned(3, [1, 2, 3, 7, 16, 33, 64], [chain, star, random_tree]))
def test_trees(place, nodes, shape):
    Case(place, [70] if nodes > 16 else [70, 0, 33], nodes, shape(nodes)).check()


def test_rows_of_different_trees(place):
    case = Case(place, [40, 7, 64], 7)
    trees = torch.tensor([random_tree(7), star(7), chain(7)])
    case.ancestors, depth = ancestry(trees)
    case.positions = case.lengths[:, None] + depth
    case.check()


HEADS = {
    (3, 3): (16, 16),
    (6, 2): (24, 24),  # groups of three, sizes that fill no block
    (4, 2): (8, 8),  # less than a tensor core sums
    (5, 1): (80, 80),
    (7, 1): (96, 64),
    (20, 1): (16, 32),  # more heads a group than rows a tile
    (8, 4): (128, 128),
    (2, 2): (192, 128),  # multi-head latent attention
    (2, 1): (256, 256),
}
ROTARY = dict(rotary=True)
TURNINGS = {}, ROTARY, dict(norms=True, **ROTARY), dict(norms=True, offset=1.0, **ROTARY)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("turning", TURNINGS)
@pytest.mark.parametrize("heads, sizes", HEADS.items())
def test_heads_and_sizes(place, heads, sizes, turning):
    case = Case(place, [50, 0], 4, random_tree(4), heads, sizes, **turning)
    if "norms" in turning:
        case.q *= torch.logspace(-2, 2, heads[0])[:, None, None]  # each head has a norm of its own
    case.check()


@pytest.mark.parametrize("nodes", [5, 70])
def test_16_bits_multiplied_in_float32(monkeypatch, nodes):
    """As on a GPU whose tensor cores Triton does not use; the tile is then that of float32."""
    monkeypatch.setattr(attention, "precision", lambda dtype, device: "wide")
    monkeypatch.setattr(attention, "multiplied_bytes", lambda dtype, device: 4)
    monkeypatch.setattr(attention, "card_of", lambda device: Card("T4", (7, 5), 40, 65_536))
    tree = random_tree(nodes) if nodes < 64 else None
    case = Case(("cpu", torch.float16), [40], nodes, tree, heads=(4, 2), sizes=(32, 32), causal=tree is None)
    case.check(None)


OPTIONS = [
    *(dict(window=window) for window in (1, 2, 5, 16, 17, 50, 1000)),
    *(dict(window=window, softcap=softcap, sinks=sinks)
      for window in (None, 20) for softcap, sinks in ((3.0, False), (None, True), (3.0, True))),
    dict(rotary=True, window=20), dict(rotary=True, softcap=2.0, sinks=True),
]  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_options(place, options, causal):
    case = Case(place, [0, 1, 5, 60, 129], 4, random_tree(4), heads=(3, 1), causal=causal, **options)
    case.q *= 4 if "softcap" in options else 1
    case.check()


@pytest.mark.sweep("interpreter-7-options0-slopes0 interpreter-7-options1-slopes1")
@pytest.mark.parametrize("slopes", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes, options", [(7, {}), (7, dict(window=100)), (70, {}), (70, dict(window=9, sinks=True))])
def test_slopes(place, nodes, options, slopes):
    """Of bfloat16 they round positions, which shows behind 256."""
    tree = None if nodes > 64 else random_tree(nodes)
    length = 60 if place[0] == "cpu" and slopes == torch.bfloat16 else 300  # the interpreter rounds towards zero
    case = Case(place, [0, length], nodes, tree, heads=(6, 2), causal=tree is None, slopes=slopes, **options)
    case.check(SMALL)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("distances", [2, 9, 129])
@pytest.mark.parametrize(
    "nodes, options", [(7, {}), (7, dict(window=50)), (70, {}), (70, dict(softcap=2.0, sinks=True))]
)
def test_biases_by_distance(place, nodes, options, distances, by_query):
    tree, biases = None if nodes > 64 else random_tree(nodes), dict(distances=distances, by_query=by_query)
    Case(place, [0, 150], nodes, tree, heads=(6, 2), causal=tree is None, **biases, **options).check(SMALL)


def test_the_bias_of_each_distance():
    """Along a tree: node 3 follows node 1, and is as far from it as node 2 is from node 0."""
    biases = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    positions, slots = torch.tensor([[4, 5, 5, 6]]), torch.tensor([[0, 1, 2, 3, 4, 5, 5, 6]])
    out = ops.distance_biases(biases, positions, slots)
    assert out[0, 0, 3].tolist() == [3, 3, 3, 3, 3, 2, 2, 1] and out[0, 1, 1, :6].tolist() == [7, 7, 7, 7, 6, 5]
    assert torch.equal(out, ops.distance_biases(biases.expand(1, 4, 2, 3), positions, slots))


CHUNKS = [
    *((nodes, {}) for nodes in (1, 16, 65, 130)),
    *((nodes, dict(window=window)) for nodes, window in ((33, 9), (65, 64), (90, 9), (130, 40))),
    (17, dict(heads=(20, 1))),  # tiles of less than a node, whose last key begins a block
    (70, dict(rotary=True, window=20)),
    (70, dict(rotary=True, norms=True, offset=1.0, sinks=True, heads=(3, 1), sizes=(24, 24))),
    (70, dict(softcap=2.0, sinks=True, window=30, heads=(6, 2))),
    (70, dict(heads=(3, 3), sizes=(80, 48))),
    (70, dict(rotary=True, norms=True, heads=(4, 2), sizes=(8, 4))),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("nodes, options", CHUNKS)
def test_causal_chunks(place, nodes, options):
    """Chunks of prompts. Those larger than a tree may be are appended before anyone attends to them."""
    Case(place, [0, 45] if nodes <= 33 else [45], nodes, causal=True, **options).check(SMALL)


@pytest.mark.parametrize("ahead, step", thinned(2, [0, -2, 7], [1, 3]))
def test_large_causal_chunk_at_other_positions(place, step, ahead):
    """A window is one of positions, not of slots."""
    case = Case(place, [40], 70, causal=True, window=30)
    case.positions = case.lengths[:, None] + ahead + step * torch.arange(70)
    case.check()


def test_chunk_that_fills_the_cache(place):
    """What lies behind the last slot is not kept, and those before it do not see it."""
    case = Case(place, [30, 0], 70, causal=True)
    inputs = case.inputs()
    caches = {name: getattr(inputs, name)[:, :, :80].contiguous() for name in ("key_cache", "value_cache")}
    out = attention.launch(inputs._replace(**caches), SMALL).cpu().double()
    tolerance = TOLERANCE[case.dtype]
    expected = case.expected()
    torch.testing.assert_close(out[0, :50], expected[0, :50], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out[1], expected[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "tiles",
    [dict(least=16, most=4), dict(least=16, block_n=32, most=4), dict(least=64, most=4), dict(block_m=64, block_n=64)],
)
def test_spans_and_tiles(place, tiles):
    """Of a tree that ends in the last slot of the cache, and of a prompt's chunk in which spans double twice."""
    config = SMALL._replace(**tiles)
    Case(place, [0, 64, 128], 3, star(3), capacity=131).check(config)
    Case(place, [100], 17, random_tree(17), heads=(4, 1)).check(config)
    Case(place, [45], 90, causal=True).check(config)


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "transposed"])
def test_strides(place, layout):
    case = Case(place, [33, 8], 4, random_tree(4), heads=(2, 1), sizes=(16, 32))
    if layout == "contiguous":
        case.q, case.k, case.v = (x.contiguous() for x in (case.q, case.k, case.v))
    elif layout == "transposed":  # not even the columns lie side by side
        case.q, case.k, case.v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (case.q, case.k, case.v))
    case.positions = case.positions[:1].expand(2, -1) if layout == "heads last" else case.positions
    case.check()


def test_rising_scores(place):
    """Each block of keys exceeds all before it by far, so that every sum so far must be scaled down."""
    case = Case(place, [128], 3, chain(3))
    for cache in (case.caches[0], case.clean[0]):
        cache[:, :, :128] *= torch.linspace(0, 20, 128)[:, None]
    case.check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "nodes, options",
    [
        *thinned(3, [1, 7, 17], [dict(), dict(causal=True), dict(window=20, softcap=2.0, sinks=True)]),
        (70, dict(causal=True, sinks=True)),
    ],
)
def test_caches_of_8_bits(place, nodes, options):
    """New keys and values are rounded before anyone sees them, and none exceeds the largest number."""
    lengths = [70, 0, 33] if nodes <= 16 else [40]
    case = Case(place, lengths, nodes, random_tree(nodes), heads=(4, 2), sizes=(32, 16), kept=FP8, **options)
    case.v[:, :, :, 0] *= 1000
    case.unit[0] = 448  # averages of such numbers, with weights rounded to 16 bits, may cancel
    if place[0] == "cpu":  # the interpreter does not round as a GPU and PyTorch do
        for x in (case.k, case.v):
            small, large = x.abs() < 1 / 64, x.abs() > 448
            x.copy_(torch.where(small, 1 / 64, torch.where(large, x, x.clamp(-448, 448).to(FP8).to(x.dtype))))
    case.check(SMALL)


@pytest.mark.parametrize("change, message", [
    (lambda call: dict(k=None, v=None), "k: expected keys to rotate, got None"),
    (lambda call: dict(q_norm=call.q_norm[:8], k_norm=call.k_norm[:8]), r"k_norm: expected weights \[16\].*got \[8\]"),
    (lambda call: dict(cos=call.cos[:, :2], sin=call.sin[:, :2]), r"sin: expected \[1, 3, 16\].*got \[1, 2, 16\]"),
    (lambda call: dict(scale=0.0), "scale must be positive, not 0.0"),
])  # fmt: skip
def test_arguments_that_do_not_fit(place, change, message):
    call = Case(place, [5], 3, rotary=True, norms=True).inputs()
    with pytest.raises(ValueError, match=message):
        attention.launch(call._replace(**change(call)), SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_is_transformers(dtype):
    q, k = torch.randn(2, 4, 7, 16).to(dtype), torch.randn(2, 2, 7, 16).to(dtype)
    cos, sin = torch.randn(2, 2, 7, 16).to(dtype)
    for got, want in zip((ops.rotated(x, cos, sin) for x in (q, k)), apply_rotary_pos_emb(q, k, cos, sin)):
        assert torch.equal(got, want)


@settings(max_examples=30 if GPU else 4)
@given(data=st.data())
def test_anything(place, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    causal = data.draw(st.booleans())
    nodes = data.draw(st.integers(1, (150 if causal else 64) if GPU else (80 if causal else 12)))
    reach = data.draw(st.integers(1, 64))
    parents = [-1, *(data.draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, nodes))]
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    heads = data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2)]))
    options = {
        "causal": causal,
        "window": data.draw(st.sampled_from([None, 3, 40])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sinks": data.draw(st.booleans()),
        "rotary": data.draw(st.booleans()),
    }
    config = SMALL._replace(least=data.draw(st.sampled_from([16, 64])), most=data.draw(st.sampled_from([4, 32])))
    Case(place, lengths, nodes, parents, heads, **options).check(config)


@pytest.mark.parametrize("options", [{}, dict(rotary=True), dict(kept=FP8)])
def test_operator(options):
    """The registered operator on a CPU: schema, fake, and the twin's own answer."""
    case = Case(("cpu", torch.float32), [20, 7], 5, random_tree(5), (4, 2), sinks=True, softcap=5.0, **options)
    case.caches = [cache.clone() for cache in case.clean]
    if "kept" not in options:  # torch cannot compare it
        torch.library.opcheck(attention.tree_attention, case.inputs())
    case.v[:, :, :, 0] *= 1000 if "kept" in options else 1
    inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in case.inputs()]
    case.compare(torch.ops.spec_compile.tree_attention(*inputs), inputs[3:5])


CUDA = [pytest.param(dtype, marks=ON_GPU, id=str(dtype)) for dtype in (torch.float32, torch.bfloat16)]
LLAMA = {"heads": (32, 8), "sizes": (128, 128)}
LARGE = [
    *((lengths, nodes, more) for lengths, more in (([3000], {}), ([3000], dict(rotary=True)), ([0, 1029, 128], {}))
      for nodes in (1, 16, 64)),
    *(([1500], nodes, dict(heads=heads, sizes=sizes, window=window, sinks=True)) for nodes in (1, 16, 64)
      for heads, sizes in (((14, 2), (64, 64)), ((4, 1), (256, 256)), ((16, 16), (192, 128)), ((32, 32), (80, 80)))
      for window in (None, 512)),
    *(([700], nodes, dict(causal=True, window=window, **more))
      for nodes, window in ((512, None), (300, 128)) for more in ({}, dict(rotary=True), dict(kept=FP8))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [*CUDA, pytest.param(torch.float16, marks=ON_GPU, id="torch.float16")])
@pytest.mark.parametrize("lengths, nodes, options", LARGE)
def test_own_tuning(dtype, lengths, nodes, options):
    """Trees and chunks of prompts with the divisions that `tuning` chooses."""
    nodes = 16 if dtype == torch.float32 and "sinks" in options else nodes  # others take long to compile
    tree = None if "causal" in options else random_tree(nodes)
    Case(("cuda", dtype), lengths, nodes, tree, **{**LLAMA, **options}).check(None)


@pytest.mark.parametrize("dtype", CUDA)
@pytest.mark.parametrize("window", [None, 4096, 100_000])
def test_long_context(dtype, window):
    """A tree behind 131,056 tokens, and more than 2^31 elements in a cache: offsets need 64 bits."""
    slots, heads = 1 << 17, 132
    if torch.cuda.get_device_properties(0).total_memory < 30e9:
        pytest.skip("needs 30 GB")
    caches = [torch.zeros(1, heads, slots, 128, dtype=dtype, device="cuda") for _ in range(2)]
    length = slots - 16
    q, k, v = (torch.randn(1, heads, 16, 128, dtype=dtype, device="cuda") for _ in range(3))
    for cache in caches:
        cache[:, -1, :length] = torch.randn(length, 128, dtype=dtype, device="cuda")
    lengths = torch.tensor([length], device="cuda")
    ancestors, depth = (x.cuda() for x in ancestry(torch.tensor([random_tree(16)])))
    positions = lengths[:, None] + depth
    out = torch.ops.spec_compile.tree_attention(
        q, k, v, *caches, lengths, ancestors, positions, None, 0.3, None, window, None
    )  # fmt: skip
    last = [x[:, -1:] for x in (q, *caches)]
    bias = ops.tree_mask(positions, lengths, ancestors, slots, window, 1, torch.float32)[:, 0]
    expected = torch.softmax(last[0].float() @ last[1].float().transpose(2, 3) * 0.3 + bias, 3) @ last[2].float()
    torch.testing.assert_close(out[:, :, -1:].transpose(1, 2).float(), expected, atol=3e-2, rtol=3e-2)
    assert torch.equal(caches[0][:, :, length:], k) and torch.equal(caches[1][:, :, length:], v)


@pytest.mark.parametrize("dtype", CUDA)
def test_cuda_graph(dtype):
    """A captured graph of attention and compaction follows the lengths, trees and paths on the device."""
    nodes, capacity = 16, 4200
    cases = [
        Case(("cuda", dtype), [length], nodes, shape(nodes), capacity=capacity, rotary=True, **LLAMA)
        for length, shape in ((100, chain), (0, star), (4100, random_tree), (777, random_tree))
    ]
    static = cases[0].inputs()
    lengths = static[5].clone()
    path, count = (x.cuda() for x in paths(2, nodes))

    def both():
        static[5].copy_(lengths)
        out = torch.ops.spec_compile.tree_attention(*static)
        kept = [cache.clone() for cache in static[3:5]]
        copies.launch(static[3:5], static[5], path[1:], count[1:])
        return out, kept

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, kept = both()
    for case in cases[1:] + cases[:1]:
        for there, new in zip(static, case.inputs()):
            if isinstance(new, torch.Tensor):
                there.copy_(new)
        lengths.copy_(case.lengths)
        graph.replay()
        case.compare(out, kept)
        expected = [cache.clone() for cache in kept]
        rows = case.lengths[0] + path[1, : int(count[1])].cpu()
        for cache, after in zip(expected, static[3:5]):
            cache[:, :, int(case.lengths[0]) : int(case.lengths[0]) + len(rows)] = cache[:, :, rows]
            assert torch.equal(bits(cache), bits(after))
