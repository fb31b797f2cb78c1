"""Experts in MXFP4 and FP8: served from the bits of the file, with the tokens of transformers' own loop."""

from types import SimpleNamespace

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from quantised_models import IDS, build_fp8_mixture
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import mxfp4

from spec_compile import UnsupportedModelError, load_mxfp4, speculate
from spec_compile.capture.quantised import packed_layers
from spec_compile.capture.trace import capture
from spec_compile.graph import attribute, calls
from spec_compile.kernels import experts
from spec_compile.quantised import unrounded_activations

GREEDY = dict(do_sample=False, max_new_tokens=48, eos_token_id=None, pad_token_id=0)


def test_experts_in_mxfp4_that_transformers_unpacks(tmp_path):
    folder = checkpoints.write_mxfp4(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not packed_layers(model)
    fast = speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))


@pytest.fixture
def gpt_oss(tmp_path):
    """A tiny gpt-oss whose experts stay in MXFP4, and the greedy answer of transformers' own loop to unpacked ones."""
    folder = checkpoints.write_mxfp4(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().generate(IDS, **GREEDY)
    return load_mxfp4(folder, dtype=torch.float32).eval(), wanted


def test_experts_that_stay_in_mxfp4(gpt_oss, tmp_path):
    model, wanted = gpt_oss
    fast = speculate(model, compile=False, check=False)
    graph = fast.speculation.engine.captured
    markers = calls(graph.gm, experts.UP) + calls(graph.gm, experts.DOWN)
    assert {experts.format_of(node.args[-1]).mxfp4 for node in markers} == {64}
    assert torch.equal(fast.generate(IDS, **GREEDY), wanted)
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)

    published, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert published.keys() == state.keys()
    assert all(torch.equal(tensor.to(state[key].dtype), state[key]) for key, tensor in published.items())
    model.save_pretrained(tmp_path / "saved")
    other = load_mxfp4(tmp_path / "saved", dtype=torch.float32).eval()
    for key in state:
        if key.endswith("scales"):
            state[key] = state[key] - 1
    other.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    fast.speculation.refresh()
    answer = fast.generate(IDS, **GREEDY)
    assert torch.equal(answer, other.generate(IDS, **GREEDY)) and not torch.equal(answer, wanted)


class Swizzled:
    """A tensor of triton_kernels, whose layout turns the bytes of each row around."""

    def __init__(self, data):
        self.storage = SimpleNamespace(data=data.transpose(-1, -2).flip(1), layout=self)

    def unswizzle_data(self, data):
        return data.flip(1)


@pytest.mark.slow
def test_experts_that_transformers_has_packed(gpt_oss):
    """As `transformers.integrations.mxfp4` holds them where it has the package `kernels`."""
    model, wanted = gpt_oss
    for layer in model.model.layers:
        packed, state = mxfp4.Mxfp4GptOssExperts(model.config), layer.mlp.experts.state_dict()
        for name in ("gate_up_proj", "down_proj"):
            delattr(packed, name)
            setattr(packed, name, Swizzled(state[f"{name}_blocks"].flatten(2)))
            how = SimpleNamespace(weight_scale=Swizzled(state[f"{name}_scales"]))
            setattr(packed, f"{name}_precision_config", how)
            getattr(packed, f"{name}_bias").data = state[f"{name}_bias"]
        layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, packed)
    fast = speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS, **GREEDY), wanted)
    assert type(model.model.layers[0].mlp) is mxfp4.Mxfp4GptOssMLP
    words = [graph.gm.state_dict() for graph in (fast.speculation.engine.captured, capture(model))]
    keys = [key for key in words[0] if key.endswith("words")]
    assert keys and all(words[0][key].data_ptr() == words[1][key].data_ptr() for key in keys)  # one copy for all graphs

    packed.down_proj = Swizzled(state["down_proj_blocks"].flatten(2))
    with pytest.raises(ValueError, match=r"speculate\(\) again"):
        fast.speculation.refresh()
    state["down_proj_scales"][0, 0, 0] = 255
    packed.down_proj_precision_config.weight_scale = Swizzled(state["down_proj_scales"])
    with pytest.raises(
        UnsupportedModelError, match=r"1\.mlp\.experts \(Mxfp4GptOssExperts\).* down_proj above 2, or NaN"
    ):
        speculate(model, compile=False)
    packed.down_proj = None
    with pytest.raises(UnsupportedModelError, match=r"1\.mlp\.experts \(Mxfp4GptOssExperts\).*no tensor of triton_ker"):
        speculate(model, compile=False)


def test_what_is_no_checkpoint_in_mxfp4(tmp_path):
    with pytest.raises(ValueError, match="is not a gpt-oss in MXFP4"):
        load_mxfp4(checkpoints.write("fp8_block", tmp_path / "llama"))
    folder = checkpoints.write_mxfp4(tmp_path)
    with pytest.raises(ValueError, match="quantization_config"):
        load_mxfp4(folder, quantization_config=None)
    tensors = load_file(folder / "model.safetensors")
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[scales][0, 0, 0] = 255
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts has scales above 2"):
        load_mxfp4(folder)
    del tensors[scales]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks weights.*{scales}"):
        load_mxfp4(folder)


@pytest.fixture
def fp8_mixture():
    return build_fp8_mixture(moe_intermediate_size=128)


def test_experts_in_fp8(fp8_mixture):
    ids = IDS % models.VOCAB
    graph = capture(fp8_mixture)
    markers = calls(graph.gm, experts.UP) + calls(graph.gm, experts.DOWN)
    assert {experts.format_of(node.args[-1]).block for node in markers} == {128}
    with torch.no_grad():
        expected = fp8_mixture(input_ids=ids).logits
        got = graph.gm(ids, torch.arange(ids.shape[1])[None])[0]
    assert (got - expected).abs().max() < 1e-4 * expected.std()
    fast = speculate(fp8_mixture, compile=False)
    assert torch.equal(fast.generate(ids, **GREEDY), fp8_mixture.generate(ids, **GREEDY))
    assert fp8_mixture.model.layers[0].mlp.experts.down_proj.dtype == torch.float8_e4m3fn


def test_no_expert_rounds_activations_where_no_layer_does(fp8_mixture):
    """So sums in another order do not move the logits of the checks in float32."""
    graph, noise = capture(fp8_mixture), torch.randn(1, models.BASE["hidden_size"]) * 1e-6
    node, x = calls(graph.gm, experts.UP)[0], torch.randn(16, models.BASE["hidden_size"])
    parts = [attribute(graph.gm, part.target) for part in experts.parts_of(node)]
    ids = torch.arange(16)[:, None] % len(parts[0])
    with unrounded_activations():
        apart = [experts.UP(each, ids, parts, node.args[-1]) for each in (x, x + noise)]
    assert (apart[1] - apart[0]).abs().max() < 1e-5 * apart[0].abs().max()
    assert not torch.allclose(experts.UP(x, ids, parts, node.args[-1]), apart[0], rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_experts_in_mxfp4_on_a_gpu(tmp_path):
    model = load_mxfp4(checkpoints.write_mxfp4(tmp_path), dtype=torch.bfloat16).eval().to("cuda")
    fast = speculate(model, exact="bits")
    answer = fast.generate(IDS.cuda(), **GREEDY)
    plain = speculate(model, exact="bits", num_draft_tokens=1)
    assert torch.equal(answer, plain.generate(IDS.cuda(), **GREEDY))
