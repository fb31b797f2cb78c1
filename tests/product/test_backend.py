"""The torch.compile backend "spec": its passes, its options, and the numbers that come out."""

import warnings
from dataclasses import replace
from importlib.metadata import entry_points

import models
import pytest
import torch
from forwards import Linears
from torch import nn
from torch.nn import functional as F
from transformers import CompileConfig

from spec_compile import backend
from spec_compile.backend import BackendOptions, spec
from spec_compile.compat import TORCH
from spec_compile.graph import calls

aten = torch.ops.aten
LINEAR, GROUPED = aten.linear.default, torch.ops.spec_compile.grouped_attention.default
TOLERANCE = 1e-4  # of the spread of the logits
pytestmark = pytest.mark.usefixtures("new_compilations")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_on_a_gpu(mode, dtype):
    """In float32 transformers' own tokens; in bfloat16 the logits of one step are near."""
    net = models.ADMITTED["llama"]().to("cuda", dtype)
    for rows, new in ((1, 12), (3, 30), (1, 40)):
        ids = models.prompts((24, 9))[1][:1].cuda().expand(rows, -1)
        given = dict(do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        compiled = CompileConfig(backend="spec", mode=mode, fullgraph=False)
        got = net.generate(ids, cache_implementation="static", compile_config=compiled, **given)
        if dtype == torch.float32:
            assert torch.equal(got, net.generate(ids, **given))
        assert got.shape == (rows, ids.shape[1] + new)
    assert any(report.summary.startswith("2 attention") for graph in backend.reports() for report in graph)
    step = torch.compile(net, backend="spec", mode=mode)
    ids = models.prompts((24, 9))[1][:1].cuda()
    with torch.no_grad():
        for _ in range(5):
            got, want = step(input_ids=ids).logits.float(), net(input_ids=ids).logits.float()
            assert (got - want).abs().max() <= (1e-3 if dtype == torch.float32 else 0.1) * (want.max() - want.min())


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


@pytest.mark.sweep("qwen3")
@pytest.mark.parametrize("name", models.ADMITTED)
def test_every_architecture_keeps_its_logits(name, interpreted):
    net = models.ADMITTED[name]()
    step, padded = torch.compile(net, backend=spec, dynamic=False), models.prompts((24, 9))[2]
    for mask in (padded, torch.ones_like(padded)):
        check_forward(net, step, mask)
    assert len(interpreted) == 1
    reports = {report.name: report for report in backend.reports()[0]}
    if "lower" in reports:
        return
    attention = reports["use_grouped_attention"]
    if getattr(net.config, "num_key_value_heads", net.config.num_attention_heads) < net.config.num_attention_heads:
        assert attention.summary.startswith("0 ") == (net.config._attn_implementation == "eager")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize("name", ["llama", "mistral", *SLOW])
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


@pytest.mark.slow
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
    for length in (7, 11, 33, 50):
        ids = models.prompts((length, length))[1]
        with torch.no_grad():
            torch.testing.assert_close(step(input_ids=ids).logits, net(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert len(interpreted) <= (1 if dynamic else 3)  # one length; then any that has few rows, any that has many


def test_training_goes_to_inductor_unchanged(interpreted):
    module, x = Linears(), torch.randn(2, 8)
    step = torch.compile(module, backend=spec)
    step(x)[0].sum().backward()
    assert module.q.weight.grad is not None and backend.reports() == []
    assert len(calls(interpreted[0], F.linear)) == 5
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
    with pytest.raises(ValueError, match=r"mode: expected \"default\" or \"reduce-overhead\" .* got 'max-autotune'"):
        spec(gm, [x], mode="max-autotune")
    with pytest.raises(Exception, match="Did you mean 'gqa'"):
        torch.compile(lambda x: x + 1, backend=spec, options={"gpa": False})(x)
    assert replace(BackendOptions(), gqa=False) == BackendOptions(gqa=False)


def test_passes_can_be_switched_off(interpreted):
    with torch.no_grad():
        torch.compile(Linears(), backend=spec, options={"merge_linears": False, "gqa": False})(torch.randn(2, 8))
    (log,) = backend.reports()
    assert [(r.name, r.summary) for r in log][1:3] == [("merge_linears", "off"), ("use_grouped_attention", "off")]


def test_dump_and_reports(tmp_path, interpreted):
    with torch.no_grad():
        torch.compile(Linears(), backend=spec, options={"dump": str(tmp_path / "graphs")})(torch.randn(2, 8))
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    passes = [f"{number}_{step.__name__}" for number, step in enumerate(backend.PIPELINE, 1)]
    assert names == [f"forward0_{name}.py" for name in ("0_before", *passes)]
    assert "split_with_sizes" in (tmp_path / "graphs" / names[2]).read_text()
    (log,) = backend.reports()
    assert log[1].summary == "merged 2 linear layers into 1" and "split_with_sizes" in log[1].code
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
