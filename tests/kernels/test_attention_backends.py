"""Attention backends: each op means what `spec_compile::tree_attention` means, and the option puts it into the graphs.

Without a GPU the ops run on CPU tensors, Triton's in its interpreter; ``pytest -m gpu`` runs them on a CUDA device.
"""

import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import models
import pytest
import torch
from attention_cases import PLACES, SMALL, Case, chain, random_tree, star
from captures import capture
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import described
from places import GPU, ON_GPU
from torch._dynamo.testing import CompileCounterWithBackend

import spec_compile
from spec_compile import UnsupportedModelError, passes
from spec_compile.capture.checks import check_tree
from spec_compile.compile.regions import cut
from spec_compile.compile.serialise import graph_of
from spec_compile.compile.trace import trace
from spec_compile.config import Options
from spec_compile.graph import LayerSpec, ModelGraph, calls
from spec_compile.kernels import attention, ops
from spec_compile.kernels.attention import BACKENDS, Use, backends
from spec_compile.kernels.attention import flashinfer as xqa
from spec_compile.kernels.attention import tree_attention as kernels
from spec_compile.kernels.attention.base import AttentionCall, attention_calls
from spec_compile.kernels.attention.flashinfer import add_sinks, merge
from spec_compile.kernels.card import Card
from spec_compile.tree import ancestry

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # rows that fill up a tile, in NumPy
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]


def fake_prefill(q, k, v, causal, sm_scale, logits_soft_cap, window_left, return_lse):
    """`flashinfer.single_prefill_with_kv_cache` as it is documented: q [N, H, D], k, v [S, Hkv, D], base-2 sums."""
    assert return_lse and all(x.stride(-1) == 1 for x in (q, k, v))
    assert causal or window_left == -1
    k, v = (x.transpose(0, 1) for x in (k, v))
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * sm_scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    back = torch.arange(q.shape[0])[:, None] + k.shape[1] - q.shape[0] - torch.arange(k.shape[1])
    if causal:
        scores = scores.masked_fill(back < 0, -math.inf)
    if window_left >= 0:
        scores = scores.masked_fill(back > window_left, -math.inf)
    lse = scores.logsumexp(2).transpose(0, 1) / math.log(2)
    return (scores.softmax(2) @ v).transpose(0, 1).to(q.dtype), lse.float()


def fake_xqa(
    q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
    sinks=None, q_scale=1.0, kv_layout="NHD", q_seq_len=1, mask=None,
):  # fmt: skip
    """`flashinfer.xqa.xqa` as it is documented: q and output [B, 1, N, H, D] or, for one node, [B, 1, H, D]."""
    assert kv_layout == "HND" and (mask is None) == (q_seq_len == 1) == (q.dim() == 4) and page_size in xqa.PAGES
    assert q.is_contiguous() and output.shape == q.shape and not semaphores.any()
    assert (page_table.dtype, seq_lens.dtype) == (torch.int32, torch.uint32) and seq_lens.shape == (len(q), 1)
    assert sinks is None or (sinks.dtype, sinks.shape[0]) == (torch.float32, num_kv_heads)
    queries = q.view(len(q), q_seq_len, num_kv_heads, -1, q.shape[-1]).double()
    for row, (pages, length) in enumerate(zip(page_table.tolist(), seq_lens.flatten().tolist())):
        k, v = (torch.cat([cache[page] for page in pages], 1)[:, :length].double() for cache in (k_cache, v_cache))
        scores = torch.einsum("nhgd,hsd->hgns", queries[row], k) * q_scale / math.sqrt(q.shape[-1])
        if mask is not None:
            assert mask.dtype == torch.uint16 and mask.shape == (len(q), q_seq_len, (q_seq_len + 31) // 32 * 2)
            words = mask[row].int().repeat_interleave(16, 1)[:, :q_seq_len]
            seen = words >> (torch.arange(q_seq_len) % 16) & 1
            scores[..., length - q_seq_len :].masked_fill_(seen == 0, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, :, None, None].expand(*scores.shape[:3], 1)], 3)
        probabilities = scores.softmax(3)[..., :length]
        output[row] = torch.einsum("hgns,hsd->nhgd", probabilities, v).reshape(output[row].shape).to(output.dtype)


@pytest.fixture(autouse=not GPU)
def fake_flashinfer(monkeypatch):
    """On a CPU FlashInfer's module is one that computes what its documentation says."""
    functions = {"flashinfer": ("single_prefill_with_kv_cache", fake_prefill), "flashinfer.xqa": ("xqa", fake_xqa)}
    for name, (function, fake) in functions.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, function, fake)
        monkeypatch.setitem(sys.modules, name, module)
    installed(monkeypatch, "0.6.1")


def installed(monkeypatch, version):
    """FlashInfer is installed in this version (None: not at all)."""

    def found(name):
        if name == "flashinfer-python" and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == "flashinfer-python" else original(name)

    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", found)


def op_of(name, device, captured=False):
    """The backend's op, of one signature; on a CPU Triton's kernel in its interpreter. Skips what is not installed."""
    if name == "triton" and device == "cpu":
        return lambda *inputs: kernels.launch(AttentionCall(*inputs), SMALL._replace(block_m=64, block_n=64))
    try:
        op = BACKENDS[name].load(Use(name, captured=captured))
    except ImportError as error:
        pytest.skip(str(error))
    return functools.partial(op, scales=None)


def layer_of(heads=(2, 2), sizes=(64, 64), window=None, softcap=None, sinks=False):
    return LayerSpec(*heads, *sizes, scale=1.0, window=window, softcap=softcap, sinks=sinks)


def check(name, place, *arguments, captured=False, **options):
    """The op computes a random case, or the backend says that it does not."""
    device, dtype = place
    if name == "flashinfer" and place == ("cuda", torch.float32):
        pytest.skip("FlashInfer has 16 bits alone")
    case = Case(place, *arguments, **options)
    case.caches = [cache.clone() for cache in case.clean]  # unseen slots are multiplied by 0
    (softcap, window), sinks = case.rest[1:], case.sinks is not None
    layer = layer_of(case.q.shape[1:2] + case.k.shape[1:2], (case.k.shape[3], case.v.shape[3]), window, softcap, sinks)
    use = Use(name, "prefill" if case.ancestors is None and not captured else "verify", captured)
    lack = BACKENDS[name].why_not(layer, torch.float16 if device == "cpu" else dtype, use, torch.device("cpu"))
    if lack is None:
        inputs = case.inputs()[:12]
        case.compare(op_of(name, device, captured)(*inputs), inputs[3:5])
    return lack


EVERYWHERE = pytest.mark.parametrize("place", PLACES)
FOR_GPUS = [name for name, backend in BACKENDS.items() if "cuda" in backend.devices]
ALL = pytest.mark.parametrize("name", FOR_GPUS)
KINDS = {
    "full": dict(),
    "window": dict(window=20),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "all": dict(window=5, softcap=3.0, sinks=True),
}


@pytest.mark.sweep(8)
@EVERYWHERE
@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_kinds_of_attention(place, name, kind, causal):
    lack = check(name, place, [0, 63, 70], 7, random_tree(7), (4, 2), (64, 64), causal=causal, **KINDS[kind])
    assert (lack is not None) == (name == "flashinfer" and not causal and "window" in KINDS[kind]), lack


SHAPES = [
    *(([127, 128, 129] if nodes < 33 else [128], nodes, dict(heads=(2, 1))) for nodes in (1, 2, 16, 33, 64)),
    *(([60, 0], 80, dict(causal=True, window=window, heads=(2, 1), sizes=(128, 128))) for window in (None, 40)),
    ([300, 130, 5], 5, dict(parents=chain(5), heads=(2, 1), window=9)),  # blocks beyond the window are skipped
    *(
        ([33], 3, dict(parents=star(3), heads=heads, sizes=sizes))
        for heads, sizes in (
            ((2, 2), (96, 96)), ((4, 1), (128, 128)), ((8, 1), (64, 64)), ((2, 1), (256, 256)), ((2, 2), (192, 128)),
        )
    ),
]  # fmt: skip


@pytest.mark.sweep(2)
@EVERYWHERE
@ALL
@pytest.mark.parametrize("lengths, nodes, options", SHAPES)
def test_shapes(place, name, lengths, nodes, options):
    """Trees, causal chunks, heads and sizes; FlashInfer lacks some."""
    options = dict(parents=random_tree(nodes), sizes=(64, 64)) | options
    lack = check(name, place, lengths, nodes, **options)
    foreign = not {*options["sizes"]} <= {64, 128, 256} or ("window" in options and "causal" not in options)
    assert (lack is not None) == (name == "flashinfer" and foreign), lack


@EVERYWHERE
@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("option", ["", "sinks", "causal"])
def test_xqa(place, nodes, option):
    """FlashInfer in a CUDA graph: pages of the static cache, bits of the tree, lengths on the device."""
    if place[0] == "cuda" and nodes not in (1, 16):
        pytest.skip("each number of nodes compiles for half a minute")
    options = {option: True} if option else {}
    options |= dict(captured=True, heads=(8, 2), sizes=(128, 128))
    for lengths, capacity in (([0], 128), ([127, 128, 129], 256), ([300, 5], 368)):
        if place[0] == "cpu" or capacity % 128 == 0:
            assert check("flashinfer", place, lengths, nodes, random_tree(nodes), capacity=capacity, **options) is None


def test_xqa_leaves_large_chunks_to_the_host():
    assert check("flashinfer", ("cpu", torch.float32), [60, 0], 80, captured=True, causal=True, sizes=(64, 64)) is None


def test_page_sizes():
    assert [xqa.page_size(slots) for slots in (1280, 192, 96, 16)] == [128, 64, 32, 16]
    with pytest.raises(ValueError, match=r"'flashinfer' needs a cache of whole pages of 16.*got 100"):
        xqa.page_size(100)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("place", PLACES)
@ALL
@settings(max_examples=20 if GPU else 3)
@given(data=st.data())
def test_anything(place, name, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    nodes = data.draw(st.integers(1, 64 if GPU else 20))
    parents = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, nodes))]
    lengths = data.draw(st.sampled_from([[0], [15], [16], [127], [128], [5, 90, 64]]))
    options = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.sampled_from([None, 3, 40])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sinks": data.draw(st.booleans()),
    }
    heads = data.draw(st.sampled_from([(1, 1), (4, 1), (6, 2)]))
    if name == "flashinfer" and not options["causal"]:
        options["window"] = None
    assert check(name, place, lengths, nodes, parents, heads, (64, 64), **options) is None


# what the ops are made of ---------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_merge_is_attention_over_both(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any))
    scores, values = 9 * torch.randn(4, 3, sum(sizes), dtype=torch.float64), torch.randn(sum(sizes), 8).double()
    parts = []
    for part, held in zip(scores.split(sizes, 2), values.split(sizes)):
        parts += [(part.softmax(2) @ held).nan_to_num(), part.logsumexp(2)]
    out, lse = merge(*parts)
    torch.testing.assert_close(out, scores.softmax(2) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(2))
    sinks = torch.randn(3, dtype=torch.float64)
    with_sinks = torch.cat([scores, sinks[:, None].expand(4, 3, 1)], 2).softmax(2)[..., :-1] @ values
    torch.testing.assert_close(add_sinks(out, lse, sinks), with_sinks)
    half, sums = merge(torch.ones(2, 3).bfloat16(), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2))
    assert torch.equal(half, torch.full((2, 3), 0.5).bfloat16()) and sums.dtype == torch.float32  # the dtype stays


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=3),
    nodes=st.sampled_from([1, 7, 64, 200]),
    window=st.sampled_from([None, 1, 20, 128, 300]),
    tree=st.sampled_from([chain, star, random_tree]),
)
def test_flex_counts_the_blocks_that_are_seen(lengths, nodes, window, tree):
    """All of them, each once, and where the block is a chain no others; inside them the mask is that of `tree_mask`,
    and in those that count as full nothing is hidden."""
    case = Case(("cpu", torch.float32), lengths, nodes, tree(nodes), window=window, causal=nodes > 64, capacity=768)
    given_ = case.lengths, case.ancestors, case.positions, window
    mask = backends.block_mask(768, *given_)
    assert mask.shape == (len(lengths), 1, nodes, 768)
    places = torch.meshgrid(*(torch.arange(n) for n in (len(lengths), nodes, 768)), indexing="ij")
    seen = mask.mask_mod(places[0], None, *places[1:])
    expected = ops.tree_mask(case.positions, *given_[:2], 768, window, 1, torch.float32)[:, 0] == 0
    assert torch.equal(seen, expected)
    for row in range(len(lengths)):
        listed, full = listed_blocks(mask, row)
        by_block = expected[row].unflatten(1, (6, backends.BLOCK))
        assert by_block[:, full].all() and len(set(listed + full)) == len(listed + full)
        wanted = by_block.any(0).any(1).nonzero().flatten().tolist()
        assert set(listed + full) >= set(wanted)
        if tree is chain or nodes > 64:
            assert sorted(listed + full) == wanted


def listed_blocks(mask, row):
    """The blocks of the cache that a mask lists for a row: those to be masked, and those that need none."""
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    return [[] if count is None else blocks[row, 0, 0, : int(count[row])].tolist() for count, blocks in lists]


VARYING = 37
"""Nodes of the first call, a number that no other size has."""


@pytest.mark.sweep("sdpa-False flex-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_one_compilation_serves_all_sizes(name, causal):
    """Nothing is specialised for the number of nodes that is seen first."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(op_of(name, "cpu"), backend=counter, fullgraph=True)
    for nodes in (VARYING, 2, 64, *([150, 400] if causal else [])):
        case = Case(("cpu", torch.float32), [50, 9], nodes, heads=(4, 2), capacity=512, causal=causal, window=30)
        case.caches = [cache.clone() for cache in case.clean]
        inputs = case.inputs()[:12]
        for tensor in inputs:
            for dim in range(tensor.dim() if isinstance(tensor, torch.Tensor) and nodes == VARYING else 0):
                if tensor.shape[dim] == VARYING:
                    torch._dynamo.mark_dynamic(tensor, dim)
        case.compare(op(*inputs), inputs[3:5])
    assert counter.frame_count == 1


@pytest.mark.sweep("None-False 30-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_flex_is_a_part(causal, window):
    """Its mask, a graph inside of the graph, is stored as rows, too."""
    first = Case(("cpu", torch.float32), [50, 9], VARYING, heads=(4, 2), capacity=512, causal=causal, window=window)
    example, constants = first.inputs()[:8], first.inputs()[8:12]
    run = op_of("flex", "cpu")
    with torch.no_grad():
        traced = trace(
            lambda *inputs: run(*inputs, *constants), tuple(example), lambda size: size == VARYING, torch.device("cpu")
        )
    part = graph_of(json.loads(json.dumps(traced.rows)))
    for nodes in (VARYING, 2, 64):
        case = Case(("cpu", torch.float32), [50, 9], nodes, heads=(4, 2), capacity=512, causal=causal, window=window)
        case.caches = [cache.clone() for cache in case.clean]
        inputs = case.inputs()[:12]
        case.compare(described(traced).write(part(*described(traced).read(tuple(inputs), []))), inputs[3:5])


# the option -----------------------------------------------------------------------------------------------------------


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
        ({"verfy": "sdpa"}, ValueError, "expected a name for prefill, verify, draft.*Did you mean 'verify'"),
        (None, TypeError, "expected a name, or a dict of names for prefill, verify, draft, got None"),
        ({"verify": 3}, TypeError, "expected a name, or a dict"),
    ],
)
def test_options_that_are_none(option, error, message):
    with pytest.raises(error, match=message):
        spec_compile.speculate(models.ADMITTED["llama"](), attention_backend=option)


@pytest.mark.parametrize("name", ["triton", "flex", "flashinfer"])
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


def prefix_then_tree(function, graph, nodes=9):
    """Outputs and caches after a prefix of tokens and then a tree."""
    ids = torch.randint(3, graph.vocab_size, (2, 12 + nodes), generator=torch.Generator().manual_seed(1))
    steps, lengths = torch.arange(12).expand(2, -1), torch.zeros(2, dtype=torch.int64)
    ancestors, depth = ancestry(torch.tensor([random_tree(nodes), chain(nodes)]))
    cache = [
        torch.zeros(2, layer.kv_heads, 64, size, dtype=graph.dtype)
        for layer in graph.layers
        for size in (layer.key_dim, layer.value_dim)
    ]
    with torch.no_grad():
        function(ids[:, :12], steps, lengths, None, cache, 64)
        return [*function(ids[:, 12:], 12 + depth, lengths + 12, ancestors, cache, 64), *cache]


REFUSED = [("flashinfer", "gemma2"), ("flashinfer", "gpt_oss"), ("flashinfer", "deepseek_v3")]
"""Trees with windows, and keys and values of different sizes."""
PAIRS = [(name, model) for model in ("llama", "gemma2", "gpt_oss", "deepseek_v3") for name in FOR_GPUS]


@pytest.fixture
def tiny(monkeypatch):
    """Backends for the tiny models' heads, and FlashInfer's for float32, which their kernels do not have."""
    for name in ("flex", "flashinfer"):
        less = dataclasses.replace(BACKENDS[name], sizes=None, dtypes=frozenset({torch.float32}))
        monkeypatch.setitem(BACKENDS, name, less)


@pytest.mark.sweep("triton-llama flashinfer-llama flex-deepseek_v3 sdpa-llama")
@pytest.mark.parametrize("name, model", [pair for pair in PAIRS if pair not in REFUSED])
def test_pass_puts_the_op_into_the_graph(on_gpu, captured, tiny, name, model):
    """The op is there once a layer, and the numbers are those of the graph for a CPU."""
    graph = captured(model)[1]
    plain = rewritten(graph)
    on_gpu()
    ours = rewritten(graph, name, "verify", False)
    assert len(calls(ours.gm, BACKENDS[name].load(Use(captured=False)))) == len(graph.layers)
    assert f"by {name})" in next(report.summary for report in ours.log if report.name == "use_tree_attention")
    want = prefix_then_tree(plain.gm, graph)
    for function in (ours.gm, *([cut(ours)] if model == "llama" else [])):
        for got, expected in zip(prefix_then_tree(function, graph), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_check_of_a_backend_with_pages(on_gpu, captured, tiny, monkeypatch):
    """The check's cache is of pages as large as those of a session's, so that no kernel is compiled for it alone."""
    graph = captured("llama")[1]
    on_gpu()
    monkeypatch.setattr(xqa, "PAGES", xqa.PAGES[:1])
    verify = rewritten(graph, "flashinfer", "verify", True)
    monkeypatch.setattr(ModelGraph, "device", torch.device("cpu"))
    check_tree("llama", graph, verify)


@pytest.mark.parametrize("name, model", REFUSED)
def test_pass_refuses_what_the_backend_lacks(on_gpu, captured, tiny, name, model):
    graph = captured(model)[1]
    on_gpu()
    with pytest.raises(UnsupportedModelError, match=r"with token trees\. Pass {'verify': name} with one of triton"):
        rewritten(graph, name, "verify", False)


@functools.cache
def half_llama():
    return capture(models.ADMITTED["llama"]().to(torch.bfloat16))


@pytest.mark.sweep("triton sdpa")
@pytest.mark.parametrize("name", ["auto", "triton", "sdpa", "flex"])
def test_rotation_joins_what_rotates(on_gpu, name):
    graph = half_llama()
    on_gpu()
    ours, backend = rewritten(graph, name), BACKENDS["triton" if name == "auto" else name]
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
        (("verify", True), dict(softcap=1.0), "capped scores with token trees in a CUDA graph", "triton, sdpa, flex"),
        (("verify", True), dict(window=8), "sliding windows with token trees in a CUDA graph", "triton, sdpa, flex"),
        (("verify", True, False), dict(name="flex"), "that a CUDA graph can capture uncompiled", "triton, sdpa, flas"),
        (("verify", False), dict(window=8), "sliding windows with token trees", "triton, sdpa, flex"),
        (("draft", False), dict(sizes=(192, 128)), "different head sizes with token trees", "triton, sdpa, flex"),
        (("prefill", False), dict(sizes=(96, 96)), "heads of 96", "triton, sdpa, flex"),
        (("prefill", False), dict(dtype=torch.float32), "float32", "triton, sdpa, flex"),
        (("prefill", False), dict(dtype=torch.float64), "float64", "sdpa"),
        (("verify", True), dict(name="flex", sizes=(8, 8)), "heads of 8", "triton, sdpa"),
    ],
)
def test_what_a_backend_lacks_is_refused(on_gpu, use, layer, lacks, able):
    with pytest.raises(UnsupportedModelError) as caught:
        need(on_gpu, use, **layer)
    message = str(caught.value)
    name, number = layer.get("name", "flashinfer"), 0 if use[2:] or "dtype" in layer else 1
    assert f"attention_backend: {name!r} cannot run layer {number} of the {use[0]} graph: " in message
    assert lacks in message and f"Pass {{{use[0]!r}: name}} with one of {able}" in message, message


@pytest.mark.parametrize(
    "version, message",
    [
        (None, 'needs FlashInfer: pip install "flashinfer-python>=0.6.1"'),
        ("0.5.3", "needs FlashInfer 0.6.1 or later, 0.5.3 is installed: pip install -U"),
    ],
)
def test_flashinfer_says_what_to_install(monkeypatch, version, message):
    installed(monkeypatch, version)
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
    use = "verify", True, True, True
    with pytest.raises(UnsupportedModelError, match=r"caches of 8 bits .*with one of triton$"):
        need(on_gpu, use, name="flex")
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
            rewritten(graph, "auto", "verify", True, True, True)
        return
    ours = rewritten(graph, "auto", "verify", True, True, True)
    assert (ours.cache_dtype, ours.token_bytes * 4) == (torch.float8_e4m3fn, plain.token_bytes)
    assert plain.cache_dtype is None is graph.cache_dtype
    scaled, heads = rewritten(graph, "auto", "verify", True, True, True, True), sum(x.kv_heads for x in graph.layers)
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
    """A T4 holds no tiles of heads of 512 in float32: plain PyTorch serves them, with a line in the log, or a refusal
    by name."""
    card = Card("T4", (7, 5), 40, 65_536)
    monkeypatch.setattr(backends, "card_of", lambda device: card)
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
    target = models.ADMITTED["llama"]()
    option = {role: "sdpa"}
    spec_compile.speculate(target, "draft_model", draft=models.ADMITTED["llama"](), attention_backend=option)
    other = {"verify": "prefill", "prefill": "verify"}[role]
    assert seen[role] == "sdpa"
    assert seen[other] == seen["draft"] == "auto"


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in FOR_GPUS])
@pytest.mark.parametrize("window", [None, 100])
def test_cuda_graph(name, window):
    """A captured graph of the compiled op follows the lengths and trees on the device."""
    place = "cuda", torch.bfloat16 if name == "flashinfer" else torch.float32
    if lack := BACKENDS[name].why_not(layer_of((8, 2), (128, 128), window), place[1], Use(name), torch.device("cpu")):
        pytest.skip(f"{name} does not have {lack}")
    cases = [
        Case(place, [length, 5], 16, tree(16), (8, 2), (128, 128), 1024, window=window)
        for length, tree in ((100, chain), (0, star), (1000, random_tree), (777, random_tree))
    ]
    for case in cases:
        case.caches = [cache.clone() for cache in case.clean]
    static, chosen = cases[0].inputs()[:12], op_of(name, "cuda", captured=True)
    op = torch.compile(lambda *inputs: chosen(*inputs), fullgraph=True)
    op(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*static)
    for case in cases[1:] + cases[:1]:
        for there, new in zip(static, case.inputs()):
            if isinstance(new, torch.Tensor):
                there.copy_(new)
        graph.replay()
        case.compare(out, static[3:5])


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in ("sdpa", "flex")])
@pytest.mark.parametrize("algorithm", ["ngram", "draft_model"])
@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_the_same(name, algorithm, compiled):
    """Those of float32, whatever runs attention, over prompts of several lengths."""
    model = models.ADMITTED["llama"]().to("cuda")
    more = {} if algorithm == "ngram" else dict(draft=models.ADMITTED["llama"]().to("cuda"))
    more |= dict(max_cache_len=700, compile=compiled, cuda_graphs=compiled or name != "flex")
    fast = spec_compile.speculate(model, algorithm, attention_backend=name, **more)
    for length, batch in ((200, 1), (17, 1), (64, 3)):
        ids = torch.randint(3, models.VOCAB, (batch, length // 2)).repeat(1, 2).cuda()
        wanted = dict(do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
        assert torch.equal(fast.generate(ids, **wanted), model.generate(ids, **wanted))
