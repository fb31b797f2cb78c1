"""Attention by other backends than our kernels: each op means what `spec_compile::tree_attention` means.

Without a GPU the ops run on CPU tensors; ``pytest -m gpu`` runs them on a CUDA device.
"""

import functools

import models
import pytest
import torch
from attention_cases import Case, chain, random_tree, star
from places import ON_GPU
from torch._dynamo.testing import CompileCounterWithBackend

import spec_compile
from spec_compile.graph import LayerSpec
from spec_compile.kernels.attention import BACKENDS, Use
from spec_compile.kernels.attention import flashinfer as xqa

pytestmark = [
    pytest.mark.usefixtures("flashinfer"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # rows that fill up a tile, in NumPy
]


def op_of(name, captured=False):
    """The backend's op, of one signature. Skips what is not installed."""
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
        case.compare(op_of(name, captured)(*inputs), inputs[3:5])
    return lack


FOR_GPUS = [name for name, backend in BACKENDS.items() if "cuda" in backend.devices]
OTHERS = pytest.mark.parametrize("name", [name for name in FOR_GPUS if name != "triton"])
KINDS = {}, dict(window=20), dict(softcap=2.0), dict(sinks=True), dict(window=5, softcap=3.0, sinks=True)
SHAPES = [
    *(([0, 63, 70], 7, dict(heads=(4, 2), **kind, **causal)) for kind in KINDS for causal in ({}, dict(causal=True))),
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
@OTHERS
@pytest.mark.parametrize("lengths, nodes, options", SHAPES)
def test_shapes(place, name, lengths, nodes, options):
    """Trees, causal chunks, heads and sizes; FlashInfer lacks some."""
    options = dict(parents=random_tree(nodes), sizes=(64, 64)) | options
    lack = check(name, place, lengths, nodes, **options)
    foreign = not {*options["sizes"]} <= {64, 128, 256} or ("window" in options and "causal" not in options)
    assert (lack is not None) == (name == "flashinfer" and foreign), lack


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


VARYING = 37  # nodes of the first call, a number that no other size has


@pytest.mark.parametrize("causal", [False, True])
def test_one_compilation_serves_all_sizes(causal):
    """Nothing is specialised for the number of nodes that is seen first."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(op_of("sdpa"), backend=counter, fullgraph=True)
    for nodes in (VARYING, 2, 64, *([150, 400] if causal else [])):
        case = Case(("cpu", torch.float32), [50, 9], nodes, heads=(4, 2), capacity=512, causal=causal, window=30)
        case.caches = [cache.clone() for cache in case.clean]
        inputs = case.inputs()[:12]
        for tensor in (each for each in inputs if isinstance(each, torch.Tensor)):
            for dim in (dim for dim, size in enumerate(tensor.shape) if size == VARYING):
                torch._dynamo.mark_dynamic(tensor, dim)
        case.compare(op(*inputs), inputs[3:5])
    assert counter.frame_count == 1


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
    static, chosen = cases[0].inputs()[:12], op_of(name, captured=True)
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


@pytest.mark.parametrize("algorithm", [pytest.param(name, marks=ON_GPU) for name in ("ngram", "draft_model")])
@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_the_same_by_plain_pytorch(algorithm, compiled):
    """Those of float32, over prompts of several lengths."""
    model = models.ADMITTED["llama"]().to("cuda")
    more = {} if algorithm == "ngram" else dict(draft=models.ADMITTED["llama"]().to("cuda"))
    more |= dict(max_cache_len=700, compile=compiled, attention_backend="sdpa")
    fast = spec_compile.speculate(model, algorithm, **more)
    for length, batch in ((200, 1), (17, 1), (64, 3)):
        ids = torch.randint(3, models.VOCAB, (batch, length // 2)).repeat(1, 2).cuda()
        wanted = dict(do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
        assert torch.equal(fast.generate(ids, **wanted), model.generate(ids, **wanted))
