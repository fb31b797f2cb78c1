"""Models over several GPUs: tokens and requests of a pipeline, where values move, and refusals. On a CPU the names of
devices only stand for them."""

from types import SimpleNamespace

import accelerate
import models
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from offloaded import PARTS, QUICK, answer, answers, answers_on
from toy_graphs import prefix_then_chunk

from spec_compile import passes, speculate
from spec_compile.capture.trace import capture
from spec_compile.contrib import pipeline
from spec_compile.errors import UnsupportedModelError
from spec_compile.graph import calls, layer_of
from spec_compile.kernels import linear
from spec_compile.passes.fuse_norms import fuse_residuals

FIRST, SECOND, THIRD = "cuda:0", "cuda:1", "cuda:2"


def small(name="llama", layers=4, **more):
    config, cls, kwargs, *rest = models._ADMITTED[name]
    return models.build(config, cls, dict(kwargs, num_hidden_layers=layers, **more), *rest)


def places(devices, ends=(FIRST, FIRST, SECOND, SECOND)):
    return dict(zip(PARTS, ends)) | {f"model.layers.{number}": device for number, device in enumerate(devices)}


def moves(graph):
    """The names of the values that move, each with the device where they go."""
    return [(node.args[0].name, node.args[1]) for node in calls(graph.gm, pipeline.moved)]


HALVES = [FIRST, FIRST, SECOND, SECOND]
WAYS = {
    "the head on the last": ("llama", HALVES, (FIRST, FIRST, SECOND, SECOND), {}),
    "the head tied": ("llama", HALVES, (FIRST, FIRST, SECOND, FIRST), dict(tie_word_embeddings=True)),
    "three devices": ("qwen3", [FIRST, SECOND, SECOND, THIRD], (FIRST, FIRST, THIRD, THIRD), {}),
    "there and back": ("llama", [FIRST, SECOND, FIRST, SECOND], (FIRST, FIRST, SECOND, FIRST), {}),
    "windows": ("gemma3", HALVES, (FIRST, FIRST, SECOND, FIRST), {}),
    "experts": ("mixtral", HALVES, (FIRST, FIRST, SECOND, SECOND), {}),
}


@pytest.mark.sweep(["the head tied", "three devices", "there and back", "windows"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens(way):
    """The tokens of a model on one device, whose logits the check compares with the copy's own forward."""
    name, devices, ends, more = WAYS[way]
    net = small(name, **more)
    want = answers(net)
    fast = speculate(pipeline.in_place(net, places(devices, ends)), compile=False)
    assert answers(fast) == want and max(fast.speculation.stats.nodes) > 1
    count = len({*devices} - {FIRST})
    assert f"values move between cuda:0 and {', '.join([SECOND, THIRD][:count])}" in fast.speculation.explain()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests(compiled):
    net, rows = small(layers=2), [row[0].tolist() for row in models.prompts()[0]]
    copied = pipeline.in_place(net, places([FIRST, SECOND]))
    assert type(net.model.layers[0]) is not type(copied.model.layers[0])
    assert answer(copied, torch.tensor(rows[:1])) == answer(net, torch.tensor(rows[:1]))  # by its own forward
    fast = speculate(copied, compile=compiled, check=False)
    fast.speculation.warmup()
    outputs = fast.generate_batch(rows, max_new_tokens=24, do_sample=False, eos_token_id=-1).values()
    for row, output in zip(rows, outputs, strict=True):
        assert row + output.generated_tokens == answer(net, torch.tensor([row]))[0]


def rewritten(devices=HALVES, taps=(), **more):
    graph = capture(pipeline.in_place(small(), places(devices, **more)))
    return graph, passes.run(graph, passes.Settings(taps=taps))


def test_each_value_moves_once():
    """Hidden states and what all layers read move to a device once, and logits and taps come back."""
    _, graph = rewritten(taps=(2, 4))
    there = [name for name, device in moves(graph) if device == SECOND]
    assert len(there) == len({*there}) == 7  # hidden states, cosines, sines, lengths, ancestors, positions, pages
    assert {"lengths", "ancestors", "positions"} <= {*there}
    back = [node for node in calls(graph.gm, pipeline.moved) if node.args[1] == FIRST]
    assert len(back) == 2 and {user.op for node in back for user in node.users} == {"output"}


def test_nodes_and_weights_are_on_one_device():
    """All that a node reads, besides keys and values, is on its device or was moved there."""
    _, graph = rewritten([FIRST, SECOND, FIRST, SECOND])
    home = pipeline._homes(graph)
    for node in calls(graph.gm):
        if node.target is not pipeline.moved and node in home:  # sizes and caches have none
            assert {home[source] for source in node.all_input_nodes if source in home} <= {home[node]}
    layers = {layer_of(node): home[node] for node in calls(graph.gm) if layer_of(node) is not None}
    assert [layers[number] for number in range(4)] == [FIRST, SECOND, FIRST, SECOND]


def test_the_passes_see_the_graph_of_one_device():
    graph, placed = rewritten()
    plain = passes.run(capture(small()), passes.Settings())
    ops = [node.target for node in calls(placed.gm) if node.target is not pipeline.moved]
    assert ops == [node.target for node in calls(plain.gm)]
    assert passes.run(graph, passes.Settings(), [pipeline.put_moves]).log[0].summary == "on one device"
    assert "on one device" in [report.summary for report in plain.log if report.name == "gather"]


def test_an_artefact_and_parts_know_the_moves(tmp_path, monkeypatch):
    """A second start reads the graphs that the first one wrote."""
    monkeypatch.setenv("SPEC_COMPILE_CACHE", str(tmp_path))
    net, fasts = small(), []
    for _ in range(2):
        fasts.append(speculate(pipeline.in_place(net, places(HALVES)), compile=False))
    assert [fast.speculation.is_from_artefact for fast in fasts] == [False, True]
    assert answers(fasts[1]) == answers(net)


# --- refusals


def test_a_model_on_one_device_stays():
    net = small()
    assert pipeline.in_place(net) is net and pipeline.in_place("text") == "text"


def test_what_excludes_several_devices():
    copied = pipeline.in_place(small(), places(HALVES))
    with pytest.raises(UnsupportedModelError, match="max_loras and layers on several GPUs exclude each other"):
        graph = capture(copied)
        passes.run(graph, passes.Settings(low_rank={"path": None}), [pipeline.gather])
    on_gpu = SimpleNamespace(recurrences=(), indexes=(), device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="16 bits and layers on several GPUs exclude"):
        pipeline.refuse_others(on_gpu, passes.Settings())
    pipeline.refuse_others(SimpleNamespace(**vars(on_gpu) | {"dtype": torch.float32}), passes.Settings())
    config, cls, kwargs, *rest = models._HYBRID["qwen3_next"]
    hybrid = pipeline.in_place(models.build(config, cls, dict(kwargs), *rest), places(HALVES[1:3]))
    with pytest.raises(UnsupportedModelError, match="layers with states and layers on several GPUs exclude"):
        speculate(hybrid, **QUICK)


def hooked(net, devices):
    for part, device in zip((net.model.embed_tokens, *net.model.layers), (0, *devices)):
        add_hook_to_module(part, AlignDevicesHook(io_same_device=True))
        part._hf_hook.execution_device = device
    return net


def test_refusals(monkeypatch):
    net = hooked(small(), (0, 0, 1, 1))
    net.hf_quantizer = SimpleNamespace()
    with pytest.raises(UnsupportedModelError, match="has quantised weights on several GPUs; several GPUs need"):
        speculate(net, **QUICK)
    del net.hf_quantizer
    cards = {"cpu": SimpleNamespace(name="one", capability=(9, 0)), "meta": SimpleNamespace(name="other")}
    monkeypatch.setattr(pipeline, "card_of", lambda device: cards[device.type])
    monkeypatch.setattr(pipeline.admit, "admit_device", lambda model, device: None)
    meta = net.model.layers[3].to("meta")
    with pytest.raises(UnsupportedModelError, match="is spread over GPUs of two kinds, one and other"):
        speculate(net, **QUICK)
    monkeypatch.setattr(pipeline, "card_of", lambda device: None)
    meta.mlp.to_empty(device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"has layer 3 on cpu and meta; a layer has to be on one GPU"):
        speculate(net, **QUICK)
    meta.to_empty(device="cpu")
    hooked(net, (0, 0, 1, 1)).set_input_embeddings(torch.nn.Embedding(96, 64, device="meta"))
    monkeypatch.setattr(type(net), "device", torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="has its embeddings behind other layers"):
        speculate(net, **QUICK)


# --- GPUs


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def on_two(net):
    ends = dict(zip(PARTS, (0, 0, 1, 1)))
    count = net.config.num_hidden_layers
    layers = {f"model.layers.{number}": int(number >= count // 2) for number in range(count)}
    return accelerate.dispatch_model(net, ends | layers)


def note_devices(graph, settings):
    """Note the device of weights that were merged, which on a GPU they have themselves."""
    for node in graph.gm.graph.find_nodes(op="get_attr"):
        layers = [number for number in map(layer_of, node.users) if number is not None]
        if layers and "device" not in node.meta:
            node.meta["device"] = HALVES[layers[0]]
    return ""


@pytest.mark.parametrize("without", [[], [fuse_residuals]], ids=["joined to products", "by themselves"])
def test_kernels_of_a_gpu_read_what_moves(half_on_gpu, monkeypatch, without):
    """An addition to the stream with the next layer's norm is one op. Its results move one by one."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SKINNY_GEMM)
    monkeypatch.setattr(pipeline, "refuse_others", lambda graph, settings: None)
    net, steps = small().to(torch.bfloat16), [step for step in passes.PIPELINE if step not in without]
    steps.insert(steps.index(pipeline.put_moves), note_devices)
    one, several = (capture(each) for each in (net, pipeline.in_place(net, places(HALVES))))
    want, got = (prefix_then_chunk(passes.run(each, passes.Settings(), steps).gm, one) for each in (one, several))
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.float32, dict(compile=False)),
        (torch.float32, dict(compile=False, cuda_graphs=False)),
    ],
)
def test_on_two_gpus(dtype, options):
    """The tokens, bits and requests of one GPU."""
    one = speculate(small().to("cuda", dtype), **options)
    fast = speculate(net := on_two(small().to(dtype)), **options)
    assert answers_on(fast) == answers_on(one)
    assert all(hasattr(layer, "_hf_hook") for layer in net.model.layers)
    keys = fast.speculation.engine.session(1).state.kv.tensors
    assert [each.device.index for each in keys] == [0, 0, 0, 0, 1, 1, 1, 1]
    rows = [row[0].tolist() for row in models.prompts()[0]]
    for got, want in zip(fast.speculation.score(rows), one.speculation.score(rows), strict=True):
        assert torch.equal(got, want)
    for _ in range(2):  # the second time with prefixes that were kept
        found = [each.generate_batch(rows * 3, max_new_tokens=24, do_sample=False).values() for each in (fast, one)]
        got, want = ([each.generated_tokens for each in outputs] for outputs in found)
        assert got == want


@pytest.mark.gpu
@TWO
def test_a_graph_of_two_gpus():
    """Work that a graph has on another GPU comes after what is launched there before, and before what comes later."""
    one, other = torch.randn(64, 64, device="cuda:0"), torch.randn(64, 64, device="cuda:1")

    def step(x):
        there = pipeline.move(x @ one, SECOND)
        return pipeline.move(torch.tanh(there @ other), FIRST) + x

    captured = pipeline.replay.Captured(step, (torch.randn(64, 64, device="cuda"),), torch.cuda.graph_pool_handle())
    for _ in range(100):
        x = torch.randn(64, 64, device="cuda")
        got = captured(x).clone()
        assert torch.equal(got, step(x))
