"""A token's attention has the same bits as a root alone and as a node of any tree, and so has its place in the cache.

On a CPU only what the kernels sum over is tested: tail tiles and spans. Sums in Triton's interpreter have other bits.
"""

import random

import pytest
import torch
from attention_cases import FP8, Case, bits, chain, random_tree, star
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GPU, INTERPRETER, ON_GPU, triton

from spec_compile.kernels.attention import partial_softmax as spans
from spec_compile.kernels.attention import tree_attention as attention
from spec_compile.kernels.attention.tail_tiles import COLUMNS, nodes_per_tile, tail_tile_table, tail_tiles
from spec_compile.kernels.attention.tail_tiles import launch as launch_table
from spec_compile.tree import ancestry

tl = triton.language
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def path_to(parents, node):
    path = []
    while node >= 0:
        path, node = [node, *path], parents[node]
    return path


def compare_path(case, parents, leaf, step=1):
    """Run the tree of `case` at once, then each `step`-th node on the path to `leaf` as a root alone."""
    call = case.inputs()
    call = call._replace(tiles=tail_tiles(call.ancestors, nodes_per_tile(call.q.shape[1] // call.k.shape[1])))
    caches = [cache.clone() for cache in (call.key_cache, call.value_cache)]
    torch.cuda.synchronize()  # kernels read tables and lengths before those that computed them may be done
    tree_out, lengths = attention.launch(call), list(enumerate(case.lengths.tolist()))
    for depth, node in enumerate(path_to(parents, leaf)):
        if depth % step == 0:
            alone = {name: getattr(call, name)[:, :, node : node + 1] for name in ("q", "k", "v")}
            alone |= {name: getattr(call, name)[:, node : node + 1] for name in ("cos", "sin", "positions")
                      if getattr(call, name) is not None}  # fmt: skip
            alone |= {"ancestors": None, "tiles": None, "lengths": call.lengths + depth}
            one = call._replace(**alone, key_cache=caches[0], value_cache=caches[1])
            torch.cuda.synchronize()
            assert torch.equal(bits(attention.launch(one)[:, 0]), bits(tree_out[:, node]))
        for cache, after in zip(caches, (call.key_cache, call.value_cache)):
            for row, length in lengths:
                wanted = after[row, :, length + node]
                assert depth % step or torch.equal(bits(cache[row, :, length + depth]), bits(wanted))
                cache[row, :, length + depth] = wanted


BOTH_HALVES = pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=ON_GPU, id=str(d)[6:]) for d in (torch.bfloat16, torch.float16)]
)
SHAPES = {
    "8B": dict(heads=(32, 8), sizes=(128, 128)),
    "1B": dict(heads=(32, 8), sizes=(64, 64)),
    "135M": dict(heads=(9, 3), sizes=(64, 64)),
    "normed": dict(heads=(16, 8), sizes=(128, 128), rotary=True, norms=True),
    "wide": dict(heads=(8, 1), sizes=(256, 256), rotary=True, norms=True, offset=1.0),
    "latent": dict(heads=(16, 16), sizes=(192, 128)),
    "group of 7": dict(heads=(14, 2), sizes=(64, 64), rotary=True),
    "one KV head of 71": dict(heads=(71, 1), sizes=(64, 64)),
    "no powers of two": dict(heads=(6, 2), sizes=(80, 96), rotary=True, norms=True),
    "window": dict(heads=(32, 8), sizes=(64, 64), window=100, rotary=True),
    "wide window": dict(heads=(16, 8), sizes=(128, 128), window=1024),
    "softcap": dict(heads=(16, 8), sizes=(128, 128), softcap=2.0, rotary=True),
    "sinks": dict(heads=(16, 2), sizes=(64, 64), sinks=True, window=128),
    "fp8": dict(heads=(32, 8), sizes=(128, 128), kept=FP8, rotary=True),
}
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 960, 1023, 1024, 1025, 1100, 1983, 2047, 2048, 2049, 2303, 3000)


@BOTH_HALVES
@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape, nodes, dtype):
    rng, (heads, kv_heads), sizes = random.Random(f"{shape} {nodes}"), *map(SHAPES[shape].get, ("heads", "sizes"))
    for form in (chain, star, random_tree):
        parents = form(nodes)
        for batch in (1, 3):
            for _ in range(3):
                lengths = [max(rng.choice(EDGES) - rng.choice((0, 0, nodes // 2, nodes)), 0) for _ in range(batch)]
                case = Case(("cuda", dtype), lengths, nodes, parents, capacity=3100, **SHAPES[shape])
                case.q *= 2
                for leaf in {nodes - 1, rng.randrange(nodes)}:
                    compare_path(case, parents, leaf)
                usual = attention.tree_tuning(heads // kv_heads * nodes, batch * kv_heads, *sizes, 2, 0)
                outs = [attention.launch(case.inputs(), usual._replace(whole=whole)) for whole in (False, True)]
                assert torch.equal(*map(bits, outs))


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=ON_GPU, id="bfloat16")])
@pytest.mark.parametrize("length", [4096 - 9, 8100, 16384 - 20, 40_000])
def test_of_long_contexts(length, dtype):
    for parents in (random_tree(24), chain(24), random_tree(64)):
        nodes = len(parents)
        case = Case(("cuda", dtype), [length], nodes, parents, heads=(8, 2), sizes=(128, 128))
        compare_path(case, parents, nodes - 1)
        usual = attention.Tuning(64, 64, 128, 4, 3)
        others = dict(block_m=128, warps=8), dict(stages=4), dict(whole=True)
        outs = [attention.launch(case.inputs(), usual._replace(**each)) for each in ({}, *others)]
        assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)
    case = Case(("cuda", dtype), [length], 24, chain(24), heads=(8, 2), sizes=(128, 128), causal=True)
    call = case.inputs()
    out = attention.launch(call)
    tree = ancestry(torch.tensor([chain(24)]))[0].cuda()
    assert torch.equal(bits(attention.launch(call._replace(ancestors=tree))), bits(out))


@BOTH_HALVES
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_on_a_gpu(shape, dtype):
    """Tokens of chunks of prompts, some of which begin and end where spans double, have the bits of single tokens."""
    for lengths, nodes in (([0, 37], 129), ([1983], 700), ([4096 - 300], 512), ([8000], 333)):
        case = Case(("cuda", dtype), lengths, nodes, chain(nodes), causal=True, capacity=8400, **SHAPES[shape])
        case.q *= 2
        compare_path(case, chain(nodes), nodes - 1, step=37)


def expected_tiles(parents, per_tile):
    """(path, the nodes of the tile) of each tail tile, from its definition."""
    nodes, owned = len(parents), set()
    for leaf in range(nodes):
        if leaf not in parents:
            path = path_to(parents, leaf)
            mine = [node for node in path if node not in owned]
            owned.update(mine)
            for begin in range(0, len(mine), per_tile):
                yield path, mine[begin : begin + per_tile]


@settings(max_examples=100 if GPU else 40)
@given(data=st.data())
def test_tail_tiles(data):
    nodes, per_tile = data.draw(st.integers(2, 64 if GPU else 32)), data.draw(st.sampled_from([1, 2, 9, 16, 64]))
    trees = [
        [-1, *(data.draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, nodes))]
        for reach in data.draw(st.lists(st.sampled_from([1, 2, 64]), min_size=1, max_size=3))
    ]
    ancestors = ancestry(torch.tensor(trees))[0]
    tables = [tail_tile_table(ancestors, per_tile)]
    if INTERPRETER or GPU:
        tables.append(launch_table(ancestors.to("cuda" if GPU else "cpu"), per_tile))
    for parents, tiles in (pair for table in tables for pair in zip(trees, table.tolist())):
        expected = list(expected_tiles(parents, per_tile))
        for (length, first, count, count_of_tiles, ahead, *path), (whole_path, members) in zip(tiles, expected):
            assert path == whole_path + [nodes] * (nodes - length) and length == len(whole_path)
            assert [count_of_tiles, ahead] == [len(expected), 0]
            assert path[first : first + count] == members
        assert all(row[2:5] == [0, len(expected), 0] for row in tiles[len(expected) :])
        assert sorted(node for _, members in expected for node in members) == list(range(nodes))


def test_a_block_that_sees_itself():
    ones = torch.full((1, 5), -1)
    tables = [tail_tile_table(ones, 3)]
    if INTERPRETER or GPU:
        tables.append(launch_table(ones.to("cuda" if GPU else "cpu"), 3))
    for table in tables:
        assert table[0, :2].tolist() == [[5, 0, 3, 2, 5, *range(5)], [5, 3, 2, 2, 5, *range(5)]]
        assert not table[0, 2:, 2].any()
    assert table.shape == (1, 5, COLUMNS + 5) and tail_tiles(None, 3) is tail_tiles(torch.ones(1, 1).long(), 3) is None
    assert torch.equal(tail_tiles(ones, 3).view_as(tables[0]), tables[0])
    assert all(tail_tiles(torch.ones(1, n).long(), 3).shape[1] % n == 0 for n in (5, 37)), "the size varies with N"
    case = Case(("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32), [47, 63], 5, heads=(8, 1))
    case.ancestors.fill_(-1)
    case.check()


@triton.jit
def spans_kernel(log2_ptr, turn_ptr, FIRST: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr):
    length = tl.arange(0, SIZE)
    log2, turn = spans.span_log2(length, FIRST, MOST)
    tl.store(log2_ptr + length, log2)
    tl.store(turn_ptr + length, turn)


@INTERPRETER
@pytest.mark.parametrize("window, least", [(None, 128), (None, 32), (100, 128), (4096, 128)])
def test_spans_of_every_length(window, least):
    size, first, most = 1 << 17, spans.first_log2(least, window), 32
    log2, turn = torch.empty(2, size, dtype=torch.int32)
    spans_kernel[(1,)](log2, turn, first, 0 if window else most, size)
    length = torch.arange(size)
    if window is not None:
        assert (log2 == first).all()
        for capacity in (1, 7, 1024, 1025, 5000, size):
            lowest = max(capacity - window, 0)
            assert spans.most_spans(capacity, first, most, window) >= (capacity - 1 >> first) - (lowest >> first) + 1
        return
    count = -(-length // (1 << log2))
    assert (count <= most).all() and (count[log2 > first] >= most // 2).all() and log2[0] == first
    assert torch.equal(log2[1:] > log2[:-1], length[1:] == turn[:-1]) and (log2[1:] - log2[:-1] <= 1).all()
    # A tree that reaches `turn` has spans of both sizes below the committed length.
    both = count + -(-length // (2 << log2))
    for capacity in (1, 7, 1024, 1025, 4096, 4097, 5000, size):
        reached = length[:capacity] + 64 > turn[:capacity]
        needed = torch.where(reached & (turn[:capacity] < capacity), both[:capacity], count[:capacity]).max()
        assert needed <= spans.most_spans(capacity, first, most, None)
