"""use_indexes: every marker of an indexer is replaced, and the numbers are those of a forward over each path."""

from dataclasses import replace

import torch
from torch import nn
from toy_graphs import HEADS, HIDDEN, KV, SIZE, VOCAB, Block, Toy, example, trace

from spec_compile import passes
from spec_compile.cache import Cache
from spec_compile.capture.checks import linear_logits, tree_logits
from spec_compile.contrib.indexed import choice
from spec_compile.contrib.indexed.capture import describe
from spec_compile.contrib.indexed.choice import use_indexes
from spec_compile.graph import calls
from spec_compile.kernels import ops
from spec_compile.passes import Settings
from spec_compile.tree import ancestry

TOPK, INDEX_HEADS, INDEX_SIZE = 4, 3, 6


class IndexedBlock(Block):
    """A block whose attention sees chosen tokens. shares: it takes the choice of the block before it."""

    def __init__(self, number, shares=False):
        super().__init__(number)
        self.shares = shares
        sizes = INDEX_HEADS * INDEX_SIZE, INDEX_SIZE, INDEX_HEADS
        self.index_q, self.index_k, self.index_weights = (nn.Linear(HIDDEN, size) for size in sizes)

    def forward(self, given):
        x, chosen = given if isinstance(given, tuple) else (given, None)
        if not self.shares:
            q = self.index_q(x).unflatten(2, (INDEX_HEADS, INDEX_SIZE))
            chosen = choice.choose(q, self.index_k(x), self.index_weights(x).float(), TOPK)
        split = [f(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        out = ops.attention(*split, None, 0.5, None, None, self.number, chosen=chosen)
        x = x + self.o(out.flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x)), chosen


class IndexedToy(Toy):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(IndexedBlock(number, shares=number == 1) for number in range(3))

    def forward(self, ids, positions):
        x = self.embed(ids) + self.places(positions), None
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[0]))


def captured():
    """A graph of three layers and two indexers."""
    torch.manual_seed(0)
    graph = trace(IndexedToy().eval(), *example(2, 7), dynamic=True)
    graph.indexes = describe(graph.gm)
    graph.layers = tuple(replace(layer, indexed=True) for layer in graph.layers)
    return graph


def test_markers_are_replaced_and_caches_added():
    before = captured()
    graph = passes.run(before, Settings())
    assert len(calls(before.gm, choice.MARKER)) == 2 and not calls(graph.gm, choice.MARKER)
    assert len(calls(graph.gm, choice.CHOOSE)) == 2 and len(calls(graph.gm, choice.visible_to)) == 1
    (report,) = (report for report in graph.log if report.name == use_indexes.__name__)
    assert report.summary.startswith("2 indexers choose 4 tokens")

    cache = Cache(graph, batch=2, slots=128)
    sizes = [tuple(tensor.shape) for tensor in cache.tensors]
    assert sizes == [(2, KV, 128, SIZE)] * 6 + [(2, 1, 128, INDEX_SIZE)] * 2 and HEADS > KV
    assert sum(tensor.nbytes for tensor in cache.tensors) == 2 * 128 * graph.token_bytes


def test_a_tree_equals_a_forward_over_every_path():
    before = captured()
    graph = passes.run(before, Settings())
    ids = torch.randint(0, VOCAB, (1, 27), generator=torch.Generator().manual_seed(1))
    ancestors, depth = ancestry(torch.tensor([[-1, 0, 0, 1, 1, 2, 4]]))
    for prefix in (2, 20):  # fewer tokens than are chosen, and more

        def run(texts):
            return before.gm(texts, torch.arange(texts.shape[1]).expand_as(texts))[0]

        text = ids[:, : prefix + 7]
        got = tree_logits((graph, graph), graph, text, prefix, ancestors, depth, [])
        wanted = linear_logits(run, text, prefix, ancestors[0].tolist())
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
