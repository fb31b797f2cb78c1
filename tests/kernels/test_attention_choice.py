"""The option `attention_backend`: which backend runs the attention of a graph, what it lacks, and the pass.

Without a GPU, graphs are taken for those on one where passes look.
"""

import dataclasses
import logging

import models
import pytest
import torch
from toy_graphs import prefix_then_chunk

import spec_compile
from spec_compile import UnsupportedModelError, passes
from spec_compile.capture.checks import check_tree
from spec_compile.compile.regions import cut
from spec_compile.config import Options
from spec_compile.graph import LayerSpec, ModelGraph, calls
from spec_compile.kernels import attention
from spec_compile.kernels.attention import BACKENDS, Use, backends
from spec_compile.kernels.attention import flashinfer as xqa
from spec_compile.kernels.attention.base import attention_calls
from spec_compile.kernels.card import Card

pytestmark = pytest.mark.usefixtures("flashinfer")


def layer_of(heads=(2, 2), sizes=(64, 64), window=None, softcap=None, sinks=False):
    return LayerSpec(*heads, *sizes, scale=1.0, window=window, softcap=softcap, sinks=sinks)


def test_option_is_a_name_or_names_by_role():
    roles = ("prefill", "verify", "draft")
    assert Options().attention_backends == dict.fromkeys(roles, "auto")
    assert Options(attention_backend="SDPA").attention_backends == dict.fromkeys(roles, "sdpa")
    options = Options(attention_backend={"prefill": "FlashInfer"}, cuda_graphs=True)
    assert options.attention_backends == {"prefill": "flashinfer", "verify": "auto", "draft": "auto"}
    assert options.attention("prefill") == Use("flashinfer", "prefill", captured=False)
    assert options.attention("verify") == Use("auto", "verify", captured=True)
    assert Options(cuda_graphs=False).attention("draft") == Use("auto", "draft", captured=False)


@pytest.mark.parametrize(
    "option, error, message",
    [
        ("tritn", ValueError, r"attention_backend: expected one of auto, triton, .*got 'tritn'. Did you mean 'triton'"),
        ({"verify": "sdp"}, ValueError, "got 'sdp'. Did you mean 'sdpa'"),
        ("flex", ValueError, "expected one of auto, triton, .*sdpa, flashinfer, got 'flex'"),
        ({"verfy": "sdpa"}, ValueError, "expected a name for prefill, verify, draft.*Did you mean 'verify'"),
        (None, TypeError, "expected a name, or a dict of names for prefill, verify, draft, got None"),
        ({"verify": 3}, TypeError, "expected a name, or a dict"),
    ],
)
def test_options_that_are_none(option, error, message):
    with pytest.raises(error, match=message):
        spec_compile.speculate(models.ADMITTED["llama"](), attention_backend=option)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_cpu_has_two(name):
    there = r"runs on cuda, the model is on cpu; there is cpu, sdpa \(or 'auto'\)"
    with pytest.raises(ValueError, match=f"'{name}' {there}"):
        spec_compile.speculate(models.ADMITTED["llama"](), attention_backend=name, compile=False)


def test_explain_says_what_runs_what():
    fast = spec_compile.speculate(models.ADMITTED["llama"](), attention_backend={"verify": "sdpa"}, compile=False)
    assert "attention: prefill by cpu, verify by sdpa\n" in fast.speculation.explain()


@pytest.fixture
def on_gpu(monkeypatch):
    """Called, it makes passes take every graph for one on a GPU."""
    for module in ("attention.tree_attention", "norms"):
        pytest.importorskip(f"spec_compile.kernels.{module}", exc_type=ImportError)
    return lambda: monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))


def rewritten(graph, *use, **settings):
    return passes.run(graph, passes.Settings(attention=Use(*use), **settings))


MODELS = "llama", "gemma2", "gpt_oss", "deepseek_v3"
PAIRS = [(name, model) for model in MODELS for name in BACKENDS if "cuda" in BACKENDS[name].devices]
PAIRS = [pair for pair in PAIRS if pair[0] != "flashinfer" or pair[1] == "llama"]  # it refuses the others


@pytest.fixture
def tiny(monkeypatch):
    """FlashInfer's backend for the tiny models' heads and for float32, which its kernels do not have."""
    less = dataclasses.replace(BACKENDS["flashinfer"], sizes=None, dtypes=frozenset({torch.float32}))
    monkeypatch.setitem(BACKENDS, "flashinfer", less)


@pytest.mark.sweep("triton-llama flashinfer-llama sdpa-deepseek_v3 sdpa-llama")
@pytest.mark.parametrize("name, model", PAIRS)
def test_pass_puts_the_op_into_the_graph(on_gpu, captured, tiny, name, model):
    """The op is there once a layer, and the numbers are those of the graph for a CPU."""
    graph = captured(model)[1]
    plain = rewritten(graph)
    on_gpu()
    ours = rewritten(graph, name, "verify", False)
    assert len(calls(ours.gm, BACKENDS[name].load(Use(captured=False)))) == len(graph.layers)
    assert f"by {name})" in next(report.summary for report in ours.log if report.name == "use_tree_attention")
    want = prefix_then_chunk(plain.gm, graph)
    for function in (ours.gm, *([cut(ours)] if model == "llama" else [])):
        for got, expected in zip(prefix_then_chunk(function, graph), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_check_of_a_backend_with_pages(on_gpu, captured, tiny, monkeypatch):
    """The check's cache is of pages as large as those of a session's, so that no kernel is compiled for it alone."""
    graph = captured("llama")[1]
    on_gpu()
    monkeypatch.setattr(xqa, "PAGES", xqa.PAGES[:1])
    verify = rewritten(graph, "flashinfer", "verify", True)
    monkeypatch.setattr(ModelGraph, "device", torch.device("cpu"))
    check_tree("llama", graph, verify)


@pytest.mark.sweep("triton sdpa")
@pytest.mark.parametrize("name", ["auto", "triton", "sdpa"])
def test_rotation_joins_what_rotates(half_on_gpu, name):
    ours, backend = rewritten(half_on_gpu("llama"), name), BACKENDS["triton" if name == "auto" else name]
    assert ("cos" in backend.takes) == (name in ("auto", "triton"))
    rotates = {"cos" in node.kwargs for node in calls(ours.gm, backend.load(Use()))}
    assert rotates == {"cos" in backend.takes}


def need(on_gpu, use, dtype=torch.bfloat16, name="flashinfer", **layer):
    """What `choose` says of a graph with such a layer behind one that needs nothing."""
    on_gpu()
    graph = ModelGraph(None, (layer_of(), layer_of(**layer)), 8, 8, dtype, None, "")
    return attention.choose(Use(name, *use), graph)


@pytest.mark.parametrize(
    "use, layer, lacks, able",
    [
        (("verify", True), dict(softcap=1.0), "capped scores with token trees in a CUDA graph", "triton, sdpa"),
        (("verify", True), dict(window=8), "sliding windows with token trees in a CUDA graph", "triton, sdpa"),
        (("verify", False), dict(window=8), "sliding windows with token trees", "triton, sdpa"),
        (("draft", False), dict(sizes=(192, 128)), "different head sizes with token trees", "triton, sdpa"),
        (("prefill", False), dict(sizes=(96, 96)), "heads of 96", "triton, sdpa"),
        (("prefill", False), dict(dtype=torch.float32), "float32", "triton, sdpa"),
        (("prefill", False), dict(dtype=torch.float64), "float64", "sdpa"),
    ],
)
def test_what_a_backend_lacks_is_refused(on_gpu, use, layer, lacks, able):
    with pytest.raises(UnsupportedModelError) as caught:
        need(on_gpu, use, **layer)
    message = str(caught.value)
    number = 0 if "dtype" in layer else 1
    assert f"attention_backend: 'flashinfer' cannot run layer {number} of the {use[0]} graph: " in message
    assert lacks in message and f"Pass {{{use[0]!r}: name}} with one of {able}" in message, message


@pytest.mark.parametrize(
    "version, message",
    [
        (None, 'needs FlashInfer: pip install "flashinfer-python>=0.6.1"'),
        ("0.5.3", "needs FlashInfer 0.6.1 or later, 0.5.3 is installed: pip install -U"),
    ],
)
def test_flashinfer_says_what_to_install(installed, version, message):
    installed(version)
    with pytest.raises(ImportError, match=f"attention_backend: 'flashinfer' {message}"):
        BACKENDS["flashinfer"].load(Use("flashinfer"))


def test_caches_of_8_bits_are_an_option(on_gpu):
    assert Options().attention("verify").fp8 is False
    options = Options(kv_cache_dtype="fp8")
    assert [options.attention(role).fp8 for role in attention.ROLES] == [True, True, False]
    known = "auto, fp8, fp8_per_token_head"
    with pytest.raises(ValueError, match=f"kv_cache_dtype: expected one of {known}, got 'fp9'. Did you mean 'fp8'"):
        Options(kv_cache_dtype="fp9")
    with pytest.raises(UnsupportedModelError, match=r"'cpu' cannot run .*does not have caches of 8 bits"):
        spec_compile.speculate(models.ADMITTED["llama"](), kv_cache_dtype="fp8", compile=False)
    use = "verify", True, True
    with pytest.raises(UnsupportedModelError, match=r"caches of 8 bits .*with one of triton$"):
        need(on_gpu, use)
    assert need(on_gpu, use, name="auto") is BACKENDS["triton"]


@pytest.mark.parametrize("capability", [(8, 6), (8, 9)])
def test_caches_of_8_bits_in_a_graph(on_gpu, captured, monkeypatch, capability):
    """The op sees caches of what the graph says that they are; half the bytes of 16 bits, a quarter of 32."""
    graph = captured("llama")[1]
    plain = rewritten(graph)
    on_gpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if capability < (8, 9):
        with pytest.raises(ValueError, match=r"'fp8' needs a GPU of compute capability 8.9, got 8.6; pass 'auto'"):
            rewritten(graph, "auto", "verify", True, True)
        return
    ours = rewritten(graph, "auto", "verify", True, True)
    assert (ours.cache_dtype, ours.token_bytes * 4) == (torch.float8_e4m3fn, plain.token_bytes)
    assert plain.cache_dtype is None is graph.cache_dtype
    scaled, heads = rewritten(graph, "auto", "verify", True, True, True), sum(x.kv_heads for x in graph.layers)
    assert scaled.token_bytes == ours.token_bytes + 8 * heads
    indices = [[node.kwargs[name].args[1] for name in ("key_cache", "value_cache", "scales")] for node in
               attention_calls(scaled)]  # fmt: skip
    assert indices == [[3 * layer + part for part in range(3)] for layer in range(len(graph.layers))]


def test_a_backend_that_is_able_is_taken(on_gpu):
    """The one that is named, or the first."""
    for layer in (dict(), dict(window=8), dict(softcap=1.0), dict(sinks=True)):
        assert need(on_gpu, ("prefill", False), **layer) is BACKENDS["flashinfer"]
    assert need(on_gpu, ("draft", True)) is need(on_gpu, ("draft", True), sinks=True) is BACKENDS["flashinfer"]
    assert need(on_gpu, ("verify", True), name="auto") is BACKENDS["triton"]
    assert need(on_gpu, ("draft", True), name="auto", window=8) is BACKENDS["triton"]
    assert need(on_gpu, ("verify", True), name="auto", dtype=torch.float64) is BACKENDS["sdpa"]
    assert need(on_gpu, ("prefill", False), name="auto", dtype=torch.float32) is BACKENDS["triton"]


def test_heads_without_room_in_shared_memory(on_gpu, monkeypatch, caplog):
    """A T4 holds no tiles of heads of 512 in float32: plain PyTorch serves them, or they are refused by name."""
    monkeypatch.setattr(backends, "card_of", lambda device: Card("T4", (7, 5), 40, 65_536))
    monkeypatch.setattr(backends, "multiplied_bytes", lambda dtype, device: 4)
    wide = dict(sizes=(512, 512), dtype=torch.float16)
    with caplog.at_level(logging.WARNING, "spec_compile"):
        for _ in range(2):
            assert need(on_gpu, ("verify", True), name="auto", **wide) is BACKENDS["sdpa"]
    lack = "73728 bytes of shared memory for heads of 512 (the GPU has 65536)"
    assert caplog.messages == [f"attention by sdpa, because 'triton' does not have {lack}"]
    with pytest.raises(UnsupportedModelError, match=r"does not have 73728 bytes of shared memory for heads of 512"):
        need(on_gpu, ("verify", True), name="triton", **wide)
    assert need(on_gpu, ("verify", True), name="auto", sizes=(256, 256), dtype=torch.float16) is BACKENDS["triton"]


@pytest.mark.parametrize("role", ["verify", "prefill"])
def test_each_graph_has_its_own(monkeypatch, role):
    """The engine's verify and prefill graphs, and a draft model's."""
    seen = {}

    def run(graph, settings, pipeline=None):
        seen[settings.purpose] = settings.attention.name
        return original(graph, settings, pipeline)

    original = passes.run
    monkeypatch.setattr(passes, "run", run)
    target, draft = models.ADMITTED["llama"](), models.ADMITTED["llama"]()
    spec_compile.speculate(target, "draft_model", draft=draft, attention_backend={role: "sdpa"})
    assert {name: seen[name] for name in attention.ROLES} == {**dict.fromkeys(attention.ROLES, "auto"), role: "sdpa"}
