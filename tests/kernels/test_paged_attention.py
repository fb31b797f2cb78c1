"""Attention whose rows have pages of a pool has the bits that it has where every row lies in one piece.

Without a GPU the kernels run in Triton's interpreter, in float32; ``pytest -m gpu`` runs the same on a CUDA device.
"""

import math

import pytest
import torch
from attention_cases import FP8, SMALL, Case, bits, chain, paths, random_tree, star
from hypothesis import given, settings
from hypothesis import strategies as st
from page_tables import PAGE, pool_of, tables
from places import GPU, ON_GPU

from spec_compile.kernels import copies, ops
from spec_compile.kernels.attention import backends
from spec_compile.kernels.attention import tree_attention as attention

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # rows that fill up a tile, in NumPy


def in_pages(call, seed=0, scratch=torch.nan):
    """The call with its caches in pages, and what the pools are to hold after the rows hold what they do."""
    width = call.key_cache.shape[2] // PAGE
    table, pages = tables(call.lengths.tolist(), call.q.shape[2], width, seed)
    names = [name for name in ("key_cache", "value_cache", "scales") if getattr(call, name) is not None]

    def pools():
        return {name: pool_of(getattr(call, name).cpu(), table, pages).to(call.q.device) for name in names}

    return call._replace(table=table.to(call.q.device), **pools()), pools


def same(run, call, seed=0):
    """Rows in pages give the bits of rows in one piece, and the same slots are written."""
    paged, pools = in_pages(call, seed)
    want = run(call)
    got = run(paged)
    assert torch.equal(bits(got), bits(want))
    for name, pool in pools().items():
        assert torch.equal(bits(getattr(paged, name)), bits(pool)), name
    return paged


def case_of(place, lengths, nodes, parents=None, **options):
    capacity = PAGE * max(2, math.ceil((max(lengths) + nodes) / PAGE))
    return Case(place, lengths, nodes, parents, capacity=capacity, **options)


EDGES = [0, 47, 61, 63, 64, 129]
CONFIGS = {
    "spans": SMALL,
    "all spans": SMALL._replace(whole=True, most=4),
    "chunks of 32": SMALL._replace(block_n=32, most=4),
    "chunks of 64": SMALL._replace(block_n=64, least=64, most=4),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_trees_that_cross_the_end_of_a_page(place, config):
    case = case_of(place, EDGES, 5, random_tree(5), heads=(1, 1))
    same(lambda call: attention.launch(call, config), case.inputs())


OPTIONS = [
    dict(window=20, sinks=True, rotary=True),
    dict(window=70, heads=(4, 2)),
    dict(softcap=2.0, slopes=torch.float32, heads=(6, 2)),
    dict(heads=(3, 1), sizes=(24, 40), rotary=True, norms=True),
    dict(kept=FP8, heads=(4, 2), sizes=(32, 16)),
]
NAMES = ["window, sinks", "wide window", "softcap, slopes", "odd sizes", "8 bits"]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("nodes, shape", [(1, chain), (5, star), (66, None)])
def test_trees_and_chunks(place, nodes, shape, options):
    """A chunk of 66 tokens reaches over two ends of pages."""
    lengths = [3, 127] if nodes < 66 else [63]
    case = case_of(place, lengths, nodes, shape and shape(nodes), causal=shape is None, **options)
    same(lambda call: attention.launch(call, SMALL), case.inputs())
    if nodes == 7:
        same(lambda call: attention.launch(call, CONFIGS["all spans"]), case.inputs())


@pytest.mark.parametrize("nodes", [9, 80])
def test_scales(place, nodes):
    if not GPU:
        place = "cpu", torch.float32
    case = case_of(place, [60, 5] if nodes < 64 else [60], nodes, heads=(4, 2), sizes=(32, 16), causal=nodes > 64)
    call = case.inputs()
    scales = torch.rand(*call.key_cache.shape[:3], 2, device=call.q.device)
    caches = {name: getattr(call, name).nan_to_num().to(FP8) for name in ("key_cache", "value_cache")}
    call = call._replace(k=None, v=None, scales=scales, **caches)
    same(lambda call: attention.launch(call, SMALL), call)
    if place[0] == "cpu":
        same_close(lambda call: attention.tree_attention(*call), call)


@pytest.mark.parametrize("nodes", [5, 80])
def test_shared_pages(place, nodes):
    """Rows that share their first pages see the same keys there; nothing is written to these."""
    case = case_of(place, [140, 130], nodes, causal=True, heads=(4, 2))
    for caches in (case.caches, case.clean):
        for cache in caches:
            cache[1, :, :128] = cache[0, :, :128]
    call = case.inputs()
    paged, _ = in_pages(call)
    paged.table[1, :2] = paged.table[0, :2]
    before = paged.key_cache.clone()
    assert torch.equal(bits(attention.launch(paged, SMALL)), bits(attention.launch(call, SMALL)))
    shared = paged.table[0, :2].long()
    assert torch.equal(bits(paged.key_cache[shared]), bits(before[shared]))


def test_rows_without_pages_write_to_the_scratch_page(place):
    """Idle rows lie in page 0 with all that they write; rows with pages keep their bits."""
    case = case_of(place, [70, 66, 0], 7, random_tree(7))
    call = case.inputs()
    want = attention.launch(call, SMALL)
    paged, pools = in_pages(call)
    pools = pools()
    paged.table[1:] = 0
    owned = paged.table[0, :2].long()
    before = paged.key_cache.clone()
    paged.key_cache[0], paged.value_cache[0] = 0, 0
    got = attention.launch(paged, SMALL)
    assert torch.equal(bits(got[0]), bits(want[0]))
    others = [page for page in range(1, len(before)) if page not in owned.tolist()]
    assert torch.equal(bits(paged.key_cache[owned]), bits(pools["key_cache"][owned]))
    assert torch.equal(bits(paged.key_cache[others]), bits(before[others]))


@pytest.mark.parametrize(
    "run", [lambda call: attention.launch(call, SMALL), lambda call: attention.tree_attention(*call)]
)
@pytest.mark.parametrize("lengths", [[10, 0], [10, 60]])
def test_nan_in_the_scratch_page_does_not_spread(place, run, lengths):
    """Row 0 has a page for 54 of 70 tokens, and row 1 has none: it writes NaN where 16 tokens of row 0 lie."""
    call = clean_inputs(case_of(place, lengths, 70, causal=True, heads=(4, 2)))
    want = run(call._replace(**{name: getattr(call, name).clone() for name in ("key_cache", "value_cache")}))
    paged, _ = in_pages(call, scratch=0.0)
    for pool in (paged.key_cache, paged.value_cache):
        pool.nan_to_num_(0.0)
        pool[0] = torch.nan
    paged.table[0, 1:], paged.table[1] = 0, 0
    paged.k[1], paged.v[1] = torch.nan, torch.nan
    torch.testing.assert_close(run(paged)[0, :54], want[0, :54], atol=2e-2 if GPU else 1e-5, rtol=1e-3)


def test_a_chunk_ends_with_the_row(place):
    """What lies behind the last slot of a row's table is not kept."""
    case = Case(place, [100, 30], 70, causal=True, capacity=192)
    call = case.inputs()
    cut = {name: getattr(call, name)[:, :, :128].contiguous() for name in ("key_cache", "value_cache")}
    call = call._replace(**cut)
    paged, pools = in_pages(call._replace(lengths=call.lengths.clamp(max=128 - 70)))
    paged = paged._replace(lengths=call.lengths)
    got, want = attention.launch(paged, SMALL), attention.launch(call, SMALL)
    assert torch.equal(bits(got[0, :28]), bits(want[0, :28])) and torch.equal(bits(got[1]), bits(want[1]))
    for name, pool in pools().items():
        assert torch.equal(bits(getattr(paged, name)), bits(pool))


def test_pages_that_cut_chunks_are_refused(place):
    call = Case(place, [5], 3, capacity=96).inputs()
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=place[0])
    with pytest.raises(ValueError, match="table: expected pages of a multiple of 64 slots, got pages of 96"):
        attention.launch(call._replace(table=table), SMALL)


@settings(max_examples=30 if GPU else 4)
@given(data=st.data())
def test_anything(place, data):
    torch.manual_seed(seed := data.draw(st.integers(0, 1000)))
    causal = data.draw(st.booleans())
    nodes = data.draw(st.integers(1, (150 if causal else 64) if GPU else (80 if causal else 12)))
    parents = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, nodes))]
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))
    options = {
        "heads": data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2)])),
        "window": data.draw(st.sampled_from([None, 3, 40])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sinks": data.draw(st.booleans()),
        "rotary": data.draw(st.booleans()),
    }
    config = SMALL._replace(block_n=data.draw(st.sampled_from([16, 64])), least=64, whole=data.draw(st.booleans()))
    case = case_of(place, lengths, nodes, parents, causal=causal, **options)
    same(lambda call: attention.launch(call, config), case.inputs(), seed)


# The other backends, and the plain meaning.


def clean_inputs(case):
    """The call with zeros in place of NaN: plain PyTorch multiplies unseen slots by 0."""
    case.caches = [cache.clone() for cache in case.clean]
    return case.inputs()


def same_close(run, call):
    """As `same`, but for the order of sums: kernels that read all slots may have another for another layout."""
    paged, _ = in_pages(call)
    for pool in (paged.key_cache, paged.value_cache, paged.scales):
        if pool is not None:
            pool.copy_(pool.float().nan_to_num(0.0).to(pool.dtype))
    want, got = run(call), run(paged)
    torch.testing.assert_close(got, want, atol=2e-2 if call.q.is_cuda else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, dict(window=20, softcap=3.0, sinks=True)])
@pytest.mark.parametrize("run", [backends.sdpa, attention.tree_attention], ids=["sdpa", "plain"])
def test_plain_backends(place, run, options):
    case = case_of(place, [70, 3], 9, random_tree(9), heads=(4, 2), **options)
    same_close(lambda call: run(*call), clean_inputs(case))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("nodes", [1, 9])
def test_flashinfer(flashinfer, captured, nodes):
    place = ("cuda" if GPU else "cpu"), torch.bfloat16
    case = case_of(place, [70, 3], nodes, random_tree(nodes), heads=(4, 2), sizes=(64, 64))
    op = torch.ops.spec_compile.flashinfer_tree_attention if captured else torch.ops.spec_compile.flashinfer_attention
    same_close(lambda call: op(*call), clean_inputs(case))


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=ON_GPU) for x in (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    "lengths, nodes, options",
    [([3000, 7], nodes, dict(rotary=True)) for nodes in (1, 16, 64)]
    + [([1500], nodes, dict(window=512, sinks=True)) for nodes in (1, 16)]
    + [([700], 512, dict(causal=True)), ([700], 300, dict(causal=True, window=128, kept=FP8))],
)
def test_own_tuning(dtype, lengths, nodes, options):
    tree = None if "causal" in options else random_tree(nodes)
    case = case_of(("cuda", dtype), lengths, nodes, tree, heads=(32, 8), sizes=(128, 128), **options)
    same(lambda call: attention.launch(call), case.inputs())


@pytest.mark.parametrize("nodes", [1, 2, 7, 64])
def test_an_accepted_path_moves_into_place(place, nodes):
    """In caches of any dtypes and heads, from page to page."""
    device, dtype = place
    lengths = torch.tensor([0, 60, 64, 127, 100])
    path, count = paths(5, nodes)
    table, pages = tables(lengths.tolist(), nodes, 3)
    rows = [torch.randn(5, heads, 192, size).to(dtype) for heads, size in ((2, 16), (1, 192), (3, 80))]
    rows += [torch.randn(5, 2, 192, 16).to(FP8)] if dtype == torch.float32 else []
    for group in [rows[:3], rows[3:]]:
        pools = [pool_of(cache, table, pages).to(device) for cache in group]
        twins = [pool.cpu().clone() for pool in pools]
        copies.launch(pools, lengths.to(device), path.to(device), count.to(device), table.to(device))
        torch.ops.spec_compile.compact(twins, lengths, path, count, table)
        torch.ops.spec_compile.compact(group, lengths, path, count)
        for pool, twin, cache in zip(pools, twins, group):
            assert torch.equal(bits(pool), bits(pool_of(cache, table, pages)))
            assert torch.equal(bits(twin), bits(pool))


def test_rows_are_read_through_their_table():
    call, _ = in_pages(clean_inputs(case_of(("cpu", torch.float32), [70, 3], 5, heads=(4, 2))))
    rows = ops.first_slots(call.key_cache, 70, call.table)
    assert torch.equal(rows[0, :, 64:], call.key_cache[int(call.table[0, 1]), :, :6])
