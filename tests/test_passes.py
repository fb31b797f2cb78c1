"""Every pass on toy graphs of its own: what it rewrites, what it leaves, and that the numbers stay."""

import copy
import dataclasses
import functools
from collections import Counter

import models
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from spec_compile import kernels, passes
from spec_compile.capture.trace import capture
from spec_compile.graph import LayerSpec, ModelGraph, attribute, calls
from spec_compile.kernels import all_reduce, linear, ops
from spec_compile.kernels.attention import Use, attention_calls, sdpa
from spec_compile.kernels.linear import avx512, transposed
from spec_compile.kernels.linear.transposed import transposed_linear
from spec_compile.passes import Settings
from spec_compile.passes.apply import check_order
from spec_compile.passes.fuse_append import fuse_append
from spec_compile.passes.fuse_norms import fuse_norms
from spec_compile.passes.fuse_qk_norms import fuse_qk_norms
from spec_compile.passes.fuse_residuals import fuse_residuals
from spec_compile.passes.fuse_rotary import fuse_rotary
from spec_compile.passes.merge_linears import merge_linears
from spec_compile.passes.row_invariance import variant_parts
from spec_compile.passes.select_logits import select_logits
from spec_compile.passes.tap_hidden_states import tap_hidden_states
from spec_compile.passes.tidy import tidy
from spec_compile.passes.use_small_m_linears import use_small_m_linears
from spec_compile.passes.use_tree_attention import use_tree_attention
from spec_compile.runtime.steps.regions import cut
from spec_compile.tree import ancestry

aten = torch.ops.aten
VOCAB, HIDDEN, HEADS, KV, SIZE = 32, 16, 4, 2, 4
needs_avx512 = pytest.mark.skipif(not avx512.SUPPORTED, reason="needs a CPU with AVX-512, and the package built")
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


# --- the runner


def test_the_pipeline_reports_each_pass_and_leaves_the_captured_graph_alone():
    _, graph = toy({}, {})
    before = graph.gm.print_readable(print_output=False)
    result = passes.run(graph, Settings(), keep_code=True)
    assert graph.gm.print_readable(print_output=False) == before
    assert graph.log == []
    assert [report.name for report in result.log] == [rewrite.__name__ for rewrite in passes.PIPELINE]
    assert result.log[0].nodes_before == len(calls(graph.gm))
    for report, following in zip(result.log, result.log[1:]):
        assert report.nodes_after == following.nodes_before
    assert result.log[-1].nodes_after == len(calls(result.gm))
    assert all(report.summary and "def forward" in report.code for report in result.log)


def test_a_pass_before_one_that_it_relies_on_is_refused():
    check_order(passes.PIPELINE)
    with pytest.raises(ValueError, match="pipeline: merge_linears has to come after tidy"):
        check_order([merge_linears, tidy])
    with pytest.raises(ValueError, match="fuse_qk_norms has to come after fuse_rotary"):
        check_order([rewrite for rewrite in passes.PIPELINE if rewrite is not fuse_rotary])


# --- tidy


class Casts(nn.Module):
    def __init__(self, *steps):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x * 2


@pytest.mark.parametrize(
    "name, step, target, left",
    [
        ("same dtype", lambda x: x.to(torch.float32), aten.to.dtype, 0),
        ("same device", lambda x: x.to("cpu", torch.float32), aten.to.device, 0),
        ("float() of a float", lambda x: x.float(), aten.to.dtype, 0),
        ("to half and back", lambda x: x.half().float(), aten.to.dtype, 2),
        ("to double", lambda x: x.double(), aten.to.dtype, 1),
        ("to integers", lambda x: x.to(torch.int64), aten.to.dtype, 1),
        ("dropout of inference", lambda x: F.dropout(x, 0.5, False), aten.dropout.default, 0),
        ("dropout of training", lambda x: F.dropout(x, 1.0, True), aten.dropout.default, 1),
        ("detach", lambda x: x.detach(), aten.detach.default, 0),
        ("alias", lambda x: aten.alias(x), aten.alias.default, 0),
    ],
)  # fmt: skip
def test_tidy_erases_what_changes_nothing_only(name, step, target, left):
    x = torch.randn(3, 5)
    result = Rewritten(trace(Casts(step), x), tidy)
    assert result.count(target)[0] == max(left, 1), f"the trace has no such call\n{result}"
    assert Counter(n.target for n in calls(result.gm)) == Counter([aten.mul.Tensor] + [target] * left), str(result)
    result.same(x)


def test_tidy_counts_what_it_erases():
    steps = [lambda x: x.to(torch.float32), lambda x: x.double(), lambda x: x.to(torch.float64), lambda x: x.detach()]
    result = Rewritten(trace(Casts(*steps), torch.randn(3)), tidy)
    assert result.log.summary.startswith(f"erased {result.log.nodes_before - result.log.nodes_after} "), str(result)
    assert Counter(node.target for node in calls(result.gm)) == {aten.to.dtype: 1, aten.mul.Tensor: 1}, str(result)


def test_tidy_is_idle_on_a_tidy_graph():
    _, graph = toy({})
    once = passes.run(graph, Settings(), [tidy])
    twice = Rewritten(once, tidy)
    assert twice.log.summary.startswith("erased 0 ") and twice.log.nodes_after == twice.log.nodes_before, str(twice)
    result = Rewritten(graph, tidy)
    result.same(*example(3, 9))


class FreshConstant(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0, 2.0]).add_(1)


class CopyThenWrite(nn.Module):
    def forward(self, x):
        return x.to(torch.float32, copy=True).add_(1) + x


@pytest.mark.parametrize("module", [FreshConstant, CopyThenWrite])
def test_tidy_keeps_copies_that_are_written_to(module):
    """What is written in place must stay a copy: neither an input nor a constant of the model may change."""
    x = torch.ones(2)
    want = module()(x)
    result = Rewritten(trace(module(), x), tidy)
    for _ in range(2):
        assert torch.equal(result.gm(x)[0], want), str(result)
    assert torch.equal(x, torch.ones(2)), str(result)


# --- merge_linears


class Parallel(nn.Module):
    """Linear layers side by side: `groups` of (input number, biased) each."""

    def __init__(self, *layers, sizes=(6, 4, 2, 8)):
        super().__init__()
        self.inputs = [place for place, _ in layers]
        self.layers = nn.ModuleList(nn.Linear(5, size, bias=bias) for (_, bias), size in zip(layers, sizes))

    def forward(self, x, y):
        return tuple(layer((x, y)[place]) for place, layer in zip(self.inputs, self.layers))


@pytest.mark.parametrize(
    "layers, left",
    [
        ([(0, False)], 1),
        ([(0, False), (0, False)], 1),
        ([(0, True), (0, True)], 1),
        ([(0, False), (0, False), (0, False)], 1),
        ([(0, True), (0, True), (0, True)], 1),
        ([(0, False), (1, False)], 2),
        ([(0, False), (1, False), (0, False), (1, False)], 2),
        ([(0, True), (0, False)], 2),
        ([(0, True), (0, False), (0, True), (0, False)], 2),
    ],
)
def test_merge_linears_of_one_input_and_kind(layers, left):
    model = Parallel(*layers)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    want = model(x, y)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    result = Rewritten(trace(model, x, y), merge_linears)
    assert result.count(LINEAR) == (len(layers), left), str(result)
    result.close(x, y)
    assert all(torch.equal(a, b) for a, b in zip(model(x, y), want)), "the model's own outputs changed"
    assert list(model.state_dict()) == list(names)
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())


def test_merge_linears_switched_off():
    model = Parallel((0, False), (0, False))
    result = Rewritten(trace(model, *torch.randn(2, 3, 5)), merge_linears, merge_linears=False)
    assert result.count(LINEAR) == (2, 2), str(result)
    assert result.log.summary == "off"


def test_merge_linears_finds_qkv_and_gate_up_in_a_model():
    _, graph = toy(dict(bias=True), {})
    result = Rewritten(graph, merge_linears)
    assert result.count(LINEAR) == (2 * 7 + 1, 2 * 4 + 1), str(result)
    assert result.log.summary == "merged 10 linear layers into 4"
    result.close(*example(3, 11))


class Shared(nn.Module):
    """Two linear layers of one input, and a weight that something else uses too."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b, self.c = (nn.Linear(5, 5, bias=False) for _ in range(3))
        if how == "tied":
            self.b.weight = self.a.weight
        if how == "table":
            self.table = nn.Embedding(5, 5)
            self.a.weight = self.table.weight

    def forward(self, x, y):
        z = self.a(x) + self.b(x)
        if self.how == "twice":
            return z + self.a(y)
        if self.how == "read":
            return z + self.a.weight.sum()
        if self.how == "table":
            return z + self.table(torch.tensor([3]))
        return z + y


@pytest.mark.parametrize("how", ["tied", "twice", "read", "table"])
def test_merge_linears_leaves_shared_weights_alone(how):
    model = Shared(how)
    pointers = [p.data_ptr() for p in model.parameters()]
    result = Rewritten(trace(model, *torch.randn(2, 3, 5)), merge_linears)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1], str(result)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    result.same(*torch.randn(2, 3, 5))


def test_merge_linears_leaves_the_output_head_alone():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(5, 7, bias=False), nn.Linear(5, 3, bias=False)

        def forward(self, x):
            return self.head(x), self.other(x)

    result = Rewritten(trace(TwoHeads(), torch.randn(2, 5)), merge_linears)
    assert result.count(LINEAR) == (2, 2), str(result)


def test_merge_linears_leaves_tensor_subclasses_alone():
    class Wrapped(torch.Tensor):
        pass

    model = Parallel((0, False), (0, False), (0, False))
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().as_subclass(Wrapped))
    result = Rewritten(trace(model, *torch.randn(2, 3, 5)), merge_linears)
    assert result.count(LINEAR) == (3, 2), str(result)
    assert type(model.layers[1].weight) is Wrapped


@pytest.mark.parametrize("side", ["parameter", "merged"])
def test_merged_weights_are_updated_from_both_sides(side):
    model = Parallel((0, True), (0, True))
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    result = Rewritten(trace(model, x, y), merge_linears)
    before = result.gm(x, y)
    with torch.no_grad():
        if side == "parameter":
            model.layers[1].weight.mul_(3)
            model.layers[1].bias.add_(1)
        else:
            for node in calls(result.gm, LINEAR):
                attribute(result.gm, node.args[1].target)[6:].mul_(3)
                attribute(result.gm, node.args[2].target)[6:].add_(1)
    after, own = result.gm(x, y), model(x, y)
    assert torch.equal(before[0], after[0]), str(result)
    assert not torch.equal(before[1], after[1]), str(result)
    for a, b in zip(after, own):
        torch.testing.assert_close(a, b)


def test_merging_again_reuses_the_storage():
    model, graph = toy(dict(bias=True), {})
    first = passes.run(graph, Settings(), [merge_linears])
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    for _ in range(2):
        again = passes.run(graph, Settings(), [merge_linears])
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
        for a, b in zip(calls(first.gm, LINEAR), calls(again.gm, LINEAR), strict=True):
            for x, y in zip(a.args[1:], b.args[1:], strict=True):
                assert attribute(first.gm, x.target).data_ptr() == attribute(again.gm, y.target).data_ptr()


def test_merged_storage_is_not_larger_than_the_weights():
    model, graph = toy(dict(bias=True))
    passes.run(graph, Settings(), [merge_linears])
    block = model.layers[0]
    for group in ("qkv", ("gate", "up")):
        weights = [getattr(block, name).weight for name in group]
        storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
        assert list(storages.values()) == [sum(w.nbytes for w in weights)]


def test_a_model_with_merged_weights_can_be_copied_and_reloaded():
    model, graph = toy(dict(bias=True))
    want = {name: value.clone() for name, value in model.state_dict().items()}
    passes.run(graph, Settings(), [merge_linears])
    twin = copy.deepcopy(model)
    other = Toy(dict(bias=True))
    other.load_state_dict(model.state_dict())
    for again in (twin, other):
        assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())
    with torch.no_grad():
        twin.layers[0].q.weight.zero_()
    assert torch.equal(model.layers[0].q.weight, want["layers.0.q.weight"])


def test_a_model_with_merged_weights_is_saved_whole(tmp_path, captured):
    model, graph = captured("qwen2")
    passes.run(graph, Settings(), [merge_linears])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    own = model.state_dict()
    assert own.keys() == again.state_dict().keys()
    assert all(torch.equal(value, own[name]) for name, value in again.state_dict().items())
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(weights.values()) + 10_000


# --- tap_hidden_states


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 1, 2, 3), (2, 0)])
def test_taps_of_a_toy(wanted):
    model, graph = toy({}, {}, {})
    ids, positions = example(3, 6)
    result = Rewritten(graph, tap_hidden_states, taps=wanted)
    assert result.log.nodes_before == result.log.nodes_after, str(result)
    logits, *states = result.gm(ids, positions)
    want_logits, want = model.states(ids, positions)
    torch.testing.assert_close(logits, want_logits)
    assert len(states) == len(wanted)
    for number, state in zip(wanted, states):
        assert torch.allclose(state, want[number], atol=1e-5), f"hidden state {number}\n{result}"


def test_no_taps_wanted():
    _, graph = toy({})
    result = Rewritten(graph, tap_hidden_states)
    assert result.log.summary == "none wanted"
    result.same(*example(1, 4))


@pytest.mark.parametrize("wanted", [(3,), (-2,), (0, 7)])
def test_taps_out_of_range_are_refused(wanted):
    _, graph = toy({}, {})
    with pytest.raises(ValueError, match=r"taps: expected 0 to 2 .*got \["):
        Rewritten(graph, tap_hidden_states, taps=wanted)


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "gemma", "gemma2", "phi", "gpt2", "gpt_neox", "olmo2", "granite", "cohere", "glm4",
     "deepseek_v3", "opt", "gpt_oss", "gpt_bigcode", "stablelm"],
)  # fmt: skip
def test_taps_of_real_architectures(name, captured):
    """The values of transformers' hidden_states; the last is compared before the final norm."""
    model, graph = captured(name)
    layers = len(graph.layers)
    ids = torch.randint(3, graph.vocab_size, (2, 12))
    last = []
    final = next(m for n, m in model.named_modules() if n.endswith((f"layers.{layers - 1}", f"h.{layers - 1}")))
    hook = final.register_forward_hook(lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        own = model(ids, output_hidden_states=True, use_cache=False)
        hook.remove()
        result = Rewritten(graph, tap_hidden_states, taps=tuple(range(layers + 1)))
        logits, *states = result.gm(ids, torch.arange(12).expand(2, -1))
    torch.testing.assert_close(logits, own.logits, rtol=1e-4, atol=1e-4)
    for number, (got, want) in enumerate(zip(states, [*own.hidden_states[:layers], last[0]], strict=True)):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), f"hidden state {number}\n{result}"


# --- select_logits


def test_logits_of_all_rows():
    _, graph = toy({})
    result = Rewritten(graph, select_logits)
    assert result.log.nodes_before == result.log.nodes_after, str(result)
    result.same(*example(2, 5))


@pytest.mark.parametrize("rows", [[[0], [4]], [[4, 0, 4], [1, 2, 3]], [[0, 1, 2, 3, 4]] * 2])
def test_logits_of_chosen_rows(rows):
    _, graph = toy({}, {})
    inputs, rows = example(2, 5), torch.tensor(rows)
    result = Rewritten(graph, select_logits, attention=Use(role="draft"))
    assert result.count(ops.gather_rows) == (0, 1) and result.count(LINEAR)[0] == result.count(LINEAR)[1], str(result)
    assert [n.name for n in result.gm.graph.nodes if n.op == "placeholder"][-1] == "rows", str(result)
    (got,) = result.gm(*inputs, rows)
    want = graph.gm(*inputs)[0].gather(1, rows[:, :, None].expand(-1, -1, VOCAB))
    torch.testing.assert_close(got, want, msg=lambda m: f"{m}\n{result}")


def test_no_logits():
    """The head and the norm before it are dropped; what was tapped stays."""
    model, graph = toy({}, {})
    inputs = example(2, 5)
    result = Rewritten(graph, select_logits, attention=PREFILL)
    assert result.gm(*inputs) == (), str(result)
    assert result.count(aten.layer_norm.default) == (1, 0), str(result)
    assert result.count(LINEAR)[1] == 0, str(result)
    tapped = passes.run(graph, Settings(taps=(1,), attention=PREFILL), [tap_hidden_states, select_logits])
    (state,) = tapped.gm(*inputs)
    torch.testing.assert_close(state, model.states(*inputs)[1][1])
    assert not calls(tapped.gm, aten.layer_norm.default)


def test_no_logits_still_writes_every_layer_of_the_cache():
    """The last layer's attention output is not needed any more, but its keys and values are."""
    _, graph = toy({}, {})
    graph = passes.run(graph, Settings(attention=PREFILL))
    ids, positions = example(1, 5)
    cache = new_cache(2, 1, 8)
    graph.gm(ids, positions, torch.zeros(1, dtype=torch.int64), None, cache, 5)
    assert all(slots[:, :, :5].abs().amin() > 0 for slots in cache)
    assert len(attention_calls(graph)) == 2


def test_logits_rows_needs_one_head():
    class TwoHeads(Toy):
        def forward(self, ids, positions):
            logits = super().forward(ids, positions)
            return logits, self.head(self.embed(ids))

    graph = trace(TwoHeads({}), *example(2, 7))
    with pytest.raises(ValueError, match="expected one output head, found 2"):
        Rewritten(graph, select_logits, attention=Use(role="draft"))


# --- use_tree_attention


def new_cache(layers, batch, slots):
    return [torch.zeros(batch, KV, slots, SIZE) for _ in range(2 * layers)]


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
    result = Rewritten(graph, use_tree_attention)
    assert result.count(MARKER) == (layers, 0), str(result)
    assert result.count(sdpa.attention) == (0, layers), str(result)
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
        got.append(result.gm(ids[:, begin:end], positions[:, begin:end], lengths, None, cache, end)[0])
    want = graph.gm(ids, positions)[0]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{m}\n{result}")


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
        result.gm(texts[row : row + 1, :length], torch.arange(length)[None], torch.tensor([0]), None, own, length)
        for slots in own:
            slots[:, :, length:] = 1e4
    before = [slots.clone() for slots in cache]
    ancestors, depth = ancestry(torch.tensor(parents))
    start = torch.tensor(lengths)
    got = result.gm(trees, start[:, None] + depth, start, ancestors, cache, max_kv_len)[0]
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


def test_keys_and_values_are_written_in_place_at_their_slots():
    q, k, v = torch.randn(2, HEADS, 3, SIZE), torch.randn(2, KV, 3, SIZE), torch.randn(2, KV, 3, SIZE)
    keys, values = torch.full((2, KV, 10, SIZE), 7.0), torch.full((2, KV, 10, SIZE), 7.0)
    lengths = torch.tensor([0, 6])
    mask = ops.tree_mask(lengths[:, None] + torch.arange(3), lengths, None, 9, None, HEADS // KV, torch.float32)
    out = ops.append_and_attend(q, k, v, keys, values, lengths, mask, None, 0.5, None)
    assert out.shape == (2, 3, HEADS, SIZE)
    for cache, new in ((keys, k), (values, v)):
        for row, length in enumerate(lengths.tolist()):
            assert torch.equal(cache[row, :, length : length + 3], new[row])
            rest = torch.ones(10, dtype=torch.bool)
            rest[length : length + 3] = False
            assert (cache[row][:, rest] == 7).all()


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


def test_a_graph_that_is_not_a_model_has_no_markers_to_replace():
    graph = fx.Graph()
    ids, positions = graph.placeholder("ids"), graph.placeholder("positions")
    graph.output((graph.call_function(torch.add, (ids, positions)),))
    graph = ModelGraph(fx.GraphModule({}, graph), (), VOCAB, HIDDEN, torch.float32, None, "")
    result = Rewritten(graph, use_tree_attention)
    assert result.count(torch.add) == (1, 1), str(result)
    assert result.log.summary.startswith("0 layers")


# use_small_m_linears ------------------------------------------------------------------------------------------------


@needs_avx512
@pytest.mark.parametrize("length", [2, 4, 5, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_float32_take_the_form_avx512(length, bias):
    _, graph = toy(dict(bias=bias), dict(bias=bias))
    result = Rewritten(graph, use_small_m_linears)
    (before, left), (_, changed) = result.count(LINEAR), result.count(avx512.avx512_linear)
    assert (left, changed) == (0, before) and before > 0, result
    result.close(*example(2, length))


@needs_avx512
@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("inputs", [16, 48, 50])
@pytest.mark.parametrize("threads", [1, 2])
def test_avx512_linear_is_linear(rows, inputs, threads):
    torch.set_num_threads(threads)
    try:
        for outputs in (1, 3, 24, 101):
            x, weight, bias = torch.randn(rows, 1, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
            for b in (None, bias):
                torch.testing.assert_close(avx512.avx512_linear(x, weight, b), F.linear(x, weight, b))
            turned, last = x.transpose(0, 1).expand(2, -1, -1), torch.randn(inputs, outputs).t()
            torch.testing.assert_close(avx512.avx512_linear(turned, weight), F.linear(turned, weight))
            torch.testing.assert_close(avx512.avx512_linear(x, last), F.linear(x, last))
    finally:
        torch.set_num_threads(1)


@needs_avx512
def test_avx512_threads_give_the_same_bits():
    x, weight = torch.randn(5, 64), torch.randn(500, 64)
    one = avx512.avx512_linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(avx512.avx512_linear(x, weight), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_transposed_linear_is_linear(rows):
    x, weight, bias = torch.randn(rows, 1, 24), torch.randn(10, 24), torch.randn(10)
    for b in (None, bias):
        torch.testing.assert_close(transposed_linear(x, weight, b), F.linear(x, weight, b))


@pytest.mark.skipif(not transposed.SUPPORTED, reason="needs a CPU with AMX")
def test_few_rows_of_bfloat16_take_the_form_transposed():
    _, graph = toy({})
    graph.gm.to(torch.bfloat16)
    result = Rewritten(graph, use_small_m_linears)
    (before, left), (_, changed) = result.count(LINEAR), result.count(transposed_linear)
    assert (left, changed) == (0, before) and before > 0, result


def test_few_rows_leave_other_dtypes_alone():
    _, graph = toy({})
    graph.gm.to(torch.float16)
    result = Rewritten(graph, use_small_m_linears)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1] > 0, result


# fuse_rotary, fuse_qk_norms, fuse_norms: graphs of 16 bits that verify on a GPU; the ops' plain meanings run here

JOINED = (fuse_rotary, fuse_qk_norms, fuse_norms)


@functools.cache
def captured_in_half(name):
    return capture(models.ADMITTED[name]().to(torch.bfloat16))


@pytest.fixture
def half_on_gpu(monkeypatch):
    """A function: name of a tiny model -> its graph in bfloat16, which passes take for one on a GPU."""
    for module in ("attention.tree_attention", "norm", "row_scan", "linear.float32", "experts.route"):
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
        function(ids[:, :12], steps[:, :12], lengths, None, cache, 32)
        return [*function(ids[:, 12:], steps[:, 12:], lengths + 12, None, cache, 32), *cache]


@pytest.mark.parametrize(
    "name, turned, norms, sums",
    [
        ("llama", 2, 5, 4),
        ("qwen2", 2, 5, 4),
        ("qwen3", 2, 5, 4),  # besides the norms of queries and keys
        ("gemma3", 4, 17, 8),
        ("smollm3", 1, 5, 4),  # one layer without rotation
        ("granite", 2, 5, 4),
        ("mixtral", 2, 5, 4),
        ("gemma", 2, 5, 4),
        ("gemma2", 4, 17, 8),
        ("olmo2", 0, 9, 1),  # rotates in float32
        ("gpt_oss", 0, 9, 8),
        ("phi3", 0, 5, 4),  # rotates a part
        ("glm4", 0, 9, 4),  # interleaved
        ("deepseek_v3", 0, 13, 6),
        ("starcoder2", 2, 0, 0),  # LayerNorm
        ("gpt2", 0, 0, 0),
    ],
)
def test_rotary_and_fused_norms_of_real_architectures(half_on_gpu, name, turned, norms, sums):
    """Bit for bit the same logits, hidden states and caches, also when cut into regions."""
    graph = half_on_gpu(name)
    wanted = dict(taps=tuple(range(len(graph.layers) + 1)))
    plain, ours = rewritten(graph, JOINED, **wanted), rewritten(graph, **wanted)
    own = torch.ops.spec_compile
    attention = calls(ours.gm, own.tree_attention.default)
    assert sum("cos" in node.kwargs for node in attention) == turned
    normed = sum("q_norm" in node.kwargs for node in attention)
    assert normed == (turned if name in ("qwen3", "gemma3") else 0)
    counts = [len(calls(ours.gm, op.default)) for op in (own.add_rms_norm, own.rms_norm)]
    assert counts == [sums, norms - sums]
    roots = [len(calls(each.gm, aten.rsqrt.default)) for each in (plain, ours)]
    assert roots[0] - roots[1] == norms + 2 * normed
    want = prefix_then_chunk(plain.gm, graph)
    for function in (ours.gm, cut(ours)):
        for got, expected in zip(prefix_then_chunk(function, graph), want, strict=True):
            assert torch.equal(got, expected), ours.gm.print_readable(print_output=False)


def test_rotary_and_fused_norms_leave_other_graphs_alone(half_on_gpu, monkeypatch, captured):
    kinds = {"prefill": (half_on_gpu("llama"), PREFILL), "float32": (captured("llama")[1], Use())}
    for kind, (graph, use) in kinds.items():
        ours, plain = (rewritten(graph, without, attention=use) for without in ((), JOINED))
        assert Counter(calls_of(ours)) == Counter(calls_of(plain)), kind
    monkeypatch.undo()
    graph = capture(models.ADMITTED["llama"]().to(torch.bfloat16))
    assert Counter(calls_of(rewritten(graph))) == Counter(calls_of(rewritten(graph, JOINED)))


def calls_of(graph):
    return [str(node.target) for node in calls(graph.gm)]


def half(x, negative=0):
    """transformers' rotate_half, with the wrong half negated at 1 and none at 2."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([[-b, a], [b, -a], [b, a]][negative], -1)


TURNS = {  # of queries and keys x by cos and sin [B, 1, T, D], and those of them that are Llama's
    "llama": (lambda x, cos, sin: x * cos + half(x) * sin, True),
    "the wrong half negated": (lambda x, cos, sin: x * cos + half(x, 1) * sin, False),
    "none negated": (lambda x, cos, sin: x * cos + half(x, 2) * sin, False),
    "halves of another": (lambda x, cos, sin: x * cos + half(x * 2) * sin, False),
    "one angle": (lambda x, cos, sin: x * cos[..., :1] + half(x) * sin[..., :1], False),
    "a difference": (lambda x, cos, sin: x * cos - half(x) * sin, False),
    "uneven": (lambda x, cos, sin: x * cos + torch.cat([-x[..., 1:], x[..., :1]], -1) * sin, False),
    "a part": (lambda x, cos, sin: torch.cat([x[..., :2] * cos[..., :2] + half(x[..., :2]) * sin[..., :2],
                                              x[..., 2:]], -1), False),
}  # fmt: skip


class Turning(nn.Module):
    """One layer whose queries and keys turn in a way; `keys`: the keys in another, or by other angles."""

    def __init__(self, turn, keys=None, shift=0.0):
        super().__init__()
        self.turn, self.keys, self.shift, self.block = turn, keys or turn, shift, Block(0)
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids, positions):
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for f in (self.block.q, self.block.k, self.block.v))
        angle = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        angles = [(a.cos().to(x.dtype)[:, None], a.sin().to(x.dtype)[:, None]) for a in (angle, angle + self.shift)]
        q, k = self.turn(q, *angles[0]), self.keys(k, *angles[self.shift != 0])
        return self.head(self.block.o(ops.attention(q, k, v, None, 0.5, None, None, 0).flatten(2)))


def turning(**how):
    model = Turning(**how).to(torch.bfloat16).eval()
    return dataclasses.replace(trace(model, *example(2, 7), dynamic=True), dtype=torch.bfloat16)


@pytest.mark.parametrize("turn, fits", TURNS.values(), ids=TURNS)
def test_rotary_takes_rotations_by_halves_only(half_on_gpu, turn, fits):
    graph = turning(turn=turn)
    plain, ours = rewritten(graph, [fuse_rotary]), rewritten(graph)
    (node,) = calls(ours.gm, torch.ops.spec_compile.tree_attention.default)
    assert ("cos" in node.kwargs) == fits
    for got, want in zip(prefix_then_chunk(ours.gm, graph), prefix_then_chunk(plain.gm, graph), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("other", [dict(keys=lambda x, cos, sin: x), dict(shift=1.0)])
def test_rotary_wants_queries_and_keys_turned_alike(half_on_gpu, other):
    graph = turning(turn=TURNS["llama"][0], **other)
    (node,) = calls(rewritten(graph).gm, torch.ops.spec_compile.tree_attention.default)
    assert "cos" not in node.kwargs


NORMS = {  # of x by a weight, and the offset with which `rms_norm` does the same, or None
    "rounded first": (lambda x, w: w * scaled(x).to(x.dtype), None),
    "rounded last": (lambda x, w: (w * scaled(x)).to(x.dtype), 0.0),
    "of a float32 weight": (lambda x, w: (scaled(x) * w.float()).to(x.dtype), 0.0),
    "shifted": (lambda x, w: (scaled(x) * (1.0 + w.float())).type_as(x), 1.0),
}
OTHERS = {
    "no weight": lambda x, w: scaled(x).to(x.dtype),
    "the root of another": lambda x, w: w * (x.float() * (scaled(x * 2) / (x * 2).float())).to(x.dtype),
    "of 16 bits": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
    "over rows": lambda x, w: w * scaled(x, dim=1).to(x.dtype),
    "fourth powers": lambda x, w: w * scaled(x, power=4).to(x.dtype),
    "another weight": lambda x, w: (w * 2) * scaled(x).to(x.dtype),
    "a single weight": lambda x, w: w[:1] * scaled(x).to(x.dtype),
}


def scaled(x, dim=-1, power=2):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(power).mean(dim, keepdim=True) + 1e-3)


class Normed(nn.Module):
    """A norm, and a second after an addition, whose sum is also read later."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.embed = norm, nn.Embedding(VOCAB, HIDDEN)
        self.first, self.second = (nn.Parameter(torch.randn(HIDDEN)) for _ in range(2))

    def forward(self, ids, positions):
        x = self.embed(ids)
        x = x + self.norm(x, self.first)
        return self.norm(x, self.second) * 2 + x


@pytest.mark.parametrize("norm", [*NORMS, *OTHERS])
def test_fused_norms_takes_norms_only(half_on_gpu, norm):
    how, offset = NORMS.get(norm) or (OTHERS[norm], None)
    graph = trace(Normed(how).to(torch.bfloat16), *example(2, 7), dynamic=True)
    tidied = passes.run(dataclasses.replace(graph, dtype=torch.bfloat16), Settings(), [tidy])
    result = Rewritten(tidied, fuse_norms)
    own = torch.ops.spec_compile
    fused = [node for op in (own.rms_norm, own.add_rms_norm) for node in calls(result.gm, op.default)]
    assert len(fused) == (2 if norm in NORMS else 0), str(result)
    assert all(node.args[-2:] == (1e-3, offset) for node in fused), str(result)
    with torch.no_grad():
        result.same(*example(3, 5))


@pytest.mark.parametrize("kind", ["one weight", "a sum of other sizes", "a difference"])
def test_fused_norms_around_additions(half_on_gpu, kind):
    model = Normed(NORMS["rounded first"][0])
    if kind == "one weight":
        model.second = model.first
    else:
        sums = {"a sum of other sizes": lambda x: x + x[:1], "a difference": lambda x: torch.add(x, x, alpha=-0.5)}
        model.norm = lambda x, w: NORMS["rounded first"][0](sums[kind](x), w)
    graph = trace(model.to(torch.bfloat16), *example(2, 7), dynamic=True)
    tidied = passes.run(dataclasses.replace(graph, dtype=torch.bfloat16), Settings(), [tidy])
    result, own = Rewritten(tidied, fuse_norms), torch.ops.spec_compile
    norms, sums = (len(calls(result.gm, op.default)) for op in (own.rms_norm, own.add_rms_norm))
    assert (norms, sums) == ((1, 1) if kind == "one weight" else (2, 0)), str(result)
    with torch.no_grad():
        result.same(*example(3, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "mixtral", "starcoder2", "gemma3"])
@pytest.mark.parametrize("nodes", [1, 16, 64])
def test_rotary_and_fused_norms_on_a_gpu(name, nodes):
    """The kernels are as close to float32 as the same graph without them."""
    kernels.load(torch.device("cuda"))
    model = models.ADMITTED[name]().to("cuda", torch.bfloat16)
    graph, exact = capture(model), capture(copy.deepcopy(model).float())
    ids = torch.randint(3, graph.vocab_size, (2, nodes), device="cuda")
    ancestors, depth = ancestry(torch.arange(-1, nodes - 1, device="cuda").expand(2, -1))
    lengths = torch.tensor([40, 7], device="cuda")
    held = [
        torch.randn(2, layer.kv_heads, 128, size, dtype=graph.dtype, device="cuda")
        for layer in graph.layers
        for size in (layer.key_dim, layer.value_dim)
    ]
    outs = []
    for each, without in ((exact, ()), (graph, JOINED), (graph, ())):
        cache = [part.to(each.dtype, copy=True) for part in held]
        with torch.no_grad():
            gm = rewritten(each, without).gm
            outs.append([*gm(ids, lengths[:, None] + depth, lengths, ancestors, cache, 128), *cache])
    for want, plain, got in zip(*outs, strict=True):
        errors = [(out.float() - want).norm().item() / want.norm().item() for out in (plain, got)]
        assert errors[1] < 1.5 * errors[0] + 1e-3


# fuse_residuals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, taps, joined, apart",
    [
        ("llama", (), 4, 0),
        ("llama", (1, -1), 4, 1),  # the last norm's output is wanted by itself, too
        ("qwen2", (), 4, 0),
        ("qwen3", (2,), 4, 0),
        ("gemma2", (), 0, 0),  # norms stand between its products and the residual stream
        ("gemma", (), 4, 0),
        ("mixtral", (), 0, 0),  # experts end at the stream, and begin there
    ],
)
def test_fused_residuals(half_on_gpu, monkeypatch, name, taps, joined, apart):
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    graph = half_on_gpu(name)
    apart_from_it = rewritten(graph, (fuse_residuals,), taps=taps)
    result = rewritten(graph, taps=taps)
    own = torch.ops.spec_compile
    sums = [len(calls(each.gm, own.add_rms_norm.default)) for each in (apart_from_it, result)]
    ends, norms = (len(calls(result.gm, op.default)) for op in (own.product_to_stream, own.rms_norm))
    assert ends == joined == sums[0] - sums[1]
    assert norms == apart + len(calls(apart_from_it.gm, own.rms_norm.default))
    gates = [node for node in calls(result.gm, linear.PRODUCT) if node.kwargs.get("gated")]
    assert all("squares" in node.kwargs for node in gates) or not joined
    for want, got in zip(prefix_then_chunk(apart_from_it.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


def test_fused_residuals_of_ranks(half_on_gpu, monkeypatch):
    """A product that ranks sum before the addition takes the op that also sums; one that others read does not."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    monkeypatch.setattr(linear.small_m, "lack_of_device", lambda device: None)
    monkeypatch.setitem(all_reduce.REDUCERS, "ranks", lambda part: part + part)
    graph = half_on_gpu("llama")
    own, sums = torch.ops.spec_compile, []
    for name in ("o_proj", "down_proj"):
        for product in [node for node in linear.linear_layers(graph) if name in node.args[1].target]:
            with graph.gm.graph.inserting_after(product):
                sums.append(graph.gm.graph.call_function(own.all_reduce.default, (product, "ranks")))
            sums[-1].meta = dict(product.meta)
            product.replace_all_uses_with(sums[-1], lambda user: user is not sums[-1])
    plain, result = rewritten(graph, (fuse_residuals,)), rewritten(graph)
    ends = calls(result.gm, linear.TO_STREAM)
    assert [node.kwargs["group_name"] for node in ends] == ["ranks"] * len(sums) and len(sums) == 4
    assert not calls(result.gm, own.all_reduce.default)
    assert not [part for part in variant_parts(result) if "product" in part]
    for want, got in zip(prefix_then_chunk(plain.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()
    for node in graph.gm.graph.find_nodes(op="output", target="output"):
        node.args = ((*node.args[0], sums[0].args[0]),)
    assert len(calls(rewritten(graph).gm, own.all_reduce.default)) == 1


def test_regions_end_behind_fused_residuals(half_on_gpu, monkeypatch):
    """The parts of what a product returns stay in its region, because regions hand tensors to each other."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    graph = rewritten(half_on_gpu("llama"))
    regions = cut(graph)
    assert len(regions.regions) == len(graph.layers) + 1
    for want, got in zip(prefix_then_chunk(graph.gm, graph), prefix_then_chunk(regions, graph), strict=True):
        assert torch.equal(want, got)


# fuse_append --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_m(half_on_gpu, monkeypatch):
    """`half_on_gpu`, with products of the form "small_m"."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    return half_on_gpu


def appending(graph):
    """Products that append, attention calls that find the block in the cache, and attention calls."""
    attention = attention_calls(graph)
    products = len(calls(graph.gm, linear.TO_HEADS))
    return products, sum(node.kwargs["k"] is node.kwargs["v"] is None for node in attention), len(attention)


@pytest.mark.parametrize(
    "name, joined, layers",
    [
        ("llama", 2, 2),
        ("qwen2", 2, 2),  # has biases
        ("qwen3", 2, 2),  # norms queries and keys
        ("gemma2", 4, 4),
        ("mixtral", 2, 2),
        ("smollm3", 1, 2),  # one layer without rotation
        ("olmo2", 0, 2),  # rotates in float32
        ("phi3", 0, 2),  # one projection of the model's own
        ("gpt2", 0, 2),
    ],
)
def test_products_that_append(small_m, name, joined, layers):
    """Bit for bit the same, also when cut into regions."""
    graph = small_m(name)
    apart, ours = rewritten(graph, (fuse_append,)), rewritten(graph)
    assert appending(apart)[:2] == (0, 0) and appending(ours) == (joined, joined, layers)
    assert ours.log[-1].summary.startswith(f"{joined} layers append")
    products = [sum(map(linear.is_product, calls(each.gm))) for each in (apart, ours)]
    assert products[0] == products[1]
    want = prefix_then_chunk(apart.gm, graph)
    for function in (ours.gm, cut(ours)):
        for got, expected in zip(prefix_then_chunk(function, graph), want, strict=True):
            assert torch.equal(got, expected), ours.gm.print_readable(print_output=False)


def test_only_graphs_that_verify_append_in_products(small_m, monkeypatch):
    graph = small_m("llama")
    for role in ("prefill", "draft"):
        assert appending(rewritten(graph, attention=Use(role=role)))[0] == 0
    assert appending(rewritten(graph, attention=Use(name="sdpa")))[0] == 0
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: None)
    assert appending(rewritten(graph))[0] == 0


def test_only_products_that_nothing_else_reads_append(small_m):
    def read_twice(graph, settings):
        split = calls(graph.gm, aten.split_with_sizes.default)[0]
        output = next(node for node in graph.gm.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], split.args[0]),)
        return "the first product is a result, too"

    steps = [*passes.PIPELINE[:-1], read_twice, fuse_append]
    assert appending(passes.run(small_m("llama"), Settings(), steps))[0] == 1


def test_heads_that_products_cannot_append_are_named(small_m, monkeypatch):
    monkeypatch.setattr("spec_compile.kernels.linear.product_ops.MAX_HEAD", 8)
    graph = rewritten(small_m("qwen3"))
    assert appending(graph)[0] == 0
    assert graph.log[-1].summary.endswith("; apart because of norms of heads of 16")
