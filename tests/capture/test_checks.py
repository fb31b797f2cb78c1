"""The checks have power: a factor of 1.01 is refused in every dtype, and so are faults of one node or one norm."""

import functools

import models
import pytest
import torch
from sweeps import thinned
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from toy_graphs import add_to_eps

import spec_compile
from spec_compile import UnsupportedModelError, passes
from spec_compile.capture import checks, yardstick
from spec_compile.capture.checks import ANY, check_capture, check_generation, check_tree
from spec_compile.capture.trace import capture
from spec_compile.capture.yardstick import DistantLogits, compare_logits, compare_rounding, full_precision, in_float32
from spec_compile.graph import ModelGraph, calls
from spec_compile.kernels.attention import Use, attention_calls
from spec_compile.kernels.linear import PRODUCT

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "deepseek_v3"]
HALF = [torch.float16, torch.bfloat16]
MARKER = torch.ops.spec_compile.attention.default
DIFFERS = "differs from the model's own forward"


@functools.cache
def graphs(name, dtype, device="cpu"):
    """A tiny model, its captured graph and the one that verifies, not to be changed."""
    if device == "cuda":
        spec_compile.kernels.load(torch.device("cuda"))
    model = models.ADMITTED[name]().to(device, dtype)
    graph = capture(model)
    return model, graph, passes.run(graph, passes.Settings())


def attentions(graph):
    """The attention calls of a graph, captured or rewritten for a CPU or a GPU."""
    return calls(graph.gm, MARKER) or attention_calls(graph)


def scaled(graph, factor):
    """The graph with the softmax scale of every layer multiplied by `factor`."""
    faulty = graph.copy()
    for node in attentions(faulty):
        if "scale" in node.kwargs:
            node.update_kwarg("scale", node.kwargs["scale"] * factor)
        else:
            node.update_arg(4, node.args[4] * factor)
    faulty.gm.recompile()
    return faulty


def mapped(graph, function):
    """The graph with the attention's output of every layer put through `function`."""
    faulty = graph.copy()
    for node in attentions(faulty):
        with faulty.gm.graph.inserting_after(node):
            new = faulty.gm.graph.call_function(function, (node,))
        node.replace_all_uses_with(new, lambda user, new=new: user is not new)
    faulty.gm.recompile()
    return faulty


def larger(output):
    return output * 1.01


def refused(check, *arguments):
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        check(*arguments)


@pytest.mark.sweep("llama-dtype0-cpu mixtral-dtype8-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, dtype", thinned(2, FAMILIES, HALF))
def test_sound_models_pass_and_a_factor_of_1_01_does_not(name, dtype, device):
    model, graph, verify = graphs(name, dtype, device)
    check_capture(model, graph)
    check_tree(name, graph, verify)
    refused(check_capture, model, scaled(graph, 1.01))
    refused(check_tree, name, graph, scaled(verify, 1.01))
    if name != "gemma3":  # a norm behind attention takes every factor off again
        refused(check_capture, model, mapped(graph, larger))
        refused(check_tree, name, graph, mapped(verify, larger))


@pytest.mark.sweep("llama-dtype0-1.01 llama-dtype6-1.001")
@pytest.mark.parametrize(
    "name, dtype, factor", [*((name, torch.float32, 1.01) for name in FAMILIES), ("llama", torch.float64, 1.001)]
)
def test_factors_in_full_precision(name, dtype, factor):
    model, graph, verify = graphs(name, dtype)
    refused(check_capture, model, scaled(graph, factor))
    refused(check_tree, name, graph, scaled(verify, factor))


@pytest.mark.parametrize("dtype", HALF)
def test_one_position_mask_bit_or_eps_is_seen(dtype, monkeypatch):
    _, graph, verify = graphs("llama", dtype)
    run = checks.tree_logits

    def later(*arguments):
        *rest, depth, path = arguments
        depth = depth.clone()
        depth[0, 9] += 1
        return *rest, depth, path

    def unseen(*arguments):
        *rest, ancestors, depth, path = arguments
        ancestors = ancestors.clone()
        ancestors[0, 14] ^= 1 << 8
        return *rest, ancestors, depth, path

    for change in (later, unseen):
        with monkeypatch.context() as patch:
            patch.setattr(checks, "tree_logits", lambda *arguments, change=change: run(*change(*arguments)))
            refused(check_tree, "llama", graph, verify)
    check_tree("llama", graph, verify)
    faulty = verify.copy()
    add_to_eps(faulty.gm, 0.01)
    refused(check_tree, "llama", graph, faulty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [4, 9, None])
def test_windows_of_prompts_and_of_trees_are_compared(dtype, window):
    """On a text that is longer than the window of 8."""
    model, graph, verify = graphs("gemma3", dtype)
    prefill = passes.run(graph, passes.Settings(attention=Use(role="prefill")))
    assert check_generation(model, graph, prefill, verify) == ANY

    def widened(rewritten):
        faulty = rewritten.copy()
        for node in attentions(faulty):
            if node.kwargs["window"] == 8:
                node.update_kwarg("window", window)
        faulty.gm.recompile()
        return faulty

    refused(check_generation, model, graph, widened(prefill), verify)
    refused(check_generation, model, graph, prefill, widened(verify))


def coarse(output):
    """Right in float32, and rounded to 5 bits otherwise."""
    if output.dtype == torch.float32:
        return output
    return output.to(torch.float8_e4m3fn).to(output.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_beyond_the_models_own_noise_is_refused(device):
    model, graph, verify = graphs("llama", torch.float16, device)
    for check, arguments in (
        (check_capture, (model, mapped(graph, coarse))),
        (check_tree, ("", graph, mapped(verify, coarse))),
    ):
        with pytest.raises(UnsupportedModelError, match=r"away from those in float32, .*\(allowed: 3 times that\)"):
            check(*arguments)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, float("-inf")])
def test_forbidden_tokens_hide_no_difference(least):
    """The least numbers of a dtype have a spread in which any difference would be lost."""
    exact = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    exact[..., 40:] = least
    compare_logits("", "", exact.clone(), exact)
    moved, allowed = exact.clone(), exact.clone()
    moved[0, 0, 0] += 0.1
    allowed[0, 0, 40] = 0
    for wrong in (moved, allowed):
        with pytest.raises(UnsupportedModelError, match="it would change the answer"):
            compare_logits("", "", wrong, exact)
    for dtype in HALF:
        plain = exact.clamp(min=torch.finfo(dtype).min).to(dtype)
        compare_rounding("", "", plain.clone(), plain, exact)
        for wrong in (moved, allowed):
            with pytest.raises(UnsupportedModelError, match="away from those in float32"):
                compare_rounding("", "", wrong.clamp(min=torch.finfo(dtype).min).to(dtype), plain, exact)


def test_a_forward_without_float32_is_compared_in_16_bits(monkeypatch, caplog):
    """The log says so."""
    model, graph, _ = graphs("llama", torch.float16)
    forward = type(model).forward

    def half_only(self, *args, **kwargs):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("only support fp16 and bf16")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", half_only)
    with caplog.at_level("INFO", logger="spec_compile"):
        check_capture(model, graph)
    assert "the model's own forward is checked in 16 bits alone" in caplog.text
    refused(check_capture, model, scaled(graph, 1.05))


@pytest.mark.parametrize("name, error", [("llama", DistantLogits), ("mixtral", UnsupportedModelError)])
def test_one_text_decides_nothing_where_rounding_might(name, error):
    """A difference in float32 of a model without experts counts at once."""
    graph, seen = graphs(name, torch.float32)[1], []

    def check(failures, kind, seed):
        seen.append(seed)
        if seed < failures:
            raise kind("far away")

    checks.on_some_text(graph, functools.partial(check, checks.TEXTS - 1, error))
    assert seen == list(range(checks.TEXTS))
    with pytest.raises(error):
        checks.on_some_text(graph, functools.partial(check, checks.TEXTS, error))
    if name == "llama":
        seen.clear()
        with pytest.raises(UnsupportedModelError):
            checks.on_some_text(graph, functools.partial(check, 1, UnsupportedModelError))
        assert seen == [0]


def test_logits_without_noise_of_16_bits_may_be_rounded_in_float32():
    """Those of a model that computes in float32, though some of its weights have 16 bits."""
    exact = torch.randn(4, 100)
    compare_rounding("model", "graph", exact + 1e-6, exact, exact)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        compare_rounding("model", "graph", exact + 1e-4, exact, exact)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_in_float32_widens_flex_attention():
    q, k, v = torch.randn(3, 1, 2, 8, 16).bfloat16().unbind()
    with in_float32():
        out = flex_attention(q, k, v, scale=0.25)
    torch.testing.assert_close(out, scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.25))


@pytest.mark.parametrize("bias", [None, torch.randn(30).bfloat16()])
@pytest.mark.parametrize(
    "product, norm, part",
    [
        (torch.nn.functional.linear, {}, (16, 7)),
        (PRODUCT, {}, (7, 16)),  # an output head
        (PRODUCT, dict(squares=torch.full((6, 1), 16.0), eps=0.0), (7, 16)),
    ],
    ids=["linear", "head", "head with a norm"],
)
def test_in_float32_a_large_weight_is_widened_by_parts(product, norm, part, bias, monkeypatch):
    monkeypatch.setattr(yardstick, "COLUMNS", 7)
    widened, shapes = yardstick._widened, []
    monkeypatch.setattr(yardstick, "_widened", lambda x: shapes.append(getattr(x, "shape", None)) or widened(x))
    weight, x = torch.randn(30, 16, dtype=torch.bfloat16), torch.randn(2, 3, 16, dtype=torch.bfloat16)
    with in_float32():
        out = product(x, weight, bias, **norm)
    assert shapes.count(part) == 4 and not {(16, 30), (30, 16)} & {*shapes}
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_in_float32_widens_and_writes_to_no_half():
    weight, x = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(2, 4, dtype=torch.bfloat16)
    with in_float32():
        out = torch.nn.functional.linear(x, weight).to(torch.bfloat16)
        assert out.dtype == torch.zeros(1, dtype=torch.float16).dtype == torch.float32
        with pytest.raises(RuntimeError, match="writes to a tensor of 16 bits"):
            x.add_(1)
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-5, rtol=1e-5)
    assert (x + x).dtype == torch.bfloat16


def test_the_precision_of_matrix_products_is_restored():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with full_precision():
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("name, dtype", thinned(2, ["llama", "qwen3"], HALF))
def test_a_graph_for_a_gpu_on_a_cpu(name, dtype, monkeypatch):
    """Fused norms and attention that rotates, in float32 and as they round, by what their ops mean on a CPU."""
    for kernel in ("attention.tree_attention", "norms", "linear.skinny_gemm"):
        pytest.importorskip(f"spec_compile.kernels.{kernel}", exc_type=ImportError)
    _, graph, _ = graphs(name, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
        verify = passes.run(graph, passes.Settings())
    assert calls(verify.gm, torch.ops.spec_compile.add_rms_norm.default) and attentions(verify)
    check_tree(name, graph, verify)
    refused(check_tree, name, graph, scaled(verify, 1.01))
