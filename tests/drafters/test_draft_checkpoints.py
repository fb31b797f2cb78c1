"""Loading of draft heads: every published format, everything that can be wrong with one, and the self-check."""

import json
import operator
import re
from unittest import mock

import draft_checkpoints as drafts
import huggingface_hub
import models
import pytest
import torch
from draft_rounds import generated, prompts
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.capture.admit import admit
from spec_compile.config import Options
from spec_compile.drafters import self_check
from spec_compile.drafters.checkpoints import files
from spec_compile.drafters.checkpoints.load import load_head, read_token_map
from spec_compile.drafters.modules.eagle import Head
from spec_compile.drafters.self_check import acceptance, calibrate
from spec_compile.drafters.shared_draft import tapped_states
from spec_compile.errors import UnsupportedModelError
from spec_compile.passes.outputs import FINAL

TAPS = {
    "eagle3": (2, 4, 5),
    "eagle3_sglang": (2, 3, 5),  # [1, 2, 4]: outputs
    "eagle3_borrowed": (2, 3, 5),
    "eagle3_plain_state": (FINAL,),
    "eagle31": (2, 3, 5),
    "eagle3_gpt_oss": (2, 3, 5),
    "eagle3_llama3_rope": (2, 3, 5),
    "eagle3_speculators_09": (1, 3, 4, 8),
    "eagle3_speculators": (1, 3, 4),
    "eagle3_speculators_31": (1, 3, 4),
    "eagle3_deepspec": (1, 3, 4, 6, 8),
}
WHOLE = (
    "eagle3_full", "eagle3_full_zeros", "eagle3_borrowed", "eagle3_wide", "eagle3_deepspec", "eagle3_mla",
    "eagle31_mla", "eagle3_mla_layers",
)  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(name, change=None, files=None, **config):
        """Write a flavour, its tensors changed by `change` and its config by `config`."""
        written = drafts.write(name, tmp_path / name, **config)
        if change or files:
            if change:
                change(written.tensors)
            for path in written.folder.glob("*"):
                path.unlink()
            drafts.save(written.folder, written.config, written.tensors, files or drafts.FLAVOURS[name].files)
        return written

    return write


def load(written, algorithm=None, **kwargs):
    return load_head(written.folder, written.target, algorithm, **kwargs)


# Every flavour


@pytest.mark.parametrize("name", drafts.FLAVOURS)
def test_a_flavour_loads(write, name):
    written = write(name)
    before = {n: p.data_ptr() for n, p in written.target.named_parameters()}
    head = load(written, drafts.FLAVOURS[name].algorithm)
    target = written.target

    assert head.taps == TAPS.get(name, (2, 4, 5) if name.startswith("eagle3") else (FINAL,))
    assert head.layers == (2 if "layers" in name or name in ("eagle3_speculators_09", "eagle_mistral") else 1)
    assert head.hidden_size == (48 if name == "eagle3_wide" else drafts.H)
    kept = name.startswith("eagle3") and name not in WHOLE
    assert (head.draft_to_target is not None) == kept
    if kept:
        assert torch.equal(head.draft_to_target, drafts.draft_to_target())
        assert head.head_weight.shape == (drafts.VD, drafts.H)
    own_embedding = name in ("eagle3_wide", "eagle3_speculators_31")
    assert (head.embedding is target.get_input_embeddings().weight) != own_embedding
    own_output = name.startswith("eagle3") and name != "eagle3_borrowed"
    assert (head.head_weight is target.get_output_embeddings().weight) != own_output

    assert not head.training
    shared = {id(p) for p in target.parameters()}
    assert all(not p.requires_grad for p in head.parameters() if id(p) not in shared)
    assert all(not value.is_meta for value in head.state_dict().values())
    assert {n: p.data_ptr() for n, p in target.named_parameters()} == before
    assert all(p.requires_grad for p in target.parameters())
    assert target.config._attn_implementation == "sdpa"
    assert head.flavour in head.report[0] and str(written.folder) in head.report[0]
    ignored = [line for line in head.report if line.startswith("ignored")]
    copies = [n for n in written.tensors if "embed_tokens" in n or "shared_head.head" in n]
    inside = [n for n in copies if drafts.FLAVOURS[name].algorithm != "mtp" or "layers" in n]
    assert len(ignored) == (0 if own_embedding else len(inside)) + (name == "eagle_vllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["eagle31_mla", "eagle3_mla_specforge", "eagle3_speculators_09", "eagle_mistral", "mtp_speculators"]
)
@torch.no_grad()
def test_answers_with_a_head_from_files_are_those_without(write, name):
    written, algorithm = write(name), drafts.FLAVOURS[name].algorithm
    options = dict(num_steps=3, topk=3, num_draft_tokens=8, adaptive=False, compile=False, check=False)
    fast = speculate(written.target, algorithm, draft=written.folder, max_cache_len=100, **options)
    assert torch.equal(generated(fast, prompts(3)), generated(written.target, prompts(3)))


@pytest.mark.parametrize("files", ["safetensors", "sharded", "bin"])
def test_files_of_every_kind(write, files):
    written = write("eagle3", files=files)
    head = load(written)
    assert torch.equal(head.fc.weight, written.tensors["fc.weight"])


def test_naive_eagle_takes_any_head(write):
    assert load(write("eagle")).flavour == "EAGLE"
    assert load(write("eagle3")).flavour == "EAGLE-3"
    assert load(write("mtp_mimo")).flavour == "MTP (MiMo)"


def test_the_targets_own_block(tmp_path):
    """As users have it: a folder that transformers loads, leaving the block out."""
    written = drafts.write("mtp_deepseek", tmp_path / "whole")
    target = written.target
    target.save_pretrained(tmp_path / "target")
    extra = {n: v for n, v in written.tensors.items() if n.startswith("model.layers.3.")}
    drafts.save(tmp_path / "extra", None, extra)
    (tmp_path / "extra/model.safetensors").rename(tmp_path / "target/extra.safetensors")
    (tmp_path / "target/model.safetensors").rename(tmp_path / "target/main.safetensors")
    index = {n: "extra.safetensors" for n in extra}
    index.update({n: "main.safetensors" for n in target.state_dict()})
    (tmp_path / "target/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32").eval()
    head = load_head(None, model, "mtp")
    assert torch.equal(head.fc.weight, written.tensors["model.layers.3.eh_proj.weight"])
    assert head.embedding is model.get_input_embeddings().weight
    assert model.config._attn_implementation != head.block.self_attn.config._attn_implementation
    assert model.config.num_hidden_layers == 3


def test_further_modules_are_read(write):
    def more(tensors):
        for name in [n for n in tensors if "mtp_layers.0." in n]:
            tensors[name.replace("mtp_layers.0.", "mtp_layers.1.")] = tensors[name] + 1

    head = load(write("mtp_mimo", more))
    assert torch.equal(head.further[0].fc.weight, head.fc.weight + 1)
    assert "2 modules, each of which drafts one token" in head.report[0]

    def layers(tensors):
        for name in [n for n in tensors if "mtp.layers.0." in n]:
            tensors[name.replace("mtp.layers.0.", "mtp.layers.1.")] = tensors[name] + 1

    head = load(write("mtp_qwen", layers))
    assert torch.equal(head.further[0].fc.weight, head.fc.weight)
    own = [module.block.self_attn.q_proj.weight for module in (head, *head.further)]
    assert torch.equal(own[1], own[0] + 1)


def test_experts_stored_together(write):
    """As Qwen3.5 stores them."""

    def join(tensors):
        stem = "mtp.layers.0.mlp.experts"
        parts = {p: [tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")}
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"])])
        tensors[f"{stem}.down_proj"] = torch.stack(parts["down"])

    apart = load(write("mtp_qwen"))
    together = load(write("mtp_qwen", join))
    for one, other in zip(apart.state_dict().values(), together.state_dict().values()):
        assert torch.equal(one, other)


# Taps


@pytest.mark.parametrize(
    ("where", "ids", "taps", "others"),
    [
        ("eagle_config", [1, 3, 4], (2, 4, 5), [(1, 3, 4)]),
        ("eagle_config", [2, 4, 5], (2, 4, 5), [(3, 5, 6)]),
        ("eagle_config", [2, 4, 8], (2, 4, 8), []),  # 9 would be beyond the last layer
        ("target_layer_ids", [2, 4, 5], (3, 5, 6), []),
        ("default", None, (2, 4, 5), []),
    ],
)
def test_conventions_of_taps(write, where, ids, taps, others):
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if where == "eagle_config" else {}
    changes |= {"target_layer_ids": ids} if where == "target_layer_ids" else {}
    head = load(write("eagle3", **changes))
    assert head.taps == taps
    assert [reading.taps for reading in head.readings()] == [taps, *others]


def test_taps_must_fit(write):
    for ids in ([2, 4], [2, 4, 9], [-1, 4, 5]):
        written = write("eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        with pytest.raises(ValueError, match="states"):
            load(written)
    tiny = models.ADMITTED["llama"]()  # two layers: the default would be 2, 1, -1
    with pytest.raises(ValueError, match=r"reads states 2, 1, -1 .* 2 layers; take the head of this model"):
        load_head(write("eagle3").folder, tiny)


def test_several_meanings(write):
    head = load(write("eagle31"))
    found = {(r.taps, r.recycle_normed, r.rotary_emb.config.rope_parameters["rope_theta"]) for r in head.readings()}
    assert len(found) == len(head.readings()) == 8 and (head.taps, True, 1e6) in found
    assert all(reading.fc is head.fc for reading in head.readings())
    read = load(write("eagle31"), taps=(0, 1, FINAL), recycle_normed=False, rope_theta=20000)
    assert (read.taps, read.recycle_normed, len(read.readings())) == ((0, 1, FINAL), False, 1)
    assert read.rotary_emb.config.rope_parameters["rope_theta"] == 20000
    assert len(load(write("eagle3_speculators_31")).readings()) == 1
    assert [r.taps for r in load(write("mtp_glm")).readings()] == [(FINAL,), (2,)]


def test_trainers_of_latent_attention_may_have_left_out_the_base_of_rope(write):
    ropes = [r.rotary_emb.config.rope_parameters for r in load(write("eagle3_mla")).readings()]
    assert {(rope["rope_type"], rope["factor"], rope["rope_theta"]) for rope in ropes} == {
        ("yarn", 64.0, 50000.0), ("yarn", 64.0, 10000.0),
    }  # fmt: skip
    assert "rope_theta=50000 (yarn), latent attention of rank 20" in "\n".join(load(write("eagle3_mla")).report)


def test_keys_of_latent_attention(write):
    """Its sizes must be there; in the config of a head with grouped queries they are left over from the target."""
    with pytest.raises(ValueError, match="its config has no kv_lora_rank, v_head_dim"):
        load(write("eagle3_mla", kv_lora_rank=None, v_head_dim=None))
    with pytest.raises(ValueError, match=r"kv_a_proj_with_mqa.weight is .*, expected"):
        load(write("eagle3_mla", qk_rope_head_dim=4))
    assert not load(write("eagle3_mla_specforge", rope_interleave=False)).blocks[0].self_attn.sizes.pairs
    assert "qkv_bias=False" in "".join(load(write("eagle3", **drafts.LATENT)).report)


@pytest.mark.parametrize(
    ("flags", "recycle", "readings"),
    [
        ({}, False, 1),
        ({"norm_output": True}, True, 2),
        ({"norm_output": True, "architectures": ["LlamaForCausalLMEagle3"]}, False, 2),  # SpecForge's own meaning
        ({"norm_output": False}, False, 1),
        ({"norm_output": False, "architectures": ["LlamaForCausalLMEagle3"]}, False, 2),  # SpecForge: no last norm
        ({"eagle_config": {"return_hidden_post_norm": True}}, True, 1),
    ],
)
def test_what_goes_round(write, flags, recycle, readings):
    head = load(write("eagle3", **flags))
    assert (head.recycle_normed, len(head.readings())) == (recycle, readings)


# Everything that can be wrong


REQUIRED = {
    "eagle_no_bias": lambda name: name != "embed_tokens.weight",
    "eagle_qwen2": lambda name: True,
    "eagle_speculators": lambda name: True,
    "eagle3_gpt_oss": lambda name: name not in ("embed_tokens.weight", "d2t", "t2d"),
    "eagle31_mla": lambda name: name not in ("embed_tokens.weight", "lm_head.weight"),
    "eagle31": lambda name: name not in ("embed_tokens.weight", "d2t", "t2d"),
    "eagle3_sglang_layers": lambda name: name not in ("d2t", "t2d"),
    "eagle3_deepspec": lambda name: name not in ("embed_tokens.weight", "lm_head.weight"),
    "mtp_deepseek_nextn": lambda name: not name.endswith(("embed_tokens.weight", "shared_head.head.weight")),
    "mtp_mimo": lambda name: "mtp_layers" in name,
    "mtp_qwen": lambda name: name.startswith("mtp."),
}


SIGNS = ("fc", "fusion_fc", "mtp.fc", "model.layers.0.eh_proj", "model.mtp_layers.0.input_proj")
"""Without the weight of one of these, its format is not recognised."""


@pytest.mark.sweep("eagle31 eagle3_sglang_layers mtp_qwen")
@pytest.mark.parametrize("name", REQUIRED)
def test_every_tensor_is_needed(write, name):
    """Without it, or in another shape, loading stops, and says which."""
    complete = write(name).tensors
    for tensor in filter(REQUIRED[name], list(complete)):
        less = write(name, operator.methodcaller("pop", tensor))
        with pytest.raises(ValueError, match=None if tensor.removesuffix(".weight") in SIGNS else re.escape(tensor)):
            load(less, drafts.FLAVOURS[name].algorithm)
        shorter = write(name, operator.methodcaller("update", {tensor: complete[tensor][:-1]}))
        with pytest.raises(ValueError, match=re.escape(tensor)):
            load(shorter, drafts.FLAVOURS[name].algorithm)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp_deepseek_nextn", "mtp_qwen"])
def test_a_tensor_too_many(write, name):
    stray = "mtp.layers.0.self_attn.sinks" if name == "mtp_qwen" else "model.layers.0.self_attn.sinks"
    with pytest.raises(ValueError, match=f"tensors that this format does not know: {stray}"):
        load(write(name, lambda tensors: tensors.update({stray: torch.zeros(4)})))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["eagle3", "mtp_mimo"])
def test_damaged_values(write, name, value):
    victim = "fc.weight" if name == "eagle3" else "model.mtp_layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"{victim} .* holds NaN or infinity"):
        load(write(name, lambda tensors: tensors[victim].view(-1)[5:6].fill_(value)))


def test_quantised_weights(write):
    def eighth(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)

    def whole(tensors):
        tensors["fc.weight"] = (tensors["fc.weight"] * 100).to(torch.int8)

    for change, dtype in ((eighth, "float8_e4m3fn"), (whole, "int8")):
        with pytest.raises(ValueError, match=rf"fc.weight in .* is torch.{dtype}; quantised"):
            load(write("eagle3_full_zeros", change))
    scale = {"midlayer.mlp.up_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(ValueError, match=r"weight_scale_inv; quantised weights are read only as"):
        load(write("eagle3", lambda tensors: tensors.update(scale)))


@pytest.mark.parametrize("files", ["safetensors", "sharded", "bin"])
def test_truncated_files(write, files):
    written = write("eagle3", files=files)
    victim = next(path for path in sorted(written.folder.glob("*")) if path.suffix in (".bin", ".safetensors"))
    content = victim.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        victim.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{victim.name} cannot be read"):
            load(written)


def test_files_that_are_not_there(write, tmp_path):
    written = write("eagle3_sglang")
    (written.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model-00002-of-00002.safetensors, which its index names"):
        load(written)
    written = write("eagle3")
    (written.folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(written)
    (written.folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json"):
        load(written)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"none of model.safetensors, pytorch_model.bin"):
        load_head(tmp_path / "empty", written.target)
    with pytest.raises(ValueError, match=r"neither a folder nor a repository"):
        load_head(tmp_path / "nowhere" / "at" / "all", written.target)
    torch.save({"fc.weight": "text"}, tmp_path / "empty" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected tensors by name"):
        load_head(tmp_path / "empty", written.target)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no connection"), TimeoutError("no connection")])
def test_a_download_that_fails_names_the_file(monkeypatch, error):
    monkeypatch.setattr(files, "hf_hub_download", mock.Mock(side_effect=error))
    monkeypatch.setattr(files.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"draft: [\w.]+ of some/head could not be downloaded: no connection"):
        load_head("some/head", drafts.llama())
    if isinstance(error, LocalEntryNotFoundError):
        assert files.fetcher("some/head", local=True)("config.json") is None


def test_pickled_code_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(tmp_path, drafts.llama())
    assert not (tmp_path / "written").exists()


def test_a_head_for_another_target(write):
    wide = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, hidden_size=128, num_hidden_layers=8))
    other = drafts.llama()
    other.resize_token_embeddings(80)
    for name in ("eagle", "eagle3", "eagle3_speculators", "eagle_vllm"):
        written = write(name)
        with pytest.raises(ValueError, match=r"hidden_size 64, LlamaForCausalLM has 128; take the head of this model"):
            load_head(written.folder, wide)
        with pytest.raises(ValueError, match=r"vocab_size 96, LlamaForCausalLM has 80"):
            load_head(written.folder, other)
    with pytest.raises(ValueError, match=r"does not fit its config or the target: .*layernorm.weight is \[64\]"):
        load_head(write("mtp_mimo").folder, wide)
    with pytest.raises(UnsupportedModelError, match="is not built of decoder layers"):
        load_head(write("mtp_mimo").folder, models.ADMITTED["gpt2"]())
    with pytest.raises(ValueError, match="PhiForCausalLM has an output layer with a bias"):
        load_head(write("eagle").folder, models.ADMITTED["phi"]())


def test_a_head_of_another_kind(write, tmp_path):
    for name, algorithm in (("eagle", "eagle3"), ("eagle3", "eagle"), ("eagle3", "mtp"), ("mtp_mimo", "eagle3")):
        held = drafts.FLAVOURS[name].algorithm
        with pytest.raises(ValueError, match=f"holds a head for algo='{held}', not for algo='{algorithm}'"):
            load(write(name), algorithm)
    for config in (
        {"dflash_config": {}},
        {"architectures": ["DFlashDraftModel"]},
        {"speculators_model_type": "dflash"},
    ):
        with pytest.raises(ValueError, match="DFlash head; use algo='dflash'"):
            load(write("eagle3", **config))
    with pytest.raises(ValueError, match=r"no EAGLE, EAGLE-3 or MTP head .*speculators_model_type 'hydra'"):
        load(write("eagle3", speculators_model_type="hydra"))
    target = drafts.llama()
    target.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is a whole language model \(LlamaForCausalLM\); use algo='draft_model'"):
        load_head(tmp_path / "model", target)
    drafts.save(tmp_path / "other", {"model_type": "medusa"}, {"0.0.linear.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"model_type 'medusa', .* tensors 0.0.linear.weight"):
        load_head(tmp_path / "other", target)
    with pytest.raises(ValueError, match="pass it as token_map"):
        load_head(tmp_path / "freq_32768.pt", target)
    with pytest.raises(TypeError, match="got int"):
        load_head(3, target)


def test_no_block_of_multi_token_prediction(tmp_path):
    target = drafts.llama()
    with pytest.raises(ValueError, match=r"was not loaded from a checkpoint.*pass draft="):
        load_head(None, target, "mtp")
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no block of multi-token prediction .*pass draft="):
        load_head(None, AutoModelForCausalLM.from_pretrained(tmp_path).eval(), "mtp")


def test_kept_tokens_must_make_sense(write):
    def absolute(tensors):
        tensors["d2t"] = drafts.draft_to_target()

    with pytest.raises(ValueError, match=r"d2t .* token of its own below 96 when the row's number is added"):
        load(write("eagle3", absolute))
    with pytest.raises(ValueError, match=r"39 of them distinct"):
        load(write("eagle3", lambda tensors: tensors["d2t"][1:2].copy_(tensors["d2t"][:1] - 1)))
    with pytest.raises(ValueError, match=r"t2d .* keeps other tokens"):
        load(write("eagle3", lambda tensors: tensors.update(t2d=tensors["t2d"].roll(1))))
    with pytest.raises(ValueError, match=r"has 40 rows, the target 96 tokens, and .* has no d2t"):
        load(write("eagle3", lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")]))
    with pytest.raises(ValueError, match=r"has no lm_head.weight"):
        load(write("eagle3", lambda tensors: tensors.pop("lm_head.weight")))
    with pytest.raises(ValueError, match="40 rows, its config says draft_vocab_size 48"):
        load(write("eagle3", draft_vocab_size=48))
    head = load(write("eagle3", lambda tensors: tensors.pop("d2t")))
    assert torch.equal(head.draft_to_target, drafts.draft_to_target())


def test_configs_that_cannot_be_built(write):
    for changes, message in (
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type 'dynamic'"),
        ({"is_neox_style": False}, "interleaved RoPE"),
        ({"rms_norm_eps": "small"}, "config is not valid"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config is not valid: .*factor"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "config is not valid: .*spiral"),
        ({"hidden_act": "swish2"}, "config is not valid: .*swish2"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            load(write("eagle3", **changes))
    written = write("eagle3")
    written.config.pop("intermediate_size")
    drafts.save(written.folder, written.config, written.tensors, "bin")
    with pytest.raises(ValueError, match="its config has no intermediate_size"):
        load(written)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},  # SpecForge: qwen2-5-vl-eagle3.json
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},  # transformers 5
    ],
)
def test_rope_of_several_axes_is_that_of_a_text(write, said):
    """All axes have the same position there."""
    head = load(write("eagle3_sglang", **said))
    assert torch.equal(head.rotary_emb.inv_freq, load(write("eagle3_sglang")).rotary_emb.inv_freq)
    assert any("multimodal RoPE" in line for line in head.report) == ("mrope" in str(said))


def test_rope_on_a_part_of_each_head(write):
    """Its other meaning, the reference trainer's base, turns the same part. DFlash drafts have none."""
    for said in ({"partial_rotary_factor": 0.5}, {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}):
        readings = load(write("eagle3", rope_theta=1e6, **said)).readings()
        assert [len(reading.rotary_emb.inv_freq) for reading in readings] == [drafts.D // 4] * 2
    with pytest.raises(ValueError, match="RoPE of a part of each head"):
        load(drafts.write("dflash", write("eagle3").folder / "other", partial_rotary_factor=0.5), "dflash")


EXPORTED = {
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
    },
    "target_model_type": "gemma3_text", "num_local_experts": 16, "experts_per_token": 4, "do_sample": False,
    "attention_dropout": 0.1, "max_window_layers": 48, "initializer_range": 0.02, "pretraining_tp": 1,
    "embedding_multiplier": 1.0, "loss_decay_gamma": 4.0, "attn_logit_softcapping": None,
}  # fmt: skip
"""What the exporters of published heads write besides, all of it without effect."""


def test_keys_without_effect(write):
    plain, exported = load(write("eagle3_sglang")), load(write("eagle3_sglang", **EXPORTED))
    assert plain.report[1:4] == exported.report[1:4]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), exported.parameters()))


MODEL_OPTIMIZER = {
    "attention_dropout": 0.0, "bos_token_id": 163584, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "eos_token_id": 163586,
    "forced_bos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "initializer_range": 0.02,
    "is_decoder": False, "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "pad_token_id": 163839, "pretraining_tp": 1, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50, "top_p": 1.0,
    "torch_dtype": "bfloat16", "torchscript": False, "transformers_version": "4.55.0", "typical_p": 1.0,
    "use_bfloat16": False, "use_cache": True, "tie_word_embeddings": False, "num_local_experts": 16,
}  # fmt: skip
"""What ``hf_spec_configs.py`` of NVIDIA's Model-Optimizer copies from the target's config into that of a head."""


@pytest.mark.parametrize("name", ["eagle3_mla", "eagle3_gpt_oss"])
def test_a_targets_keys_in_the_config_of_its_head(write, name):
    eagle = {**write(name).config["eagle_config"], **EXPORTED["eagle_config"]}
    eagle["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    assert load(write(name, **MODEL_OPTIMIZER, eagle_config=eagle)).taps == (2, 4, 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 128),  # SpecForge: Qwen3MoeForCausalLMEagle3
        ("shared_expert_intermediate_size", 1024),
        ("reuse_target_lm_head", True),  # SpecForge's trees for Gemma
        ("additional_fc", True),
        ("eagle_aux_injection_mode", "banded_mix_fc"),
        ("logit_scale", 0.5),
        ("num_centroids", 64),
        ("llama_4_scaling", {"original_max_position_embeddings": 8192, "beta": 0.1}),
    ],
)
def test_keys_of_heads_that_are_not_built(write, key, value):
    with pytest.raises(ValueError, match=re.escape(f"its config has {key} {value!r}, which is not known here")):
        load(write("eagle3_sglang", **{key: value}))


def test_formats_that_are_not_built(write):
    with pytest.raises(ValueError, match="speculators_model_type 'xpress'"):
        load(write("eagle3_speculators", speculators_model_type="xpress"))

    def mix(tensors):
        tensors["midlayer.mlp.experts.0.up_proj.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")

    with pytest.raises(ValueError, match=r"has no midlayer.mlp.up_proj.weight"):  # SpecForge's mixture for gpt-oss
        load(write("eagle3_sglang", mix))
    with pytest.raises(ValueError, match="must have a mask_token_id or pard_token or ptd_token_id"):  # SpecForge
        load(drafts.write("p_eagle", write("eagle3").folder / "other", ptd_token_id=None))


@pytest.mark.parametrize("name", ["eagle", "eagle3_sglang", "eagle3_speculators", "eagle_vllm"])
def test_unknown_keys_are_refused_by_name(write, name):
    """At the top of a config and in each object within it."""
    config = write(name).config
    sections = [section for section in ("eagle_config", "transformer_layer_config", "model") if section in config]
    for key, value in (
        ("embedding_multiplier", 12.0), ("attn_logit_softcapping", 50.0), ("causal_head", True), ("feature_shift", 1),
        ("rope_interleave", True), ("gating", "per-head"), ("parallel_draft_step", 4), ("use_mtp_layernorm", True),
    ):  # fmt: skip
        for section in ("", *sections):
            changes = {section: {**config[section], key: value}} if section else {key: value}
            path = f"{section}.{key}" if section else key
            with pytest.raises(ValueError, match=re.escape(f"its config has {path} {value!r}, which is not")):
                load(write(name, **changes))


@pytest.mark.parametrize("value", [0, -1e4, float("nan"), float("inf")])
def test_bases_of_rope_are_positive_and_finite(write, value):
    for name in ("eagle", "eagle3", "eagle3_speculators"):
        with pytest.raises(ValueError, match=f"rope_theta must be a positive, finite number, not {value}"):
            load(write(name), rope_theta=value)
    with pytest.raises(ValueError, match=f"config is not valid: rope_theta must be a positive, finite .* {value}"):
        load(write("eagle3", rope_theta=float(value)))
    for wrong in (True, "1e6"):
        with pytest.raises(TypeError, match="rope_theta must be a positive number, not"):
            load(write("eagle"), rope_theta=wrong)


def test_flags_ask_for_tensors(write):
    with pytest.raises(ValueError, match=r"has no fc.bias"):
        load(write("eagle_no_bias", bias=True))
    with pytest.raises(ValueError, match=r"has no layers.0.self_attn.q_proj.bias"):
        load(write("eagle", qkv_bias=True))
    with pytest.raises(ValueError, match=r"has no fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"):
        load(write("eagle3", fc_norm=True))
    with pytest.raises(ValueError, match=r"has no input_norm.weight"):
        load(write("eagle3", eagle_config={"norm_before_fc": True}))
    with pytest.raises(ValueError, match=r"layers.0.input_layernorm.weight"):  # a stock layer is no EAGLE layer
        load(write("eagle", lambda tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(64)})))


def test_a_tied_output_matrix_stays_its_own(write):
    """Targets with tied embeddings hand that flag on to drafts of fewer words."""
    assert load(write("eagle3", tie_word_embeddings=True)).head_weight.shape == (drafts.VD, drafts.H)


def test_trained_and_random_embeddings(write):
    trained = load(write("eagle3_speculators_31"))
    assert torch.equal(trained.embedding, write("eagle3_speculators_31").tensors["embed_tokens.weight"])

    def scramble(tensors):
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0)

    written = write("eagle3_speculators_31", scramble)
    head = load(written)
    assert head.embedding is written.target.get_input_embeddings().weight
    assert "ignored: embed_tokens.weight, the target's is used, though it is another" in head.report


def test_unknown_overrides(write):
    with pytest.raises(TypeError, match=r"unknown override 'rope_thet'. Did you mean 'rope_theta'\?"):
        load(write("eagle3"), rope_thet=1)
    with pytest.raises(TypeError, match="eagle heads have rope_theta"):
        load(write("eagle"), taps=(1,))
    with pytest.raises(ValueError, match="taps: this head reads 3 state"):
        load(write("eagle3"), taps=(1, 2))
    assert load(write("mtp_mimo"), taps=(2,), recycle_normed=False).taps == (2,)
    assert load(write("eagle"), rope_theta=5000).rotary_emb.config.rope_parameters["rope_theta"] == 5000


# FR-Spec


@pytest.mark.parametrize("name", ["eagle", "mtp_mimo", "eagle3_deepspec"])
def test_token_map(write, tmp_path, name):
    """As thunlp publishes them: a list by frequency, with an id twice."""
    listed = [17, 3, 90, 5, 3]
    torch.save(listed, tmp_path / "freq_4.pt")
    written = write(name)
    whole = load(written)
    head = load(written, token_map=tmp_path / "freq_4.pt")
    assert head.draft_to_target.tolist() == [17, 3, 90, 5] and head.draft_to_target.dtype == torch.int64
    assert torch.equal(head.head_weight, whole.head_weight[[17, 3, 90, 5]]) and not head.head_weight.requires_grad
    for given in (listed, torch.tensor(listed)):
        assert torch.equal(load(written, token_map=given).draft_to_target, head.draft_to_target)


def test_token_maps_that_cannot_be_used(write, tmp_path):
    for listed, message in (([3, 96], "got 96"), ([-1], "got -1"), ([], "got no ids")):
        with pytest.raises(ValueError, match=message):
            read_token_map(listed, 96)
    for listed in ([1.5], [True], {1: 2}):
        with pytest.raises(TypeError, match="expected token ids"):
            read_token_map(listed, 96)
    with pytest.raises(ValueError, match="neither a file nor owner/repository/file"):
        read_token_map(tmp_path / "none.pt", 96)
    (tmp_path / "bad.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"bad.pt cannot be read"):
        read_token_map(str(tmp_path / "bad.pt"), 96)
    with pytest.raises(ValueError, match="drafts 40 tokens of its own choice already"):
        load(write("eagle3"), token_map=[1, 2])


# The hub, and heads made elsewhere


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as earlier downloads leave it, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(repository, folder):
        place = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        (place / "snapshots").mkdir()
        folder.rename(place / "snapshots" / ("0" * 40))

    return put


def test_heads_and_maps_on_the_hub(hub, write, tmp_path):
    written = write("eagle3_sglang")
    hub("someone/head", written.folder)
    assert load_head("someone/head", written.target, "eagle3").taps == (2, 3, 5)
    torch.save([1, 2], tmp_path / "freq.pt")
    (tmp_path / "maps").mkdir()
    (tmp_path / "freq.pt").rename(tmp_path / "maps" / "freq.pt")
    hub("someone/maps", tmp_path / "maps")
    assert read_token_map("someone/maps/freq.pt", 96).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"nobody/nothing has none of model.safetensors"):
        load_head("nobody/nothing", written.target)
    written = write("mtp_mimo")
    hub("someone/target", written.folder)
    written.target.config._name_or_path = "someone/target"
    assert load_head(None, written.target, "mtp").flavour == "MTP (MiMo)"


def test_a_head_made_elsewhere(write):
    written = write("eagle3")
    head = load(written)
    assert load_head(head, written.target) is head
    with pytest.raises(TypeError, match="got Linear"):
        load_head(nn.Linear(2, 2), written.target)
    with pytest.raises(TypeError, match="taps: a head that is already loaded"):
        load_head(head, written.target, taps=(1, 2, 3))
    with pytest.raises(ValueError, match=r"in torch.float32, the model on cpu in torch.bfloat16"):
        load_head(head, drafts.llama().to(torch.bfloat16))
    small = drafts.llama()
    small.resize_token_embeddings(60)
    with pytest.raises(ValueError, match="drafts tokens that are not the 60"):
        load_head(head, small)


# The self-check


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox", "olmo2"])
@torch.no_grad()
def test_states_are_those_of_transformers(name):
    model = models.ADMITTED[name]()
    ids = torch.randint(3, drafts.V, (2, 6))
    out = model(input_ids=ids, output_hidden_states=True)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    found, choices = tapped_states(model, (0, 1, FINAL), ids)
    for ours, theirs in zip(found, (out.hidden_states[0], out.hidden_states[1], out.hidden_states[-1])):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(choices, out.logits.argmax(-1))
    last, _ = tapped_states(model, (2,), ids)
    normed = model.get_decoder().norm(last[0]) if name == "llama" else None
    assert normed is None or torch.equal(normed, found[2])
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


class Oracle(Head):
    """Drafts what the target chose, as far as it is told to: its states are the row, and whether they went round."""

    def __init__(self, choices, first=1.0, second=1.0):
        super().__init__(nn.Parameter(torch.zeros(1)), nn.Parameter(torch.eye(drafts.V)), 2, (0,), layers=0)
        self.choices, self.until = choices, torch.tensor([first, second]) * (choices.shape[1] - 1)

    def project(self, features):
        rows = torch.arange(len(features[0])).view(-1, 1, 1).expand(-1, features[0].shape[1], -1)
        return torch.cat([rows, torch.zeros_like(rows)], 2).float()

    def forward(self, input_ids, positions, state):
        row, round_ = state.long().unbind(2)
        right = self.choices[row, positions + 1]
        draft = torch.where(positions < self.until[round_], right, (right + 1) % drafts.V)
        return torch.stack([row, torch.ones_like(row)], 2).float(), F.one_hot(draft, drafts.V).float()


@torch.no_grad()
def test_acceptance_counts_the_targets_next_tokens():
    model = drafts.llama()
    ids = torch.randint(3, drafts.V, (2, 21))
    _, choices = tapped_states(model, (), ids)
    assert acceptance(model, Oracle(choices), ids, 1) == (1,) and acceptance(model, Oracle(choices), ids) == (1, 1)
    assert acceptance(model, Oracle(choices, first=0.5), ids, 1) == (0.5,)
    assert acceptance(model, Oracle(choices, second=0.0), ids) == (1, 0)
    assert max(acceptance(model, Oracle(choices.roll(1, 1)), ids)) < 0.3
    mapped = Oracle(choices)
    mapped.draft_to_target = torch.arange(drafts.V).flip(0)
    mapped.head_weight = nn.Parameter(torch.eye(drafts.V).flip(0))
    assert acceptance(model, mapped, ids) == (1, 1)


@torch.no_grad()
def test_own_texts_are_read_if_the_target_still_writes_them(tmp_path):
    model, options = drafts.llama(), Options(cache=str(tmp_path))
    text, written = self_check.own_text(admit(model), options), mock.Mock(wraps=self_check._write)
    with mock.patch.object(self_check, "_write", written):
        assert torch.equal(self_check.own_text(admit(model), options), text)
        (file,) = tmp_path.rglob("own_text*")
        assert not written.called
        torch.nn.init.normal_(model.get_output_embeddings().weight)
        other = self_check.own_text(admit(model), options)
        assert written.call_count == 1 and not torch.equal(other, text), "of other weights"
        assert torch.equal(self_check.own_text(admit(model), options), other) and written.call_count == 1
        for damaged in (b"", file.read_bytes()[:-9], b"[[1]]"):
            file.write_bytes(damaged)
            assert torch.equal(self_check.own_text(admit(model), options), other)
        assert written.call_count == 4


@torch.no_grad()
def test_the_best_reading_is_kept():
    model = drafts.llama()
    ids = self_check.own_text(admit(model), Options(cache=False))
    _, choices = tapped_states(model, (), ids)
    readings = [Oracle(choices, *shares) for shares in ((0.5, 0.2), (0.5, 0.9), (0.6, 0.1))]
    best = calibrate(model, readings, ids)
    assert best is readings[1]
    assert best.report[0].startswith("self-check: 51% and 8") and best.report[1].startswith("the best of 3 readings")
    readings = [Oracle(choices, *shares) for shares in ((0.5, 0.9), (0.6, 0.1), (0.6, 0.2))]
    best = calibrate(model, readings, ids, 1)
    assert best is readings[1] and best.report[0].endswith(" of first drafts are the target's own tokens")
    assert " and " not in "".join(best.report)
    equal = [Oracle(choices), Oracle(choices)]
    assert calibrate(model, equal, ids) is equal[0]


@torch.no_grad()
def test_calibration_finds_how_a_head_was_trained(write, monkeypatch):
    """Its output matrix is fitted with taps and a RoPE base that are not what its config seems to say."""
    listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "rope_theta": 20.0}
    written = write("eagle3_full", **listed)
    true = load(written, taps=(3, 5, 7), rope_theta=10000.0)
    ids = self_check.own_text(admit(written.target), Options(cache=False))
    features, choices = tapped_states(written.target, true.taps, ids)
    positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    _, normed = true(ids[:, 1:], positions, true.project([feature[:, :-1] for feature in features]))
    wanted = F.one_hot(choices[:, 1:], drafts.V).float()
    fitted = torch.linalg.lstsq(normed.flatten(0, 1), wanted.flatten(0, 1)).solution.t().contiguous()
    written = write("eagle3_full", lambda tensors: tensors.update({"lm_head.weight": fitted}), **listed)

    head = load(written)
    best = calibrate(written.target, head.readings(), ids)
    assert head.taps == (2, 4, 6) and best.taps == (3, 5, 7)
    assert best.rotary_emb.config.rope_parameters["rope_theta"] == 10000.0
    assert "read as: taps 3, 5, 7" in best.report and "read as: rope_theta=10000" in best.report
    reached = [acceptance(written.target, reading, ids)[0] for reading in (best, head)]
    assert reached[0] > 0.8 > 0.7 > reached[1]
