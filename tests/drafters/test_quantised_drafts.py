"""Quantised heads: every published format gives the weights of its twin in 16 or 32 bits."""

import json

import changed_drafts as changed
import pytest
import quantised_checkpoints as quantised
import torch

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head

OTHERS = "eagle", "p_eagle", "mtp_deepseek", "mtp_qwen", "dflash", "domino"


@pytest.mark.sweep(
    "eagle3-fp8_blocks eagle3-ct_int4_zeros eagle3-ct_nvfp4 eagle3-gptq_v2 eagle3-awq eagle3-nf4_nested "
    "eagle3-torchao_groups eagle3-modelopt_nvfp4 p_eagle-ct_fp8 mtp_deepseek-ct_fp8"
)
@pytest.mark.parametrize(
    ("flavour", "name"), [*(("eagle3", name) for name in quantised.OF_DRAFTS), *((each, "ct_fp8") for each in OTHERS)]
)
def test_a_quantised_head_has_the_weights_of_its_twin(flavour, name, tmp_path):
    written, algorithm = quantised.write_draft(name, flavour, tmp_path), changed.EVERY[flavour].algorithm
    head, twin = (load_head(tmp_path / which, written.target, algorithm) for which in ("quantised", "twin"))
    weights, meant = head.state_dict(), twin.state_dict()
    assert weights.keys() == meant.keys()
    for key, value in meant.items():
        assert torch.equal(weights[key], value), key
    if flavour == "eagle3":
        changes = head.blocks[0].mlp.up_proj.weight - written.tensors["midlayer.mlp.up_proj.weight"]
        assert 0 < changes.abs().max() < 0.2  # the writer has rounded something, and not more than its format must
        assert len(head.published.matrices) == 9  # q, k, v, o, gate, up, down, fc and the output matrix


@pytest.mark.sweep("gptq")
@pytest.mark.parametrize("name", ["gptq", "nf4", "fp8_blocks"])
def test_drafts_are_those_of_the_twin_and_answers_the_target_s(name, tmp_path):
    target = quantised.write_draft(name, "eagle3", tmp_path).target
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
    ("name", "changes", "text"),
    [
        (None, {"quant_method": "hqq"}, "'hqq'.* is not read; read are "),
        (None, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ.* is not read; read are "),
        (None, {"quant_method": "modelopt", "quantization": {"quant_algo": "INT4_AWQ"}}, "INT4_AWQ.* is not read"),
        ("gptq", {"bits": 8}, "qweight has bits 8, where 4 are read"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("fp8_blocks", {"weight_block_size": [32, 32]}, "has scales"),
    ],
)
def test_what_is_not_read(name, changes, text, tmp_path):
    written = quantised.write_draft(name or "ct_fp8", "eagle3", tmp_path)
    folder = tmp_path / ("quantised" if name else "twin")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"draft: .*{text}"):
        load_head(folder, written.target, "eagle3")
