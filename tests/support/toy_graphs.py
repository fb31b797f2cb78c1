"""Toy models as graphs, and graphs of tiny models in 16 bits that passes take for ones on a GPU."""

import functools
from dataclasses import replace

import models
import pytest
import torch
from captures import capture
from torch import fx, nn
from torch.nn import functional as F

from spec_compile import passes
from spec_compile.graph import LayerSpec, ModelGraph, calls
from spec_compile.kernels import ops
from spec_compile.kernels.attention import Use
from spec_compile.kernels.linear.cpu_products import CPU_PRODUCTS, entries, products_of
from spec_compile.passes import Settings

aten = torch.ops.aten
VOCAB, HIDDEN, HEADS, KV, SIZE = 32, 16, 4, 2, 4
LINEAR, MARKER = aten.linear.default, torch.ops.spec_compile.attention.default


class Block(nn.Module):
    """Attention and a gated MLP, with what `spec_compile::attention` can be asked for."""

    def __init__(self, number, window=None, softcap=None, sinks=False, bias=False):
        super().__init__()
        self.number, self.window, self.softcap = number, window, softcap
        self.q = nn.Linear(HIDDEN, HEADS * SIZE, bias=bias)
        self.k = nn.Linear(HIDDEN, KV * SIZE, bias=bias)
        self.v = nn.Linear(HIDDEN, KV * SIZE, bias=bias)
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 24, bias=False), nn.Linear(HIDDEN, 24, bias=False)
        self.down = nn.Linear(24, HIDDEN, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None

    def forward(self, x):
        split = [f(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        x = x + self.o(ops.attention(*split, self.sinks, 0.5, self.window, self.softcap, self.number).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Toy(nn.Module):
    """A causal LM of `Block`s with learned positions; `layers`: the keywords of each."""

    def __init__(self, *layers):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Block(i, **kwargs) for i, kwargs in enumerate(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def states(self, ids, positions):
        x = self.embed(ids) + self.places(positions)
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.head(self.norm(x)), states

    def forward(self, ids, positions):
        return self.states(ids, positions)[0]


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)


def trace(model, *inputs, dynamic=False, head="model.head.weight") -> ModelGraph:
    """A toy module's `ModelGraph`, as `capture` would make it."""
    dims = ({0: torch.export.Dim("B", min=1), 1: torch.export.Dim("T", min=2)},) * len(inputs) if dynamic else None
    with torch.no_grad():
        program = torch.export.export(Wrapper(model), inputs, dynamic_shapes=(dims,) if dynamic else None, strict=False)
    gm = program.module(check_guards=False)
    gm.graph._codegen = fx.graph.CodeGen()
    layers = [
        LayerSpec(HEADS, KV, SIZE, SIZE, block.scale, block.window, block.softcap, block.sinks)
        for block in map(_asked, calls(gm, MARKER))
    ]
    return ModelGraph(fx.GraphModule(gm, gm.graph), tuple(layers), VOCAB, HIDDEN, torch.float32, None, head)


def _asked(node):
    return type("Asked", (), dict(zip(("sinks", "scale", "window", "softcap"), node.args[3:7])))


def toy(*layers):
    model = Toy(*layers).eval()
    ids, positions = example(2, 7)
    return model, trace(model, ids, positions, dynamic=True)


def example(batch, length):
    return torch.randint(0, VOCAB, (batch, length)), torch.arange(length).expand(batch, -1)


class Rewritten:
    """One pass applied: the graphs before and after, their operator counts, and both as text for a failure."""

    def __init__(self, graph, rewrite, **settings):
        self.before, self.after = graph, passes.run(graph, Settings(**settings), [rewrite])
        self.gm, self.log = self.after.gm, self.after.log[0]

    def count(self, target):
        """How often `target` is called (before, after)."""
        return len(calls(self.before.gm, target)), len(calls(self.gm, target))

    def __str__(self):
        texts = (graph.gm.print_readable(print_output=False) for graph in (self.before, self.after))
        return "{}\nbefore: {}\nafter: {}".format(self.log.summary, *texts)

    def same(self, *inputs):
        """Both graphs give bitwise the same."""
        for a, b in zip(self.before.gm(*inputs), self.gm(*inputs), strict=True):
            assert torch.equal(a, b), str(self)

    def close(self, *inputs, tolerance=1e-5):
        for a, b in zip(self.before.gm(*inputs), self.gm(*inputs), strict=True):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, msg=lambda m: f"{m}\n{self}")


PREFILL = Use(role="prefill")


def new_cache(layers, batch, slots):
    return [torch.zeros(batch, KV, slots, SIZE) for _ in range(2 * layers)]


def with_table(cache):
    """The input ``cache`` of a graph, of which each row has one page."""
    return [*cache, torch.arange(len(cache[0]), dtype=torch.int32, device=cache[0].device)[:, None]]


@functools.cache
def captured_in_half(name):
    return capture(models.ADMITTED[name]().to(torch.bfloat16))


@pytest.fixture
def half_on_gpu(monkeypatch):
    """A function: name of a tiny model -> its graph in bfloat16, which passes take for one on a GPU."""
    for module in ("attention.tree_attention", "norms", "row_scan", "linear.float32", "experts.route"):
        pytest.importorskip(f"spec_compile.kernels.{module}", exc_type=ImportError)
    monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
    return lambda name: captured_in_half(name).copy()


def rewritten(graph, without=(), **settings):
    return passes.run(graph, Settings(**settings), [step for step in passes.PIPELINE if step not in without])


def prefix_then_chunk(function, graph):
    """Outputs and caches after a prefix of tokens and then a chunk."""
    ids = torch.randint(3, graph.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    steps, lengths = torch.arange(19).expand(2, -1), torch.zeros(2, dtype=torch.int64)
    cache = [
        torch.zeros(2, layer.kv_heads, 32, size, dtype=graph.dtype)
        for layer in graph.layers
        for size in (layer.key_dim, layer.value_dim)
    ]
    with torch.no_grad():
        held = with_table(cache)
        function(ids[:, :12], steps[:, :12], lengths, None, held, 32)
        return [*function(ids[:, 12:], steps[:, 12:], lengths + 12, None, held, 32), *cache]


def add_to_eps(gm, more):
    """Add to the eps of all norms but the first."""
    is_first = True
    for node in calls(gm):
        if node.target == torch.ops.aten.rsqrt.default:
            node.args[0].update_arg(1, node.args[0].args[1] + more * (not is_first))
            is_first = False
        elif node.target == CPU_PRODUCTS:
            texts = []
            for product in products_of(*node.args):
                norm = product.before
                if norm is not None:
                    norm, is_first = norm._replace(eps=norm.eps + more * (not is_first)), False
                texts.append(entries(replace(product, before=norm))[1])
            node.update_arg(3, "".join(texts))
    gm.recompile()
