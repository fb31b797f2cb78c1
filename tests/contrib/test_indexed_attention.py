"""Indexed attention: the choice of slots, and attention to them, against torch.topk and a softmax.

Without a GPU the kernels run in Triton's interpreter, in float32.
"""

import math

import pytest
import torch
from page_tables import pool_of, tables
from places import ON_GPU, places

from spec_compile.contrib.indexed import attention as indexed_attention
from spec_compile.contrib.indexed import choice
from spec_compile.kernels import ops
from spec_compile.kernels.attention import tree_attention
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.ops import visible_slots
from spec_compile.tree import ancestry

PARENTS = [-1, 0, 0, 1, 1, 2, 4]
NODES, SLOTS, LENGTHS = len(PARENTS), 128, [0, 3, 90]


def block(heads=5, size=24, seed=0):
    """An indexer's inputs for three rows: q, k, weights, a cache full of garbage, lengths, visible."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, weights = normal(3, NODES, heads, size), normal(3, NODES, size), normal(3, NODES, heads)
    keys, lengths = normal(3, 1, SLOTS, size), torch.tensor(LENGTHS)
    ancestors, depth = ancestry(torch.tensor([PARENTS] * 3))
    visible = choice.visible_to(lengths[:, None] + depth, lengths, ancestors, keys, 100)
    return q, k, weights, keys, lengths, visible


def path_of(node):
    """The nodes from the root to a node."""
    return [*path_of(PARENTS[node]), node] if node >= 0 else []


@pytest.mark.parametrize("topk", [1, 4, 50, 200])
def test_the_largest_scores_are_those_of_topk(topk):
    scores = torch.randn(2, 3, 61, generator=torch.Generator().manual_seed(1))
    scores[0, 1, 5:] = -math.inf
    chosen = choice.largest(scores, topk)
    for row, column in ((0, 0), (0, 1), (1, 2)):
        kept = [slot for slot in chosen[row, column].tolist() if slot >= 0]
        finite = int((scores[row, column] > -math.inf).sum())
        wanted = scores[row, column].topk(min(topk, finite)).indices.sort().values.tolist()
        assert kept == wanted and chosen[row, column].tolist() == kept + [-1] * (topk - len(kept))


def test_of_equal_scores_the_earlier_slots_are_chosen():
    scores = torch.tensor([[[0.0, 1.0, 0.0, 2.0, 0.0, -math.inf], [-1.0, -math.inf, -1.0, -1.0, 5.0, 0.0]]])
    assert choice.largest(scores, 4).tolist() == [[[0, 1, 2, 3], [0, 2, 4, 5]]]
    assert choice.largest(scores, 3).tolist() == [[[0, 1, 3], [0, 4, 5]]]


@pytest.mark.parametrize("topk", [2, 6, 100])
def test_a_node_chooses_as_the_text_of_its_path(topk):
    """Slots of ancestors stand for the positions that these have in the text."""
    q, k, weights, keys, lengths, visible = block()
    chosen = choice.append_and_choose(q, k, weights, keys.clone(), lengths, visible, topk)
    for row, length in enumerate(LENGTHS):
        for node in range(NODES):
            path = path_of(node)
            text = torch.cat([keys[row, 0, :length], k[row, path]])[None]
            queries = torch.zeros(1, text.shape[1], *q.shape[2:])
            factors = torch.zeros(1, text.shape[1], q.shape[2])
            queries[0, -1], factors[0, -1] = q[row, node], weights[row, node]
            wanted = choice.choose(queries, text, factors, topk)[0, -1].tolist()
            slots = [*range(length), *(length + each for each in path)]
            assert [slots[each] if each >= 0 else -1 for each in wanted] == chosen[row, node].tolist()


@pytest.mark.parametrize("place", places(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("heads, size", [(5, 24), (16, 32)])
def test_the_kernel_of_scores(place, heads, size):
    q, _, weights, keys, _, visible = block(heads=heads, size=size)
    q, keys = q.to(*place), keys.to(*place)
    weights, visible = weights.to(place[0]), visible.to(place[0])
    wanted = choice.index_scores(q, keys[:, 0, : visible.shape[2]], weights, visible)
    torch.testing.assert_close(indexed_attention.scores(q, keys, weights, visible), wanted, rtol=1e-4, atol=1e-3)


def attention(place, topk, heads=4, kv_heads=2, sinks=False, scaled=False):
    """An attention call of a tree that sees `topk` chosen slots, whose block is to be appended."""
    *_, lengths, visible = block()
    generator = torch.Generator().manual_seed(2)
    sizes = (kv_heads, NODES, 24), (kv_heads, NODES, 12), (kv_heads, SLOTS, 24), (kv_heads, SLOTS, 12)
    tensors = [torch.randn(3, *shape, generator=generator).to(*place) for shape in ((heads, NODES, 24), *sizes)]
    scores = torch.randn(visible.shape, generator=generator).masked_fill(~visible, -math.inf)
    ancestors, depth = ancestry(torch.tensor([PARENTS] * 3))
    positions = lengths[:, None] + depth
    chosen = choice.largest(scores, topk)
    rows = (x.to(place[0]) for x in (lengths, ancestors, positions))
    sinks = torch.randn(heads, generator=generator).to(*place) if sinks else None
    call = AttentionCall(*tensors, *rows, sinks, 0.3, None, None, chosen=chosen.to(place[0]))
    if not scaled:
        return call
    kept = [ops.over_scale(cache) for cache in tensors[3:]]
    caches = [ops.stored(values, torch.float8_e4m3fn) for values, _ in kept]
    scales = torch.cat([scale for _, scale in kept], dim=3)
    return call._replace(key_cache=caches[0], value_cache=caches[1], scales=scales)


def copied(call):
    caches = {name: getattr(call, name) for name in ("key_cache", "value_cache", "scales")}
    return call._replace(**{name: None if x is None else x.clone() for name, x in caches.items()})


@pytest.mark.sweep("300-options3-interpreter")
@pytest.mark.parametrize("place", places(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "topk, options",
    [(3, {}), (40, dict(sinks=True)), (300, dict(heads=3, kv_heads=3)), (300, dict(sinks=True, scaled=True))],
)
def test_attention_to_chosen_slots(place, topk, options):
    call = attention(place, topk, **options)
    got = tree_attention.launch(copied(call))
    cpu = {name: x.cpu() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    wanted = torch.ops.spec_compile.tree_attention(**copied(call._replace(**cpu))._asdict())
    tolerance = 2e-2 if place[1] == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.cpu(), wanted, rtol=tolerance, atol=tolerance)


def choice_by_the_kernel(q, k, weights, index_keys, lengths, visible, topk, table=None):
    ops.append(index_keys, k[:, None], lengths, table)
    return choice.largest(indexed_attention.scores(q, index_keys, weights, visible, table), topk)


@pytest.mark.parametrize("place", places(torch.float32, torch.bfloat16))
def test_choices_in_pages(place):
    """The bits of index keys in one piece, by the kernel and in plain PyTorch."""
    q, k, weights, keys, lengths, visible = block()
    table, pages = tables(LENGTHS, NODES, SLOTS // 64)
    pool = pool_of(keys, table, pages)
    for number, page in enumerate(table[2].tolist()):
        assert torch.equal(pool[page], keys[2, :, number * 64 : (number + 1) * 64])
    wanted = choice.append_and_choose(q, k, weights, keys, lengths, visible, 6)
    chosen = choice.append_and_choose(q, k, weights, pool.nan_to_num(), lengths, visible, 6, table)
    assert torch.equal(chosen, wanted)
    inputs = [x.to(*place) for x in (q, k)] + [weights.to(place[0])]
    rest = lengths.to(place[0]), visible.to(place[0]), 6
    caches = keys.to(*place), pool.to(*place)
    wanted = choice_by_the_kernel(*inputs, caches[0], *rest)
    assert torch.equal(choice_by_the_kernel(*inputs, caches[1], *rest, table.to(place[0])), wanted)
    assert torch.equal(caches[1].cpu().nan_to_num(), pool_of(caches[0].cpu(), table, pages).nan_to_num())
    assert choice.visible_to(lengths[:, None], lengths, None, pool, 100, table).shape[2] == 100


@pytest.mark.parametrize("place", places(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("scaled", [False, True])
def test_chosen_slots_in_pages(place, scaled):
    call = attention(place, 40, scaled=scaled)
    call = call._replace(k=None, v=None) if scaled and place[0] == "cpu" else call  # the interpreter rounds otherwise
    table, pages = tables(LENGTHS, NODES, SLOTS // 64)
    names = [name for name in ("key_cache", "value_cache", "scales") if getattr(call, name) is not None]
    pools = {name: pool_of(getattr(call, name).cpu(), table, pages).to(place[0]) for name in names}
    paged = call._replace(table=table.to(place[0]), **pools)
    assert torch.equal(tree_attention.launch(paged), tree_attention.launch(copied(call)))


def test_a_prompt_attends_under_a_mask():
    lengths, nodes = torch.tensor([5]), 70
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, nodes, size, generator=generator) for heads, size in ((4, 24), (2, 24), (2, 12)))
    caches = [torch.randn(1, 2, SLOTS, size, generator=generator) for size in (24, 12)]
    positions = 5 + torch.arange(nodes)[None]
    visible = visible_slots(positions, lengths, None, SLOTS)[0]
    scores = torch.randn(visible.shape, generator=generator).masked_fill(~visible, -math.inf)
    call = AttentionCall(
        q, k, v, *caches, lengths, None, positions, None, 0.3, None, None, chosen=choice.largest(scores, 9)
    )
    wanted = torch.ops.spec_compile.tree_attention(**copied(call)._asdict())
    torch.testing.assert_close(tree_attention.launch(copied(call)), wanted, rtol=1e-4, atol=1e-4)
    table, pages = tables([5], nodes, SLOTS // 64)
    pools = [pool_of(cache, table, pages).nan_to_num() for cache in caches]
    paged = call._replace(key_cache=pools[0], value_cache=pools[1], table=table)
    torch.testing.assert_close(tree_attention.launch(paged), wanted, rtol=1e-4, atol=1e-4)


def test_other_features_are_refused():
    call = attention(("cpu", torch.float32), 3)
    with pytest.raises(ValueError, match="window: expected None with chosen slots, got 5"):
        indexed_attention.launch(call._replace(window=5), call.q)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=ON_GPU)])
def test_bits_do_not_depend_on_the_tree(dtype):
    """A node's choice and attention have the same bits after its path was committed."""
    place, path = ("cuda", dtype), path_of(4)
    q, k, weights, keys, lengths, _ = (x.to(place[0]) for x in block())
    q, k, keys = q.to(dtype), k.to(dtype), keys.to(dtype)
    call = attention(place, 40)
    ancestors, depth = (x.cuda() for x in ancestry(torch.tensor([PARENTS] * 3)))

    def run(nodes, lengths, ancestors, positions, keys, caches):
        visible = choice.visible_to(positions, lengths, ancestors, keys, 0)
        parts = [x[:, nodes] for x in (q, k, weights)]
        chosen = choice.append_and_choose(*parts, keys, lengths, visible, 6)
        heads = {name: getattr(call, name)[:, :, nodes] for name in ("q", "k", "v")}
        rows = dict(lengths=lengths, ancestors=ancestors, positions=positions, chosen=chosen)
        return tree_attention.launch(call._replace(**heads, **rows, key_cache=caches[0], value_cache=caches[1]))

    caches = [call.key_cache, call.value_cache]
    every = list(range(NODES))
    tree = run(every, lengths, ancestors, lengths[:, None] + depth, keys, caches)[:, 4]
    for number, node in enumerate(path):  # one by one, as plain steps
        one = torch.ones(3, 1, dtype=torch.int64, device="cuda")
        at = lengths + number
        step = run([node], at, one, at[:, None], keys, caches)[:, 0]
    assert torch.equal(tree, step)
