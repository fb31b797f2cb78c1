"""Checkpoints of drafts that are refused: every tensor is needed, and what is wrong with one is named."""

import math
import re

import changed_drafts as changed
import draft_checkpoints as drafts
import models
import pytest
import torch
from draft_checkpoints import MASK
from transformers import AutoModelForCausalLM

from spec_compile.drafters.checkpoints.load import load_head

NEEDED = {
    "eagle_no_bias": "", "eagle_qwen2": "", "eagle_speculators": "", "eagle3_gpt_oss": "", "eagle31_mla": "",
    "eagle31": "", "eagle3_sglang_layers": "", "eagle3_deepspec": "", "mtp_deepseek_nextn": "",
    "mtp_mimo": "mtp_layers", "mtp_qwen": r"^mtp\.", "dflash_bias": "", "dflash_confident": "",
    "dflash_speculators_kept": "",
}  # fmt: skip
"""Flavours, and a pattern of the tensors that belong to the draft."""
SIGNS = "fc", "fusion_fc", "mtp.fc", "model.layers.0.eh_proj", "model.mtp_layers.0.input_proj"


@pytest.mark.sweep("eagle31 eagle3_sglang_layers mtp_qwen dflash_confident")
@pytest.mark.parametrize("name", NEEDED)
def test_every_tensor_is_needed(tmp_path, name):
    changed.assert_each_is_needed(tmp_path, name, NEEDED[name], () if name.startswith("dflash") else SIGNS)


def small():
    """A target of fewer tokens."""
    model = drafts.llama()
    model.resize_token_embeddings(80)
    return model


def wide():
    return models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, hidden_size=128, num_hidden_layers=8))


def damaged(value):
    """A change of one number of a tensor."""
    return lambda tensor: tensor.index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(value))


def aux(*ids):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


def rope(**scaling):
    return {"rope_scaling": scaling}


def inner(**flags):
    return {"dflash_config": flags}


UNKNOWN = "tensors that this format does not know: "
RIGHT_BASE = "rope_theta must be a positive, finite number, not "
EAGLES = [
    # states of the target
    ("eagle3", aux(2, 4), "states"),
    ("eagle3", aux(2, 4, 9), "states"),
    ("eagle3", aux(-1, 4, 5), "states"),
    ("eagle3", dict(overrides=dict(taps=(1, 2))), "taps: this head reads 3 state"),
    # tensors
    ("eagle", dict(tensors={"layers.0.self_attn.sinks": torch.zeros(4)}), UNKNOWN + "layers.0.self_attn.sinks"),
    ("eagle3", dict(tensors={"layers.0.self_attn.sinks": torch.zeros(4)}), UNKNOWN + "layers.0.self_attn.sinks"),
    ("mtp_deepseek_nextn", dict(tensors={"model.layers.0.sinks": torch.zeros(4)}), UNKNOWN + "model.layers.0.sinks"),
    ("mtp_qwen", dict(tensors={"mtp.layers.0.sinks": torch.zeros(4)}), UNKNOWN + "mtp.layers.0.sinks"),
    ("eagle3", dict(tensors={"fc.weight": damaged(math.nan)}), "fc.weight .* holds NaN or infinity"),
    ("mtp_mimo", dict(tensors={"model.mtp_layers.0.mlp.down_proj.weight": damaged(math.inf)}),
     "model.mtp_layers.0.mlp.down_proj.weight .* holds NaN or infinity"),
    ("eagle3_full_zeros", dict(tensors={"fc.weight": lambda x: x.to(torch.float8_e4m3fn)}),
     "fc.weight in .* is torch.float8_e4m3fn; quantised"),
    ("eagle3_full_zeros", dict(tensors={"fc.weight": lambda x: (x * 100).to(torch.int8)}),
     "fc.weight in .* is torch.int8; quantised"),
    ("eagle3", dict(tensors={"midlayer.mlp.up_proj.weight_scale_inv": torch.ones(1)}),
     "weight_scale_inv; quantised weights are read only as"),
    ("eagle_no_bias", dict(bias=True), "has no fc.bias"),
    ("eagle", dict(qkv_bias=True), r"has no layers.0.self_attn.q_proj.bias"),
    ("eagle", dict(tensors={"layers.0.input_layernorm.weight": torch.ones(64)}), r"layers.0.input_layernorm.weight"),
    ("eagle3", dict(fc_norm=True), r"has no fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
    ("eagle3", dict(eagle_config={"norm_before_fc": True}), r"has no input_norm.weight"),
    # the tokens that it keeps
    ("eagle3", dict(tensors={"d2t": drafts.draft_to_target()}), "d2t .* of its own below 96 when the row's number is"),
    ("eagle3", dict(tensors={"d2t": lambda x: x.index_copy(0, torch.tensor([1]), x[:1] - 1)}), "39 of them distinct"),
    ("eagle3", dict(tensors={"t2d": lambda x: x.roll(1)}), "t2d .* keeps other tokens"),
    ("eagle3", dict(tensors={"d2t": None, "t2d": None}), "has 40 rows, the target 96 tokens, and .* has no d2t"),
    ("eagle3", dict(tensors={"lm_head.weight": None}), "has no lm_head.weight"),
    ("eagle3", dict(draft_vocab_size=48), "40 rows, its config says draft_vocab_size 48"),
    ("eagle3", dict(overrides=dict(token_map=[1, 2])), "drafts 40 tokens of its own choice already"),
    # the config
    ("eagle3", rope(rope_type="dynamic", factor=2.0), "RoPE of type 'dynamic'"),
    ("eagle3", rope(rope_type="llama3"), "config is not valid: .*factor"),
    ("eagle3", rope(rope_type="spiral"), "config is not valid: .*spiral"),
    ("eagle3", dict(rope_theta=-1e4), "config is not valid: rope_theta must be a positive, finite number, not -1000"),
    ("eagle3", dict(is_neox_style=False), "interleaved RoPE"),
    ("eagle3", dict(rms_norm_eps="small"), "config is not valid"),
    ("eagle3", dict(hidden_act="swish2"), "config is not valid: .*swish2"),
    ("eagle3", dict(fc_norm=True, norm_before_fc=True), "exclude each other"),
    ("eagle3", dict(intermediate_size=None), "its config has no intermediate_size"),
    ("eagle3_mla", dict(kv_lora_rank=None, v_head_dim=None), "its config has no kv_lora_rank, v_head_dim"),
    ("eagle3_mla", dict(qk_rope_head_dim=4), r"kv_a_proj_with_mqa.weight is .*, expected"),
    ("eagle3_speculators", dict(speculators_model_type="xpress"), "speculators_model_type 'xpress'"),
    ("eagle3", dict(speculators_model_type="hydra"), "no EAGLE, EAGLE-3 or MTP head .*speculators_model_type 'hydra'"),
    # overrides
    *(("eagle", dict(overrides=dict(rope_theta=value)), f"{RIGHT_BASE}{value}") for value in (0, -1e4, math.nan)),
    ("eagle3_speculators", dict(overrides=dict(rope_theta=math.inf)), RIGHT_BASE + "inf"),
    ("eagle", dict(overrides=dict(rope_theta="1e6")), "rope_theta must be a positive number, not"),
    ("eagle", dict(overrides=dict(rope_theta=True)), "rope_theta must be a positive number, not"),
    ("eagle", dict(overrides=dict(taps=(1,))), "eagle heads have rope_theta"),
    ("eagle3", dict(overrides=dict(rope_thet=1)), r"unknown override 'rope_thet'. Did you mean 'rope_theta'\?"),
    # another target, another kind of draft
    ("eagle3", dict(target=models.ADMITTED["llama"]), "reads states 2, 1, -1 .* 2 layers; take the head of this model"),
    *((name, dict(target=wide), "hidden_size 64, LlamaForCausalLM has 128; take the head of this model")
      for name in ("eagle", "eagle3", "eagle3_speculators", "eagle_vllm")),
    *((name, dict(target=small), "vocab_size 96, LlamaForCausalLM has 80") for name in ("eagle", "eagle_vllm")),
    ("mtp_mimo", dict(target=wide), r"does not fit its config or the target: .*layernorm.weight is \[64\]"),
    ("mtp_mimo", dict(target=models.ADMITTED["gpt2"]), "is not built of decoder layers"),
    ("eagle", dict(target=models.ADMITTED["phi"]), "PhiForCausalLM has an output layer with a bias"),
    ("eagle", dict(algorithm="eagle3"), "holds a head for algo='eagle', not for algo='eagle3'"),
    ("eagle3", dict(algorithm="eagle"), "holds a head for algo='eagle3', not for algo='eagle'"),
    ("eagle3", dict(algorithm="mtp"), "holds a head for algo='eagle3', not for algo='mtp'"),
    ("mtp_mimo", dict(algorithm="eagle3"), "holds a head for algo='mtp', not for algo='eagle3'"),
    *(("eagle3", said, "DFlash head; use algo='dflash'")
      for said in (inner(), dict(architectures=["DFlashDraftModel"]),
                   dict(speculators_model_type="dflash"))),
]  # fmt: skip
DFLASH = [
    ("jetspec", dict(is_causal=False), "causal_head true and is_causal false, which exclude each other"),
    ("dflash", dict(target_hidden_size=128), "made for a model with hidden_size 128, LlamaForCausalLM has 64"),
    ("dflash", dict(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), r"_ids \[1, 3, 6\], inputs .* states 2, 4, 7 other"),
    ("dflash", dict(rope_theta=0), "config is not valid: " + RIGHT_BASE + "0"),
    ("dflash", dict(block_size=None), "must have a block_size of 2 or more, it has None"),
    ("dflash", dict(block_size=1), "must have a block_size of 2 or more, it has 1"),
    ("dflash", inner(mask_token_id=None), "must have a mask_token_id of 0 or more, it has None"),
    ("dflash", inner(mask_token_id=96), "mask token 96 is outside the 96 rows of the model's embedding; take"),
    ("dflash", inner(target_layer_ids=[1, 3]), "its fc reads 3 states of the target, its config names 2"),
    ("dflash", inner(target_layer_ids=[1, 3, 8]), "reads states 2, 4, 9 .* 8 layers; take the draft of this model"),
    ("dflash", inner(target_layer_ids=[-2, 3, 6]), "reads states -1, 4, 7"),
    ("dflash", inner(target_layer_ids=None), "its fc reads 3 states of the target, its config names 2"),
    ("dflash", inner(target_layer_ids=[1, 3, "6"]), "must have a list of layers as target_layer_ids"),
    ("dflash", dict(num_target_layers=36), "made for a model of 36 layers, LlamaForCausalLM has 8"),
    ("dflash", dict(hidden_size=32), "hidden_size 32, LlamaForCausalLM has 64"),
    ("dflash", dict(vocab_size=128), "vocab_size 128, LlamaForCausalLM has 96"),
    ("dflash", dict(num_hidden_layers=1), UNKNOWN + "layers.1.*|its config must name"),
    ("dflash", dict(layer_types=["sliding_attention", "chunked_attention"]), "sliding_attention or full_attention for"),
    ("dflash", dict(layer_types=["sliding_attention"] * 2), "neither sliding_window nor swa_window_size"),
    ("dflash", dict(layer_types=None, use_sliding_window=True), "use_sliding_window, and no layer_types"),
    ("dflash", dict(is_neox_style=False), "interleaved RoPE"),
    ("dflash", dict(partial_rotary_factor=0.5), "RoPE of a part of each head"),
    ("dflash", rope(rope_type="dynamic", factor=2.0), "RoPE of type 'dynamic'"),
    ("dflash", dict(draft_vocab_size=40), "has no lm_head.weight for its 40 tokens"),
    ("dflash", dict(attention_bias=True), "has no layers.0.self_attn.q_proj.bias"),
    ("dflash_bidirectional", dict(sliding_window=5), "its window of 5 is shorter than its blocks of 6"),
    *(("dflash", dict(tensors={stray: torch.zeros(4)}), UNKNOWN + stray)
      for stray in ("layers.0.self_attn.sinks", "markov_head.w1.weight", "mask_hidden")),
    ("dflash", dict(tensors={"fc.weight": lambda x: x[:, :-2]}), "fc.weight reads 190 numbers, which is no multiple"),
    ("dflash_speculators_kept", dict(tensors={"d2t": None, "t2d": None}), "has no d2t"),
    ("dflash", dict(target=models.ADMITTED["llama"]), "made for a model of 8 layers, LlamaForCausalLM has 2"),
    *((name, dict(algorithm="dflash"), "holds no DFlash draft: .* or 'eagle3', whole models with")
      for name in ("eagle", "eagle3", "eagle3_deepspec")),
    *((name, dict(algorithm="eagle3"), "use algo='dflash'")
      for name in ("dflash", "dflash_deepspec", "dflash_speculators")),
]  # fmt: skip
VARIANTS = {
    "projector_type": "dspine", "attention_sink_bias": True, "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.707, "attention_mode": "mla", "use_aux_hidden_state": False,
}  # fmt: skip
for key, value in VARIANTS.items():
    told = f"{key} {value!r}, which is not built here"
    DFLASH.append(("dflash", inner(**{key: value}), f"its config has dflash_config.{told}"))
    DFLASH += [(name, {key: value}, f"its config has {told}") for name in ("dflash", "dflash_speculators")]


@pytest.mark.parametrize(("name", "changes", "message"), EAGLES + DFLASH)
def test_what_is_wrong_is_named(tmp_path, name, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        changed.read(tmp_path, name, **changes)


UNKNOWN_KEYS = {
    "embedding_multiplier": 12.0, "attn_logit_softcapping": 50.0, "feature_shift": 1, "rope_interleave": True,
    "gating": "per-head", "parallel_draft_step": 4, "use_mtp_layernorm": True, "num_experts": 128,
    "shared_expert_intermediate_size": 1024, "reuse_target_lm_head": True, "additional_fc": True,
    "eagle_aux_injection_mode": "banded_mix_fc", "logit_scale": 0.5, "num_centroids": 64,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}, "fc_layernorm": True,
    "aux_hidden_stream": "attn_res", "dflash_context_residual": True, "residual_multiplier": 0.2,
}  # fmt: skip
"""Keys of drafts that others build, which would change what a draft computes."""


@pytest.mark.parametrize(
    ("name", "section", "more"),
    [
        ("eagle", None, {"causal_head": True}), ("eagle3_sglang", None, {}),
        ("eagle3_sglang", "eagle_config", {"causal_head": True}), ("eagle3_speculators", None, {}),
        ("eagle3_speculators", "transformer_layer_config", {}), ("eagle_vllm", "model", {"causal_head": True}),
        ("dflash", "dflash_config", {"pure_draft_prefix_len": 2}), ("dflash_sliding", None, {}),
        ("dflash_deepspec", None, {}), ("dflash_speculators", "transformer_layer_config", {}),
    ],
)  # fmt: skip
def test_unknown_keys_are_refused_by_name(tmp_path, name, section, more):
    """At the top of a config and in each object within it."""
    written, flavour = changed.write(tmp_path, name), changed.EVERY[name]
    for key, value in (UNKNOWN_KEYS | more).items():
        inner = {section: {**written.config[section], key: value}} if section else {key: value}
        drafts.save(tmp_path, {**written.config, **inner}, written.tensors, flavour.files)
        told = f"its config has {section + '.' if section else ''}{key} {value!r}, which is not"
        with pytest.raises(ValueError, match=re.escape(told)):
            load_head(tmp_path, written.target, flavour.algorithm)


# Files


@pytest.mark.parametrize("files", ["safetensors", "sharded", "bin"])
def test_truncated_files(tmp_path, files):
    written = changed.write(tmp_path, "eagle3", files=files)
    victim = next(path for path in sorted(tmp_path.glob("*")) if path.suffix in (".bin", ".safetensors"))
    content = victim.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        victim.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{victim.name} cannot be read"):
            load_head(tmp_path, written.target)


def test_files_that_are_not_there(tmp_path):
    target = changed.write(tmp_path, "eagle3_sglang").target

    def refused(message, folder=tmp_path):
        with pytest.raises(ValueError, match=message):
            load_head(folder, target)

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(r"has no model-00002-of-00002.safetensors, which its index names")
    changed.write(tmp_path, "eagle3")
    (tmp_path / "config.json").write_text("{")
    refused(r"config.json is not JSON")
    (tmp_path / "config.json").unlink()
    refused(r"has no config.json")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(r"none of model.safetensors, pytorch_model.bin")
    refused(r"neither a folder nor a repository", tmp_path / "nowhere" / "at" / "all")
    refused("pass it as token_map", tmp_path / "freq_32768.pt")
    torch.save({"fc.weight": "text"}, tmp_path / "pytorch_model.bin")
    refused(r"expected tensors by name")


def test_pickled_code_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(tmp_path, drafts.llama())
    assert not (tmp_path / "written").exists()


def test_what_is_no_draft(tmp_path):
    target = drafts.llama()
    for given, algorithm, name in ((3, None, "int"), (None, "dflash", "NoneType"), (3, "dflash", "int")):
        with pytest.raises(TypeError, match=f"got {name}"):
            load_head(given, target, algorithm)
    drafts.save(tmp_path / "other", {"model_type": "medusa"}, {"0.0.linear.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"model_type 'medusa', .* tensors 0.0.linear.weight"):
        load_head(tmp_path / "other", target)
    with pytest.raises(ValueError, match=r"was not loaded from a checkpoint.*pass draft="):
        load_head(None, target, "mtp")
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a whole language model \(LlamaForCausalLM\); use algo='draft_model'"):
        load_head(tmp_path, target)
    with pytest.raises(ValueError, match=r"holds no block of multi-token prediction .*pass draft="):
        load_head(None, AutoModelForCausalLM.from_pretrained(tmp_path).eval(), "mtp")


@pytest.mark.parametrize(
    ("algorithm", "lacks_tokens"),
    [("eagle3", "drafts tokens that are not the 80"), ("dflash", "vocab_size 96, LlamaForCausalLM has 80")],
)
def test_drafts_made_elsewhere(tmp_path, algorithm, lacks_tokens):
    written = changed.write(tmp_path, algorithm)
    draft = load_head(tmp_path, written.target, algorithm)
    assert load_head(draft, written.target, algorithm) is draft
    with pytest.raises(TypeError, match="got Linear"):
        load_head(torch.nn.Linear(2, 2), written.target, algorithm)
    with pytest.raises(TypeError, match=r"rope_theta: a .* that is already loaded"):
        load_head(draft, written.target, algorithm, rope_theta=1e4)
    with pytest.raises(ValueError, match=r"in torch.float32, the model on cpu in torch.bfloat16"):
        load_head(draft, drafts.llama().to(torch.bfloat16), algorithm)
    with pytest.raises(ValueError, match=lacks_tokens):
        load_head(draft, small(), algorithm)


def test_mask_embeddings_in_a_file_of_their_own(tmp_path):
    written, values = changed.write(tmp_path, "dflash"), torch.randn(1, drafts.H)

    def read(content):
        torch.save(content, tmp_path / "mask_embedding.pt")
        return load_head(tmp_path, written.target, "dflash")

    for content in (values, {"embedding": values, "mask_token_id": MASK}, {"embedding": values[0]}):
        draft = read(content)
        assert torch.equal(draft.mask_embedding, values[0]) and not draft.mask_embedding.requires_grad
    for content, message in (
        ({"embedding": values, "mask_token_id": 3}, "is for token 3, its config says mask_token_id 93"),
        (values[:, :-1], r"must be 64 finite numbers, it is \[1, 63\]"),
        (values * math.nan, "must be 64 finite numbers"),
        ({"mask": values}, "it is NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            read(content)
