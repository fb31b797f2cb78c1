"""Quantised layers hold their weights once, in the kernel's layout, and are their library's to everyone who looks."""

import copy
import pickle

import pytest
import quantised_checkpoints as checkpoints
import torch
from memory import Peak, held_bytes
from quantised_models import IDS, load
from torch import nn
from toy_graphs import prefix_then_chunk

from spec_compile import passes, quantised, speculate
from spec_compile.capture.quantised import hold_one_layout, packed_layers
from spec_compile.capture.trace import capture
from spec_compile.inventory import held_tensors
from spec_compile.kernels.linear import cpu_gemm, skinny_gemm
from spec_compile.quantised.held import PARTS, Restoring

GREEDY = dict(do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
HALF = {"gptq": torch.float16, "awq": torch.float16}
NAMES = [
    "gptq", pytest.param("awq", marks=pytest.mark.slow), "ct_w4a16", pytest.param("ct_w4a8", marks=pytest.mark.slow),
    "ct_w4a8_bytes", "nf4", "nf4_nested", "ao_int4",
]  # fmt: skip
LARGEST = 2 * checkpoints.H**2


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Layers are packed as on a GPU. The ops' plain meanings run here."""
    monkeypatch.setattr(skinny_gemm, "why_not_on", lambda device: None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A function: name -> a model, whose tensors are not a file's."""
    models = {}

    def copied(name):
        if name not in models:
            models[name] = load(name, tmp_path_factory.mktemp(name), HALF.get(name, torch.bfloat16))
        return copy.deepcopy(models[name])

    return copied


def layers(model):
    return [part for path, part in model.named_modules() if path.endswith("_proj")]


def is_packed(layer):
    return isinstance(layer._parameters, Restoring) and PARTS[0] in layer._buffers


def assert_equal_state(got, wanted):
    assert list(got) == list(wanted)
    for key in filter(lambda key: wanted[key] is not None, wanted):
        tensor = wanted[key]
        assert type(got[key]) is type(tensor) and got[key].dtype == tensor.dtype
        for name in tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []:
            assert torch.equal(getattr(got[key], name), getattr(tensor, name))
        if type(tensor) is torch.Tensor:
            assert torch.equal(got[key], tensor) and got[key].is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_layer_is_its_librarys(name, loaded):
    before, model = loaded(name), loaded(name)
    hold_one_layout(model)
    assert all(map(is_packed, layers(model)))
    assert_equal_state(model.state_dict(), before.state_dict())
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in before.named_parameters()]
    layer, was = (each.model.layers[1].mlp.up_proj for each in (model, before))
    x = torch.randn(3, checkpoints.H, dtype=before.dtype)
    assert type(layer) is type(was)
    if not name.startswith("ct_"):  # whose forward needs the model's to unpack it
        assert torch.equal(layer(x), was(x))
    other = copy.deepcopy(model)
    assert_equal_state(other.state_dict(), before.state_dict())
    assert not any(map(is_packed, layers(other)))
    if name != "ao_int4":  # whose tensors have no pickle here
        for holder in ("_parameters", "_buffers"):
            got, wanted = (pickle.loads(pickle.dumps(vars(each)[holder])) for each in (layer, was))
            assert type(got) is dict
            assert_equal_state(got, wanted)
    words = [each._buffers[PARTS[0]] for each in layers(model)]
    model.to("cpu")  # changes nothing
    hold_one_layout(model)
    kernels = quantised.pack_gpu.Nibbles, quantised.pack_gpu.TableNibbles, quantised.rows.RoundedNibbles
    assert all(type(packed.layout) in kernels for packed in packed_layers(model).values())
    assert all(each._buffers[PARTS[0]] is tensor for each, tensor in zip(layers(model), words))


def merged(model):
    """The graph of a model, what passes make of it, and what that allocates."""
    graph = capture(model)
    with Peak() as peak:
        for tensor in held_tensors(graph.gm):
            tensor.data = tensor.data.clone()
        peak.begin()
        verify = passes.run(graph, passes.Settings())
    return graph, verify, peak


@pytest.mark.sweep("nf4 ct_w4a16")
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_layers_of_4_bits(name, loaded):
    own = held_bytes(loaded(name))
    more = {"nf4_nested": 0.11}.get(name, 0.03) * own  # scales in float32 stand beside those of 8 bits
    with Peak() as packing:
        model = loaded(name)
        packing.begin()
        hold_one_layout(model)
    assert packing.left <= more and packing.bytes <= more + 5 * LARGEST  # a layer's codes in bytes, and both layouts
    graph, verify, merging = merged(model)
    assert held_bytes(graph.gm, verify.gm) <= own + more
    assert merging.left <= 0.02 * own and merging.bytes <= 2 * LARGEST
    apart = passes.run(graph, passes.Settings(merge_linears=False))  # reads strips of what was merged
    for got, want in zip(prefix_then_chunk(apart.gm, graph), prefix_then_chunk(verify.gm, graph), strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.sweep("ct_fp8")
@pytest.mark.parametrize("name", ["fp8_block", "ct_fp8", "ao_int8"])
def test_memory_of_layers_of_8_bits(name, loaded):
    own = held_bytes(loaded(name))
    graph, verify, merging = merged(loaded(name))
    assert held_bytes(graph.gm, verify.gm) <= 1.02 * own
    assert merging.left <= 0.02 * own and merging.bytes <= 3 * LARGEST


@pytest.mark.parametrize("name", ["gptq", "ct_w4a16"])
def test_new_values_reach_the_graphs(name, loaded):
    model, other = loaded(name), loaded(name)
    fast = speculate(model, compile=False, check=False)
    assert not any("copies" in report.summary for report in fast.speculation.engine.runtime.verify.log)
    before = fast.generate(IDS, **GREEDY)
    for assign in (False, True):
        state = {key: tensor * 1.25 if "scale" in key else tensor for key, tensor in other.state_dict().items()}
        other.load_state_dict(state)
        model.load_state_dict(state, assign=assign)
        assert_equal_state(model.state_dict(), other.state_dict())
    fast.speculation.refresh()
    assert not torch.equal(fast.generate(IDS, **GREEDY), before)
    hold_one_layout(other)
    for ours, wanted in zip(packed_layers(model).values(), packed_layers(other).values()):
        assert all(map(torch.equal, ours.parts.values(), wanted.parts.values()))

    layer, codes = model.model.layers[0].mlp.up_proj, "qweight" if name == "gptq" else "weight_packed"
    changed = getattr(layer, codes) + 1
    setattr(layer, codes, changed if name == "gptq" else nn.Parameter(changed, requires_grad=False))
    with pytest.raises(RuntimeError, match=rf"{codes} was replaced, though .* speculate\(\) again"):
        fast.generate(IDS, **GREEDY)
    with pytest.raises(ValueError, match=r"speculate\(\) again"):
        fast.speculation.refresh()
    hold_one_layout(model)
    assert torch.equal(getattr(layer, codes), changed) and is_packed(layer)


@pytest.mark.skipif(cpu_gemm.BEST == 0, reason="needs a CPU with AVX2, and the package built")
@pytest.mark.parametrize("name", ["ct_w4a16", "ao_int8"])
def test_a_layer_on_a_cpu_holds_the_order_of_its_kernel(name, loaded, monkeypatch):
    """New values are put into it, too."""
    monkeypatch.undo()  # as on a GPU no longer
    model, other = loaded(name), loaded(name)
    wanted = model.state_dict()
    hold_one_layout(model)
    assert all(packed.layout.of_cpu for packed in packed_layers(model).values())
    assert_equal_state(model.state_dict(), wanted)
    if name == "ct_w4a16":
        state = {key: tensor * 1.25 if "scale" in key else tensor for key, tensor in wanted.items()}
        model.load_state_dict(state), other.load_state_dict(state)
        assert all(map(is_packed, layers(model)))
        hold_one_layout(other)
        for ours, theirs in zip(packed_layers(model).values(), packed_layers(other).values()):
            assert all(map(torch.equal, ours.parts.values(), theirs.parts.values()))
