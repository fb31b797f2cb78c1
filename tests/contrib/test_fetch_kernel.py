"""Routed experts that accelerate has offloaded: tokens of mixtures, fetches of chosen experts, and the kernel's copies.

Without a GPU the kernel runs in Triton's interpreter; ``pytest -m gpu`` runs it on a CUDA device.
"""

import functools

import accelerate
import models
import pytest
import tiny_models
import torch
from offloaded import CPU, WAYS, answers, answers_on, mapped_file
from places import places
from sweeps import thinned

from spec_compile import passes, speculate
from spec_compile.capture.trace import capture
from spec_compile.contrib import offload
from spec_compile.graph import calls
from spec_compile.kernels import experts
from spec_compile.kernels.experts import ExpertFormat

fetch_kernel = pytest.importorskip("spec_compile.contrib.kernels.fetch_kernel", exc_type=ImportError)
MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("name, way", thinned(2, MIXTURES, ["all in memory", "all on disk"]))
def test_mixtures(name, way, tmp_path):
    want = answers(models.ADMITTED[name]())
    net = WAYS[way](models.ADMITTED[name](), tmp_path)
    fast = speculate(net, compile=False)
    assert answers(fast) == want == answers(net)
    held = {id(p): p for n, p in fast.speculation.original.named_parameters() if ".experts." in n and p.dim() == 3}
    read = {p.data_ptr() for p in fast.speculation.engine.runtime.verify.gm.parameters()}
    assert len(held) == 2 * len(net.model.layers)
    assert all(p in offload.PLACES and p.data_ptr() in read for p in held.values())
    if way == "all on disk":
        assert all(mapped_file(p).endswith(".dat") for p in held.values())


@pytest.mark.parametrize("name", MIXTURES)
def test_chosen_experts_are_fetched(name, monkeypatch):
    """A product fetches the experts of its own tokens, and reads no other."""
    want, empty_like = answers(models.ADMITTED[name]()), torch.empty_like

    def poisoned(x, **options):
        return empty_like(x, **options).fill_(torch.nan if x.is_floating_point() else 0)

    net = offload.without_hooks(accelerate.cpu_offload(models.ADMITTED[name](), CPU), fetches=True)
    fast = speculate(net, compile=False)
    monkeypatch.setattr(torch, "empty_like", poisoned)  # what is not fetched
    assert answers(fast) == want
    graph = fast.speculation.engine.runtime.verify
    products = [node for op in experts.PRODUCTS for node in calls(graph.gm, op)]
    parts = [part for node in products for part in node.args[-2]]
    assert parts and all(part.target is offload.FETCH_EXPERTS for part in parts)
    assert all(part.args[1] is node.args[1] for node in products for part in node.args[-2])
    assert len(parts) == len(calls(graph.gm, offload.FETCH_EXPERTS))
    assert not any(".experts." in node.args[0].target for node in calls(graph.gm, offload.FETCH))
    size = sum(part.args[0].meta["val"].nbytes for part in parts)
    text = f"the chosen ones of {size / 1e9:.3f} GB of experts in the host's memory"
    assert text in fast.speculation.explain()
    assert experts.parts_of(products[0]) == [part.args[0] for part in products[0].args[-2]]


def test_experts_that_another_node_reads_are_fetched_whole():
    net = offload.without_hooks(accelerate.cpu_offload(models.ADMITTED["mixtral"](), CPU), fetches=True)
    graph = capture(net)
    up = calls(graph.gm, experts.UP)[0]
    (part,) = up.args[-2]
    with graph.gm.graph.inserting_after(part):
        sum_ = graph.gm.graph.call_function(torch.ops.aten.sum.default, (part,))
    output = next(node for node in graph.gm.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], sum_),)
    offload.share_fetches(graph, passes.Settings())
    assert up.args[-2] == [part] and part.target is offload.FETCH
    assert all(n.target is offload.FETCH_EXPERTS for node in calls(graph.gm, experts.DOWN) for n in node.args[-2])


@pytest.mark.parametrize("name", ["DbrxForCausalLM", "AriaTextForCausalLM"])
def test_experts_that_capture_reads_before_it_traces_are_not_fetched(name):
    net = offload.without_hooks(accelerate.cpu_offload(tiny_models.build(name), CPU), fetches=True)
    graph = capture(net)
    products = calls(graph.gm, experts.UP)
    assert products and all(part.op == "get_attr" for node in products for part in node.args[-2])
    assert calls(graph.gm, offload.FETCH)  # of attention


@pytest.mark.parametrize("place", places(torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape, tokens", [((5, 3, 7), 1), ((8, 64, 33), 3), ((3, 1), 300), ((4, 2, 4100), 2)])
def test_the_kernel_that_fetches(place, shape, tokens):
    held, top = torch.randn(shape).to(place[1]), min(2, shape[0])
    ids = torch.stack([torch.randperm(shape[0] - 1)[:top] for _ in range(tokens)]).to(place[0])
    if place[0] == "cuda":
        held = held.pin_memory()
    out = torch.full(shape, 7.0, dtype=place[1], device=place[0])
    fetch_kernel.fetch(held, ids, out)
    want = torch.full_like(held, 7.0)
    for expert in ids.unique().tolist():
        want[expert] = held[expert]
    assert torch.equal(out.cpu(), want) and (want[-1] == 7.0).all()
    plain = offload.fetch_experts(held, ids).cpu()
    assert torch.equal(plain[ids.unique().cpu()], want[ids.unique().cpu()])


@pytest.mark.parametrize(
    "shape, dtype, words", [((3, 4, 4), torch.bfloat16, torch.int64), ((3, 2, 3), torch.bfloat16, torch.int32),
                            ((3, 5), torch.bfloat16, torch.int16), ((3, 7), torch.float8_e4m3fn, torch.uint8)],
)  # fmt: skip
def test_words_of_experts(shape, dtype, words):
    held = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    view = fetch_kernel.in_words(held)
    assert view.dtype == words and view.shape[0] == 3 and view.nbytes == held.nbytes
    assert view.data_ptr() == held.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_on_a_gpu(name):
    """The tokens in float32 by captured rounds, and a round that copies the chosen experts from pinned memory."""
    want = answers_on(models.ADMITTED[name]().to("cuda"))
    net = accelerate.cpu_offload(models.ADMITTED[name](), torch.device("cuda", 0))
    fast = speculate(net)
    fast.speculation.warmup()
    assert answers_on(fast) == want
    assert calls(fast.speculation.engine.runtime.verify.gm, offload.FETCH_EXPERTS)
    held = [p for n, p in fast.speculation.original.named_parameters() if ".experts." in n and p.dim() == 3]
    assert held and all(p.is_pinned() for p in held)
    assert "the chosen ones of" in fast.speculation.explain()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4, 70, 600])
def test_bits_of_fetched_experts(tokens):
    """The products by experts from the host have the bits of those by experts on the GPU, also in a CUDA graph."""
    count, top, size, inner = 16, 4, 256, 128
    up, down = torch.randn(count, 2 * inner, size), torch.randn(count, size, inner)
    up, down = ((each / 16).to(torch.bfloat16).pin_memory() for each in (up, down))
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(count - 3)[:top] for _ in range(tokens)]).cuda()
    weights, layouts = torch.rand(tokens, top, device="cuda"), (ExpertFormat("silu").text, ExpertFormat().text)

    def run(first, second):
        y = experts.UP(x, ids, [first()], layouts[0])
        return experts.DOWN(y, ids, weights, [second()], layouts[1])

    want = run(up.cuda, down.cuda)
    fetched = functools.partial(run, *(functools.partial(offload.FETCH_EXPERTS, each, ids) for each in (up, down)))
    assert torch.equal(fetched(), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fetched()
    for _ in range(2):
        ids.copy_(torch.stack([torch.randperm(count)[:top] for _ in range(tokens)]))  # other experts in each replay
        graph.replay()
        assert torch.equal(got, run(up.cuda, down.cuda))
