"""Attention on a CPU by the kernel in C++: its plain meaning, and the same bits whatever is drafted."""

import functools
import itertools

import pytest
import torch
from attention_cases import Case, bits, chain, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from spec_compile.cache import PAGE
from spec_compile.graph import LayerSpec
from spec_compile.kernels.attention import Use, cpu_attention
from spec_compile.kernels.attention.backends import sdpa
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.attention.cpu_attention import BACKEND, BEST, LEVELS, attend
from spec_compile.kernels.launching import plain_kernels
from spec_compile.tree import ancestry

pytestmark = pytest.mark.skipif(BEST is None, reason="needs the package built")
DTYPES = torch.float32, torch.bfloat16
OP = functools.partial(torch.ops.spec_compile.cpu_attention.default, scales=None)
CPU = torch.device("cpu")
EVERY_LEVEL = pytest.mark.parametrize("level", range((BEST or 0) + 1), ids=lambda level: LEVELS[level])
LENGTHS = 0, 1, 5, 63, 64, 65, 127, 130, 500, 512, 530, 1030


def arguments(case):
    """Those of the op that have no default."""
    return case.inputs()[:12]


@EVERY_LEVEL
@settings(max_examples=25)
@given(data=st.data())
def test_it_means_the_plain_attention(level, data):
    draw = functools.partial(lambda *options: data.draw(st.sampled_from(options)))
    causal, group, kv_heads = draw(False, True), draw(1, 2, 3, 7, 9), draw(1, 2, 3)
    nodes = draw(1, 5, 64, 130) if causal else draw(1, 2, 7, 33, 64)
    sizes = draw((16, 16), (64, 64), (80, 80), (24, 40), (128, 128), (7, 5), (192, 128))
    case = Case(
        ("cpu", draw(*DTYPES)), data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3)), nodes,
        None if causal else random_tree(nodes), (kv_heads * group, kv_heads), sizes, causal=causal,
        window=draw(None, 5, 20, 100), softcap=draw(None, 3.0), sinks=draw(False, True),
        rotary=sizes[0] % 2 == 0 and draw(False, True),
    )  # fmt: skip
    call = case.inputs()
    case.compare(attend(call, level), call[3:5])


def in_pages(call, unused=5, fill=torch.nan):
    """The same call with its caches in pages in any order, among pages full of `fill` that no row has."""
    batch, _, slots, _ = call.key_cache.shape
    columns = max(2, -(-slots // PAGE))
    table = torch.randperm(batch * columns + unused)[: batch * columns].view(batch, columns)
    pools = {}
    for name in ("key_cache", "value_cache"):
        rows = F.pad(getattr(call, name), (0, 0, 0, columns * PAGE - slots), value=fill)
        pools[name] = rows.new_full((batch * columns + unused, rows.shape[1], PAGE, rows.shape[3]), fill)
        pools[name][table] = rows.unflatten(2, (columns, PAGE)).transpose(1, 2)
    return call._replace(**pools, table=table.int())


def as_rows(pool, table, slots):
    """The first slots [B, Hkv, slots, D] of the rows of a table."""
    return pool[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :slots]


@EVERY_LEVEL
@settings(max_examples=25)
@given(data=st.data())
def test_pages_change_no_bit(level, data):
    draw = functools.partial(lambda *options: data.draw(st.sampled_from(options)))
    causal, group, kv_heads, threads = draw(False, True), draw(1, 3, 9), draw(1, 3), draw(1, 2)
    nodes = draw(1, 5, 64, 130, 200) if causal else draw(1, 2, 7, 64)
    case = Case(
        ("cpu", draw(*DTYPES)), data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3)), nodes,
        None if causal else random_tree(nodes), (kv_heads * group, kv_heads), draw((16, 16), (24, 40), (7, 5)),
        causal=causal, window=draw(None, 5, 100), sinks=draw(False, True),
    )  # fmt: skip
    whole = case.inputs()
    parts = in_pages(whole)
    before = parts.key_cache.clone(), parts.value_cache.clone()
    torch.set_num_threads(threads)
    try:
        out, want = attend(parts, level), attend(whole, level)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(bits(out), bits(want))
    for pool, rows, old in zip(parts[3:5], whole[3:5], before):
        assert torch.equal(bits(as_rows(pool, parts.table, rows.shape[2])), bits(rows))
        written = bits(pool).ne(bits(old)).flatten(1).any(1).nonzero().flatten()
        assert set(written.tolist()) <= set(parts.table.flatten().tolist())


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_share_pages(level, dtype):
    """Two rows whose first 128 tokens lie in the same pages, and an idle one between them whose pages are scratch."""
    pools = [torch.randn(7, 2, PAGE, 24).to(dtype) for _ in range(2)]
    table = torch.tensor([[4, 2, 6, 0], [0, 0, 0, 0], [4, 2, 1, 5]], dtype=torch.int32)
    lengths, nodes = torch.tensor([130, 90, 189]), 5
    q, k, v = (torch.randn(3, heads, nodes, 24).to(dtype) for heads in (6, 2, 2))
    ancestors, depth = ancestry(torch.tensor([random_tree(nodes)] * 3))
    call = AttentionCall(q, k, v, *pools, lengths, ancestors, lengths[:, None] + depth, None, 0.3, None, None)
    caches = [as_rows(pool, table, 256).contiguous() for pool in pools]
    want = attend(call._replace(key_cache=caches[0], value_cache=caches[1]), level)
    before = [pool[[2, 3, 4]] for pool in pools]
    out = attend(call._replace(table=table), level)
    assert torch.equal(bits(out[::2]), bits(want[::2]))
    for pool, rows, old in zip(pools, caches, before):
        assert torch.equal(bits(as_rows(pool, table, 192)[::2]), bits(rows[::2, :, :192]))
        assert torch.equal(bits(pool[[2, 3, 4]]), bits(old))


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_a_prompt_as_rows(level, dtype):
    """Rows with the same pages: each has one token more than the one before it, which it sees."""
    length, count = 61, 9
    q, k, v = (torch.randn(1, heads, count, 16).to(dtype) for heads in (4, 2, 2))
    caches = [torch.randn(1, 2, 192, 16).to(dtype) for _ in range(2)]
    chunk = step(caches, length, q, k, v)
    parts = in_pages(chunk.args[0])
    want = chunk(level)
    lengths = length + torch.arange(count)
    rows = parts._replace(
        **{name: getattr(parts, name)[0].transpose(0, 1)[:, :, None] for name in ("q", "k", "v")}, lengths=lengths,
        positions=lengths[:, None], table=parts.table.expand(count, -1),
    )  # fmt: skip
    assert torch.equal(bits(attend(rows, level)[:, 0]), bits(want[0]))


def step(caches, length, q, k, v, parents=None, window=None):
    """The output of a block at `length` committed slots; no parents: of a causal chunk."""
    nodes, lengths = q.shape[2], torch.tensor([length])
    ancestors, depth = (None, torch.arange(nodes)) if parents is None else ancestry(torch.tensor([parents]))
    call = AttentionCall(q, k, v, *caches, lengths, ancestors, lengths[:, None] + depth, None, 0.3, None, window)
    return functools.partial(attend, call)


def path_to(node, parents):
    return [*path_to(parents[node], parents), node] if node >= 0 else []


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_a_node_has_the_bits_of_a_plain_step(level, dtype, window):
    """For every length around the bounds of blocks and spans: a node of a tree, and the same tokens one by one."""
    nodes, parents = 9, [-1, 0, 0, 1, 2, 3, 3, 5, 6]
    for length in (0, 61, 63, 64, 507, 511, 512):
        q, k, v = (torch.randn(1, heads, nodes, 24).to(dtype) for heads in (6, 2, 2))
        before = [torch.zeros(1, 2, 640, 24, dtype=dtype) for _ in range(2)]
        for cache in before:
            cache[:, :, :length] = torch.randn(1, 2, length, 24)
        tree = step([cache.clone() for cache in before], length, q, k, v, parents, window)(level)
        path, caches = path_to(8, parents), [cache.clone() for cache in before]
        for place, node in enumerate(path):
            one = [x[:, :, node : node + 1] for x in (q, k, v)]
            plain = step(caches, length + place, *one, [-1], window)(level)
            assert torch.equal(bits(plain[0, 0]), bits(tree[0, node])), (length, node)


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_batches_and_threads_change_no_bit(level, dtype):
    """A prompt of 600 tokens whole (by rows), in chunks (by spans), among other rows, and by two threads."""
    q, k, v = (torch.randn(1, heads, 600, 16).to(dtype) for heads in (4, 2, 2))
    caches = [torch.zeros(1, 2, 640, 16, dtype=dtype) for _ in range(2)]
    whole = step([cache.clone() for cache in caches], 0, q, k, v)(level)
    for begin, end in itertools.pairwise((0, 70, 134, 470, 500, 600)):
        part = step(caches, begin, *(x[:, :, begin:end] for x in (q, k, v)))(level)
        assert torch.equal(bits(part), bits(whole[:, begin:end])), begin
    two = [x.repeat(2, 1, 1, 1) for x in (q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], *caches)]
    lengths, ancestors = torch.tensor([599, 70]), torch.ones(2, 1, dtype=torch.int64)
    call = AttentionCall(*two, lengths, ancestors, lengths[:, None], None, 0.3, None, None)
    both = attend(call, level)
    assert torch.equal(bits(both[0, 0]), bits(whole[0, -1]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(bits(attend(call, level)), bits(both))
        again = step([torch.zeros_like(cache) for cache in caches], 0, q, k, v)(level)
        assert torch.equal(bits(again), bits(whole))
    finally:
        torch.set_num_threads(1)


def test_nan_is_not_hidden():
    case = Case(("cpu", torch.float32), [70], 3, chain(3))
    inputs = arguments(case)
    inputs[0][0, 0, 1] = torch.nan
    out = attend(AttentionCall(*inputs))
    assert out[0, 1, 0].isnan().all() and not out[0, 2].isnan().any() and not out[0, 1, 1].isnan().any()


def test_the_op_compiles_and_writes_the_caches():
    case = Case(("cpu", torch.bfloat16), [70], 3, chain(3))
    first, second = arguments(case), arguments(case)
    first = first[:3] + tuple(cache.clone() for cache in first[3:5]) + first[5:]
    want = OP(*first)
    got = torch.compile(lambda *inputs: OP(*inputs) * 2, fullgraph=True, backend="aot_eager")(*second)
    assert torch.equal(got, want * 2) and all(map(torch.equal, map(bits, first[3:5]), map(bits, second[3:5])))


def test_plain_kernels_run_the_plain_meaning(monkeypatch):
    case = Case(("cpu", torch.float32), [70], 3, chain(3))
    case.caches = [cache.clone() for cache in case.clean]  # the plain meaning multiplies unseen slots by 0
    want = OP(*arguments(case))
    monkeypatch.setattr(cpu_attention, "attend", None)
    with plain_kernels():
        got, parts = OP(*arguments(case)), OP(**in_pages(case.inputs(), fill=0.0)._asdict())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, sdpa(*arguments(case)))


def test_what_the_kernel_lacks():
    """Biases, chunks of positions, indexers and other dtypes keep plain PyTorch."""
    usual = dict(heads=2, kv_heads=2, key_dim=8, value_dim=8, scale=1.0, window=None, softcap=None, sinks=False)
    for lack, more in (("ALiBi", dict(slopes=True)), ("chunks of pos", dict(chunk=8)), ("indexer", dict(indexed=True))):
        assert lack in BACKEND.why_not(LayerSpec(**usual, **more), torch.float32, Use(captured=False), CPU)
    assert BACKEND.why_not(LayerSpec(**usual), torch.float16, Use(captured=False), CPU) == "float16"
    assert BACKEND.why_not(LayerSpec(**usual), torch.bfloat16, Use(captured=False), CPU) is None
