"""The torch.compile backend "spec": its passes, its options, and the numbers that come out."""

import operator
import warnings
from dataclasses import replace
from importlib.metadata import entry_points

import models
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spec_compile import backend
from spec_compile.backend import BackendOptions, rewrite, spec
from spec_compile.compat import TORCH
from spec_compile.graph import calls
from spec_compile.passes.forward.graph import ForwardGraph, changes_something
from spec_compile.passes.forward.grouped_attention import grouped_attention
from spec_compile.passes.forward.join_linears import JoinedWeights, join, join_linears
from spec_compile.passes.forward.tidy_forward import tidy_forward

TOLERANCE = 1e-4  # of the spread of the logits


@pytest.fixture(autouse=True)
def _fresh():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


class Recorder:
    """A backend that runs some of the passes, then the rewritten graph as it is; it keeps the calls of both."""

    def __init__(self, *passes, **options):
        self.passes, self.options, self.before, self.after = passes, BackendOptions(**options), [], []

    def __call__(self, gm, inputs):
        self.before.append([node.target for node in calls(gm)])
        graph = rewrite(ForwardGraph(gm, list(inputs)), self.options, self.passes)
        self.after.append([node.target for node in calls(gm)])
        return JoinedWeights(gm.forward, graph.joined) if graph.joined else gm.forward

    def counts(self, target) -> tuple[int, int]:
        """Calls of `target` before and after the passes, over all graphs."""
        return tuple(sum(names.count(target) for names in side) for side in (self.before, self.after))


def run(module, recorder, *inputs, **options):
    with torch.no_grad():
        return torch.compile(module, backend=recorder, **options)(*inputs)


@pytest.fixture
def interpreted(monkeypatch):
    """The whole backend, with the rewritten graph run as it is instead of by Inductor."""
    graphs = []
    monkeypatch.setattr(backend, "compile_fx", lambda gm, inputs, **_: graphs.append(gm) or gm.forward)
    return graphs


# passes, on toy graphs


def test_tidy_forward_erases_what_returns_its_input():
    def toy(x):
        y = F.dropout(x.to(torch.float32).float(), 0.5, training=False).type_as(x)
        y = F.dropout(y, p=0.3, training=False)
        return y.double().to("cpu") * 2 + x.to(torch.float32, copy=True)

    recorder, x = Recorder(tidy_forward), torch.randn(3)
    assert torch.equal(run(toy, recorder, x), toy(x))
    assert recorder.after == [["double", operator.mul, "to", operator.add]]


def test_tidy_forward_keeps_dropout_of_training():
    recorder = Recorder(tidy_forward)
    assert run(lambda x: F.dropout(x, 1.0), recorder, torch.ones(3)).tolist() == [0, 0, 0]
    assert recorder.counts(F.dropout) == (1, 1)


class Linears(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias) for n in (8, 4, 4))
        self.down = nn.Linear(8, 8)

    def forward(self, x):
        y = self.q(x) * torch.cat([self.k(x), self.v(x)], -1)
        return self.down(y), self.k(y)  # k is used twice, so it stays out of the group


@pytest.mark.parametrize("bias", [False, True])
def test_join_linears_merges_layers_of_one_input(bias):
    torch.manual_seed(0)
    module, recorder, x = Linears(bias), Recorder(join_linears), torch.randn(2, 3, 8)
    want = module(x)
    torch.testing.assert_close(run(module, recorder, x), want)
    assert recorder.counts(F.linear) == (5, 4) and recorder.counts(torch.split) == (0, 1)
    assert module.q.weight.untyped_storage().data_ptr() == module.v.weight.untyped_storage().data_ptr()


def test_joined_weights_never_go_stale():
    torch.manual_seed(0)
    module, x = Linears(True), torch.randn(2, 8)
    step = torch.compile(module, backend=Recorder(join_linears))

    def check():
        with torch.no_grad():
            torch.testing.assert_close(step(x), module(x))

    check()
    with torch.no_grad():
        module.q.weight.mul_(3)
    check()
    module.v.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)})
    check()
    module.v.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)}, assign=True)
    check()
    module.q.weight = nn.Parameter(torch.randn(8, 8))
    check()
    module.q.bias.data = torch.randn(8)
    check()


def test_two_modules_of_one_compiled_graph_keep_their_weights():
    torch.manual_seed(0)
    one, two, recorder, x = Linears(), Linears(), Recorder(join_linears), torch.randn(2, 8)
    want = one(x), two(x)
    steps = [torch.compile(module, backend=recorder) for module in (one, two)]
    for _ in range(2):
        for step, expected in zip(steps, want):
            with torch.no_grad():
                torch.testing.assert_close(step(x), expected)


def test_parameters_joined_in_inference_mode_can_still_be_trained():
    module, x, recorder = Linears(), torch.randn(2, 8), Recorder(join_linears)
    with torch.inference_mode():
        torch.compile(module, backend=recorder)(x)
    assert recorder.counts(F.linear) == (5, 4)
    module(x)[0].sum().backward()
    assert module.q.weight.grad is not None and not module.q.weight.is_inference()


def test_join_of_neighbours_copies_nothing():
    whole = torch.randn(6, 2)
    parameters = [nn.Parameter(part) for part in whole.split([2, 4])]
    assert join(parameters).data_ptr() == whole.data_ptr()


def test_join_linears_leaves_alone_what_it_must():
    class Toy(Linears):
        def forward(self, x):
            q = self.q(x)
            x.add_(1)  # the second layer reads another x
            return q * 2, self.k(x) + self.v(x).sum()

    torch.manual_seed(0)
    module, recorder, x = Toy(), Recorder(join_linears), torch.randn(2, 8)
    want = module(x.clone())
    torch.testing.assert_close(run(module, recorder, x.clone()), want)
    assert recorder.counts(F.linear) == (3, 3)
    weights = [torch.randn(4, 8), torch.randn(4, 8)]  # plain tensors, not parameters
    recorder = Recorder(join_linears)
    run(lambda x, a, b: F.linear(x, a) + F.linear(x, b), recorder, x, *weights)
    assert recorder.counts(F.linear) == (2, 2)


def repeated(x, n):
    batch, heads, slots, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, slots, size).reshape(batch, heads * n, slots, size)


def attend(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, repeated(k, n), repeated(v, n), attn_mask=mask, scale=0.3)


def qkv(batch=2, heads=6, kv_heads=2, tokens=1, slots=9, size=8, value_size=8):
    torch.manual_seed(0)
    shapes = (heads, tokens, size), (kv_heads, slots, size), (kv_heads, slots, value_size)
    return [torch.randn(batch, *shape) for shape in shapes]


@pytest.mark.parametrize("mask", [None, (2, 1, 1, 9), (1, 1, 4, 9), (2, 6, 4, 9), (2, 1, 4, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_grouped_attention_reads_keys_once(mask, kind):
    tokens = 4 if mask is None else mask[2]
    q, k, v = qkv(tokens=tokens, value_size=5)
    if mask is not None:
        mask = torch.rand(mask)
        mask = (mask > 0.3) | (torch.arange(9) == 0) if kind == "bool" else mask.log()
    recorder = Recorder(grouped_attention)
    torch.testing.assert_close(run(attend, recorder, q, k, v, mask), attend(q, k, v, mask))
    assert recorder.counts("expand") == (2, 0) and recorder.counts("reshape") == (2, 0)


def test_grouped_attention_with_symbolic_slots_and_repeat_interleave():
    def toy(q, k, v, mask):
        k, v = k.repeat_interleave(3, 1), torch.repeat_interleave(v, 3, dim=1)
        return F.scaled_dot_product_attention(q, k, v, mask)

    for function in (toy, attend):
        recorder = Recorder(grouped_attention)
        step = torch.compile(function, backend=recorder)
        for slots in (9, 12):
            q, k, v = qkv(slots=slots)
            mask = torch.rand(2, 1, 1, slots) > 0.2
            for x, dim in ((k, 2), (v, 2), (mask, 3)):
                torch._dynamo.mark_dynamic(x, dim)
            torch.testing.assert_close(step(q, k, v, mask), function(q, k, v, mask))
        assert len(recorder.after) == 1 and "unflatten" in recorder.after[0]


def test_grouped_attention_leaves_alone_what_it_must():
    def written(q, k, v, mask):
        n = q.shape[1] // k.shape[1]
        keys, values = repeated(k, n), repeated(v, n)
        k.zero_()  # the repeated copy keeps the old keys
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def causal(q, k, v, mask):
        return F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3), is_causal=True)

    def wrong_order(q, k, v, mask):  # heads 0 1 0 1 0 1, not 0 0 0 1 1 1
        return F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))

    def other_place(q, k, v, mask):
        k, v = (x[:, None].expand(2, 3, 2, 9, 8).reshape(2, 6, 9, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    for function in (written, causal, wrong_order, other_place):
        q, k, v = qkv()
        recorder, want = Recorder(grouped_attention), function(q, k.clone(), v, None)
        torch.testing.assert_close(run(function, recorder, q, k.clone(), v, None), want)
        assert recorder.before == recorder.after
    recorder = Recorder(grouped_attention)
    run(attend, recorder, *qkv(tokens=65), None)
    assert recorder.before == recorder.after


def test_what_writes_is_known():
    def toy(x, i):
        x.add_(1)
        x[0] = 2
        x += 1
        F.relu(x, True)
        torch.add(x, x, out=x)
        return x.index_copy_(0, i, x[:1] * 2) + torch.relu(x) + F.silu(x)

    found = []
    step = torch.compile(toy, backend=lambda gm, inputs: found.extend(calls(gm)) or gm.forward)
    step(torch.ones(3), torch.tensor([1]))
    quiet = [node.target for node in found if not changes_something(node)]
    assert quiet == [operator.getitem, operator.mul, torch.relu, operator.add, F.silu, operator.add]


# whole models


def check_forward(net, step, mask):
    ids = models.prompts((24, 9))[1]
    given = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        want, got = net(**given).logits, step(**given).logits
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert (got - want)[real].abs().max() <= TOLERANCE * (want.max() - want.min())


def test_the_tolerance_notices_a_wrong_scale():
    net, wrong = (models.ADMITTED["llama"]() for _ in range(2))
    check_forward(net, net, None)
    for layer in wrong.model.layers:
        layer.self_attn.scaling *= 1.01
    with pytest.raises(AssertionError):
        check_forward(net, wrong, None)


@pytest.mark.sweep("gemma3 mixtral")
@pytest.mark.parametrize("name", models.ADMITTED)
def test_every_architecture_keeps_its_logits(name, interpreted):
    net = models.ADMITTED[name]()
    step, padded = torch.compile(net, backend=spec, dynamic=False), models.prompts((24, 9))[2]
    for mask in (padded, torch.ones_like(padded)):
        check_forward(net, step, mask)
    assert len(interpreted) == 1
    attention = backend.reports()[0][-1]
    if getattr(net.config, "num_key_value_heads", net.config.num_attention_heads) < net.config.num_attention_heads:
        assert attention.summary.startswith("0 ") == (net.config._attn_implementation == "eager")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "deepseek_v3")]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", *SLOW])
def test_logits_without_a_mask(name, interpreted):
    net = models.ADMITTED[name]()
    check_forward(net, torch.compile(net, backend=spec, dynamic=False), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_inductor_keeps_the_logits(name):
    net = models.ADMITTED[name]()
    check_forward(net, torch.compile(net, backend=spec, dynamic=False), models.prompts((24, 9))[2])


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 13), reason="plain Inductor fails: C++ that does not compile")
def test_generate_after_model_compile_gives_the_same_tokens():
    net = models.ADMITTED["qwen3"]()
    _, ids, mask = models.prompts((24, 9))
    want, _ = models.greedy(net, ids, mask, new=16)
    net.compile(backend=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got, _ = models.greedy(net, ids, mask, new=16)
    assert torch.equal(got, want)
    assert sum(report.summary.startswith("2 attention") for graph in backend.reports() for report in graph) >= 2


def test_generate_with_a_static_cache_gives_the_same_tokens(interpreted):
    net = models.ADMITTED["llama"]()
    _, ids, mask = models.prompts((24, 9))
    want, _ = models.greedy(net, ids, mask, new=16)
    net.compile(backend=spec)
    given = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
    net.generation_config.eos_token_id = None
    assert torch.equal(net.generate(ids, **given)[:, -16:], want)
    assert len(interpreted) == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_share_compilations(dynamic, interpreted):
    net = models.ADMITTED["llama"]()
    step = torch.compile(net, backend=spec, dynamic=dynamic)
    for length in (7, 11, 19, 33, 50):
        ids = models.prompts((length, length))[1]
        with torch.no_grad():
            torch.testing.assert_close(step(input_ids=ids).logits, net(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert len(interpreted) <= (1 if dynamic else 2)


def test_training_goes_to_inductor_unchanged(interpreted):
    module, x = Linears(), torch.randn(2, 8)
    step = torch.compile(module, backend=spec)
    step(x)[0].sum().backward()
    assert module.q.weight.grad is not None and backend.reports() == []
    assert [node.target for node in calls(interpreted[0])].count(F.linear) == 5
    with torch.no_grad():
        step(x)
    assert len(backend.reports()) == 1


def test_inductor_trains():
    torch.manual_seed(0)
    module, x = Linears(), torch.randn(2, 8)
    module(x)[0].sum().backward()
    want = module.q.weight.grad.clone()
    module.zero_grad()
    torch.compile(module, backend=spec)(x)[0].sum().backward()
    torch.testing.assert_close(module.q.weight.grad, want)


# options and reports


def test_options_are_checked():
    x = torch.zeros(1)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(TypeError, match=r"unknown option 'merge_linear'\. Did you mean 'merge_linears'\?"):
        spec(gm, [x], options={"merge_linear": False})
    with pytest.raises(TypeError, match="gqa: expected bool, got int"):
        spec(gm, [x], options={"gqa": 1})
    with pytest.raises(TypeError, match="dump: expected the path of a directory, got int"):
        spec(gm, [x], options={"dump": 3})
    with pytest.raises(ValueError, match=r"mode: .*knows only \"default\", got 'max-autotune'"):
        spec(gm, [x], mode="max-autotune")
    with pytest.raises(Exception, match="Did you mean 'gqa'"):
        torch.compile(lambda x: x + 1, backend=spec, options={"gpa": False})(x)
    assert replace(BackendOptions(), gqa=False) == BackendOptions(gqa=False)


def test_passes_can_be_switched_off(interpreted):
    with torch.no_grad():
        torch.compile(Linears(), backend=spec, options={"merge_linears": False, "gqa": False})(torch.randn(2, 8))
    (log,) = backend.reports()
    assert [(r.name, r.summary) for r in log][1:] == [("join_linears", "off"), ("grouped_attention", "off")]


def test_dump_and_reports(tmp_path, interpreted):
    with torch.no_grad():
        torch.compile(Linears(), backend=spec, options={"dump": str(tmp_path / "graphs")})(torch.randn(2, 8))
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    passes = ("0_before", "1_tidy_forward", "2_join_linears", "3_grouped_attention")
    assert names == [f"forward0_{name}.py" for name in passes]
    assert "split(" in (tmp_path / "graphs" / names[2]).read_text()
    (log,) = backend.reports()
    assert log[1].summary == "merged 2 linear layers into 1" and "split(" in log[1].code
    torch._dynamo.reset()
    assert backend.reports() == []


# torch.compile(model, backend="spec").generate()


def generate_warnings(net, times=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            net.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    return [w for w in caught if "transformers' loop" in str(w.message)]


def test_generate_of_a_compiled_module_warns_once():
    net = models.ADMITTED["llama"]()
    compiled = torch.compile(net, backend=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hasattr(compiled, "generate") and compiled.generate.__name__ == "generate"
        assert compiled.config is net.config
    (warning,) = generate_warnings(compiled)
    for way in ("spec_compile.speculate(model, algo=...)", 'model.compile(backend="spec")'):
        assert way in str(warning.message)
    assert warning.filename == __file__
    assert compiled.generate == net.generate


def test_generate_warns_for_no_other_backend_and_no_other_module():
    net = models.ADMITTED["llama"]()
    for other in ("eager", "inductor", lambda gm, inputs: gm.forward):
        compiled = torch.compile(net, backend=other)
        assert compiled.generate == net.generate and not generate_warnings(compiled, 1)
    assert not generate_warnings(net, 1)
    compiled = torch.compile(net, backend=spec)
    net.compile(backend=lambda gm, inputs: gm.forward)  # now transformers' loop does reach a compiled forward
    assert not generate_warnings(compiled, 1)
    linear = torch.compile(nn.Linear(2, 2), backend=spec)
    assert not hasattr(linear, "generate")
    linear.generate = 3  # goes to the module itself, as any other attribute
    assert linear._orig_mod.generate == 3


def test_the_entry_point_registers_the_backend():
    (point,) = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "spec"]
    assert point.load() is spec
    assert "spec" in torch._dynamo.list_backends()
    net = models.ADMITTED["llama"]()
    assert len(generate_warnings(torch.compile(net, backend="spec"))) == 1
