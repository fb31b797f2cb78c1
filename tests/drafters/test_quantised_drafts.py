"""Quantised heads: every published format gives the weights of its twin in 16 or 32 bits."""

import json

import draft_checkpoints as drafts
import pytest
import quantised_drafts as quantised
import torch

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.quantised.formats import methods


def loaded(name, flavour, folder):
    """A quantised head, its twin, and the target."""
    twin = quantised.write(name, flavour, folder)
    return *(load_head(folder / which, twin.target, twin_algorithm(flavour)) for which in ("quantised", "twin")), twin


def twin_algorithm(flavour):
    return (drafts.FLAVOURS | drafts.PARALLEL | drafts.DFLASH | drafts.LINKED)[flavour].algorithm


@pytest.mark.sweep("fp8_blocks ct_int4_zeros ct_nvfp4 gptq_v2 awq nf4_nested torchao_groups modelopt_nvfp4")
@pytest.mark.parametrize("name", quantised.FORMATS)
def test_a_quantised_head_has_the_weights_of_its_twin(name, tmp_path):
    head, twin, written = loaded(name, "eagle3", tmp_path)
    weights, meant = head.state_dict(), twin.state_dict()
    assert weights.keys() == meant.keys()
    for key, value in meant.items():
        assert torch.equal(weights[key], value), key
    changed = head.blocks[0].mlp.up_proj.weight - written.tensors["midlayer.mlp.up_proj.weight"]
    assert 0 < changed.abs().max() < 0.2  # the writer has rounded something, and not more than its format must
    assert len(head.published.matrices) == 9  # q, k, v, o, gate, up, down, fc and the output matrix


EVERY = ("eagle", "p_eagle", "mtp_deepseek", "mtp_qwen", "dflash", "domino")


@pytest.mark.sweep("p_eagle mtp_deepseek")
@pytest.mark.parametrize("flavour", EVERY)
def test_heads_of_every_algorithm(flavour, tmp_path):
    head, twin, _ = loaded("ct_fp8", flavour, tmp_path)
    for key, value in twin.state_dict().items():
        assert torch.equal(head.state_dict()[key], value), key


@pytest.mark.sweep("gptq")
@pytest.mark.parametrize("name", ["gptq", "nf4", "fp8_blocks"])
def test_drafts_are_those_of_the_twin_and_answers_the_target_s(name, tmp_path):
    target = quantised.write(name, "eagle3", tmp_path).target
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(5))
    greedy = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    traces = []
    for which in ("quantised", "twin"):
        fast = speculate(
            target, "eagle3", draft=str(tmp_path / which), compile=False, adaptive=False, max_cache_len=64, cache=False
        )
        assert torch.equal(fast.generate(ids, **greedy), target.generate(ids, **greedy))
        traces.append(fast.speculation.engine.session(1).state.tree_tokens.tolist())
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "INT4_AWQ"}}, "INT4_AWQ"),
    ],
)
def test_methods_that_are_not_read(config, named, tmp_path):
    written = drafts.write("eagle3", tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=f"draft: .*{named}.* is not read; read are "):
        load_head(tmp_path, written.target, "eagle3")
    assert config["quant_method"] not in methods() or "modelopt" in methods()


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("gptq", {"bits": 8}, "qweight has bits 8, where 4 are read"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("fp8_blocks", {"weight_block_size": [32, 32]}, "has scales"),
    ],
)
def test_layouts_that_are_not_read(name, changes, text, tmp_path):
    written = quantised.write(name, "eagle3", tmp_path)
    path = tmp_path / "quantised/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"draft: .*{text}"):
        load_head(tmp_path / "quantised", written.target, "eagle3")
