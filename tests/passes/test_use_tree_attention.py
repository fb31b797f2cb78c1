"""use_tree_attention: every marker is replaced, and the numbers are those of a forward over each path."""

import pytest
import torch
from toy_graphs import HEADS, KV, MARKER, SIZE, VOCAB, Rewritten, example, new_cache, toy, with_table

from spec_compile.kernels import ops
from spec_compile.kernels.attention import Use
from spec_compile.kernels.attention.backends import sdpa
from spec_compile.passes.use_cache import use_tree_attention
from spec_compile.tree import ancestry

KINDS = {
    "full": [{}],
    "two windows": [dict(window=3), {}, dict(window=5), dict(window=3)],
    "softcap": [dict(softcap=2.0), dict(softcap=2.0, window=4)],
    "sinks": [dict(sinks=True), dict(sinks=True, window=4)],
}


@pytest.mark.parametrize("kind, masks", [("full", 1), ("two windows", 3), ("softcap", 2), ("sinks", 2)])
def test_tree_attention_replaces_every_marker(kind, masks):
    _, graph = toy(*KINDS[kind])
    layers = len(KINDS[kind])
    result = Rewritten(graph, use_tree_attention, attention=Use("sdpa"))
    assert result.count(MARKER) == (layers, 0), str(result)
    assert result.count(sdpa) == (0, layers), str(result)
    assert result.count(ops.tree_mask) == (0, masks), str(result)
    inputs = [n.name for n in result.gm.graph.nodes if n.op == "placeholder"]
    assert inputs[2:] == ["lengths", "ancestors", "cache", "max_kv_len"], str(result)
    assert f"{layers} layers" in result.log.summary and f"{masks} masks" in result.log.summary


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_and_a_chain_equal_the_captured_forward(kind):
    _, graph = toy(*KINDS[kind])
    result = Rewritten(graph, use_tree_attention)
    ids, positions = example(2, 14)
    cache = new_cache(len(KINDS[kind]), 2, 20)
    got = []
    for begin, end in ((0, 5), (5, 6), (6, 14)):
        lengths = torch.full((2,), begin)
        got.append(result.gm(ids[:, begin:end], positions[:, begin:end], lengths, None, with_table(cache), end)[0])
    want = graph.gm(ids, positions)[0]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{m}\n{result}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spare", [0, 7])
def test_tree_attention_equals_a_forward_over_every_path(kind, spare):
    """Rows of different lengths; caches full of garbage where nothing is committed; a max_kv_len larger than needed."""
    _, graph = toy(*KINDS[kind])
    result = Rewritten(graph, use_tree_attention)
    lengths, parents = [3, 9], [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, 3, 4, 0]]
    nodes, max_kv_len = 7, 16 + spare
    texts, trees = torch.randint(0, VOCAB, (2, 9)), torch.randint(0, VOCAB, (2, nodes))
    cache = new_cache(len(KINDS[kind]), 2, 24)
    for row, length in enumerate(lengths):
        own = [slots[row : row + 1] for slots in cache]
        result.gm(
            texts[row : row + 1, :length], torch.arange(length)[None], torch.tensor([0]), None, with_table(own), length
        )
        for slots in own:
            slots[:, :, length:] = 1e4
    before = [slots.clone() for slots in cache]
    ancestors, depth = ancestry(torch.tensor(parents))
    start = torch.tensor(lengths)
    got = result.gm(trees, start[:, None] + depth, start, ancestors, with_table(cache), max_kv_len)[0]
    for row, length in enumerate(lengths):
        for node in range(nodes):
            path = [j for j in range(nodes) if int(ancestors[row, node]) >> j & 1]
            text = torch.cat([texts[row, :length], trees[row, path]])[None]
            want = graph.gm(text, torch.arange(text.shape[1])[None])[0][0, -1]
            torch.testing.assert_close(got[row, node], want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{m}\n{result}")
        for now, then in zip(cache, before):
            assert torch.equal(now[row, :, :length], then[row, :, :length]), "the prefix changed"
            assert not torch.equal(now[row, :, length : length + nodes], then[row, :, length : length + nodes])
            assert torch.equal(now[row, :, length + nodes :], then[row, :, length + nodes :]), "written too far"


@pytest.mark.parametrize("window, softcap, sinks", [(None, None, False), (3, None, False), (None, 2.0, True)])
def test_the_marker_is_plain_attention(window, softcap, sinks):
    """`ops.attention` against a loop over heads and positions."""
    q, k, v = torch.randn(2, HEADS, 6, SIZE), torch.randn(2, KV, 6, SIZE), torch.randn(2, KV, 6, 5)
    sink = torch.randn(HEADS) if sinks else None
    out = ops.attention(q, k, v, sink, 0.3, window, softcap, 0)
    for head in range(HEADS):
        for i in range(6):
            seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
            scores = (k[:, head // (HEADS // KV), seen] @ q[:, head, i, :, None])[..., 0] * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum(1, keepdim=True) + (sink[head].exp() if sinks else 0)
            want = ((weights / total)[:, None] @ v[:, head // (HEADS // KV), seen])[:, 0]
            torch.testing.assert_close(out[:, i, head], want, rtol=1e-4, atol=1e-5)
