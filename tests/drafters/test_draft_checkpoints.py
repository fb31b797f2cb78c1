"""Loading of drafts: every published format, and what is read from each. test_refused_checkpoints.py has the rest."""

import itertools
import json
from unittest import mock

import changed_drafts as changed
import draft_checkpoints as drafts
import huggingface_hub
import pytest
import torch
from draft_checkpoints import H
from draft_rounds import generated, prompts
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.drafters.checkpoints import files
from spec_compile.drafters.checkpoints.load import load_head, read_token_map
from spec_compile.drafters.modules.dflash import spread_layers
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
    """A function: write a flavour, changed as `changed.write` says."""
    return lambda name, *tensors, **changes: changed.write(tmp_path, name, *tensors, **changes)


@pytest.fixture
def read(tmp_path):
    """A function: load a flavour that is written so."""
    return lambda name, *tensors, **changes: changed.read(tmp_path, name, *tensors, **changes)


# Every flavour


def assert_loaded(written, draft):
    """What is true of each draft: weights that are not trained, the target as it was, and a report."""
    shared = {id(p) for p in written.target.parameters()}
    assert all(not p.requires_grad for p in draft.parameters() if id(p) not in shared) and not draft.training
    assert all(not value.is_meta for value in draft.state_dict().values())
    assert all(p.requires_grad for p in written.target.parameters())
    assert written.target.config._attn_implementation == "sdpa"
    assert draft.flavour in draft.report[0] and str(written.folder) in draft.report[0]
    assert draft.draft_to_target is None or torch.equal(draft.draft_to_target, drafts.draft_to_target())


def ignored(draft):
    return [line for line in draft.report if line.startswith("ignored")]


@pytest.mark.parametrize("name", drafts.FLAVOURS)
def test_a_head_loads(write, name):
    written = write(name)
    target, algorithm = written.target, drafts.FLAVOURS[name].algorithm
    before = {n: p.data_ptr() for n, p in target.named_parameters()}
    head = load_head(written.folder, target, algorithm)
    assert_loaded(written, head)
    assert {n: p.data_ptr() for n, p in target.named_parameters()} == before

    assert head.taps == TAPS.get(name, (2, 4, 5) if algorithm == "eagle3" else (FINAL,))
    assert head.layers == (2 if "layers" in name or name in ("eagle3_speculators_09", "eagle_mistral") else 1)
    assert head.hidden_size == (48 if name == "eagle3_wide" else H)
    kept = algorithm == "eagle3" and name not in WHOLE
    assert (head.draft_to_target is not None) == kept
    assert not kept or head.head_weight.shape == (drafts.VD, H)
    own_embedding = name in ("eagle3_wide", "eagle3_speculators_31")
    assert (head.embedding is target.get_input_embeddings().weight) != own_embedding
    own_output = algorithm == "eagle3" and name != "eagle3_borrowed"
    assert (head.head_weight is target.get_output_embeddings().weight) != own_output
    copies = [n for n in written.tensors if "embed_tokens" in n or "shared_head.head" in n]
    inside = [n for n in copies if algorithm != "mtp" or "layers" in n]
    assert len(ignored(head)) == (0 if own_embedding else len(inside)) + (name == "eagle_vllm")


@pytest.mark.sweep("dflash dflash_bin dflash_bias dflash_mimo dflash_deepspec dflash_speculators")
@pytest.mark.parametrize("name", drafts.DFLASH)
def test_a_dflash_draft_loads(write, name):
    written, kept = write(name), name == "dflash_speculators_kept"
    draft, target = load_head(written.folder, written.target, "dflash"), written.target
    assert_loaded(written, draft)
    assert draft.embedding is target.get_input_embeddings().weight
    assert (draft.head_weight is target.get_output_embeddings().weight) != kept
    assert (draft.draft_to_target is not None) == kept
    assert len(ignored(draft)) == 2 * (name in ("dflash_deepspec", "dflash_confident"))


ROUNDS = (
    "eagle_qwen2", "eagle_speculators", "eagle_mistral", "eagle3_sglang_layers", "eagle3_plain_state", "eagle3_wide",
    "eagle3_deepspec", "eagle3_speculators_09", "eagle31_mla", "eagle3_mla_specforge", "eagle3_mla_layers",
    "mtp_deepseek_nextn", "mtp_glm", "mtp_mimo", "mtp_speculators", "mtp_qwen35",
)  # fmt: skip


@pytest.mark.sweep("eagle_qwen2 eagle3_sglang_layers mtp_glm")
@pytest.mark.parametrize("name", ROUNDS)
@torch.no_grad()
def test_answers_with_a_head_from_files_are_those_without(write, name):
    written, algorithm = write(name), drafts.FLAVOURS[name].algorithm
    options = dict(num_steps=3, topk=3, num_draft_tokens=8, adaptive=False, compile=False, check=False)
    fast = speculate(written.target, algorithm, draft=written.folder, max_cache_len=100, **options)
    assert torch.equal(generated(fast, prompts(3)), generated(written.target, prompts(3)))


def test_naive_eagle_takes_any_head(write):
    for name, told in (("eagle", "EAGLE"), ("eagle3", "EAGLE-3"), ("mtp_mimo", "MTP (MiMo)")):
        written = write(name)
        assert load_head(written.folder, written.target).flavour == told


def test_the_targets_own_block(tmp_path):
    """As users have it: a folder that transformers loads, leaving the block out."""
    written = drafts.write("mtp_deepseek", tmp_path / "whole")
    folder, name = tmp_path / "target", "model.safetensors"
    written.target.save_pretrained(folder)
    extra = {n: v for n, v in written.tensors.items() if n.startswith("model.layers.3.")}
    drafts.save(tmp_path / "extra", None, extra)
    (folder / name).rename(folder / "main.safetensors")
    (tmp_path / "extra" / name).rename(folder / "extra.safetensors")
    index = dict.fromkeys(extra, "extra.safetensors") | dict.fromkeys(written.target.state_dict(), "main.safetensors")
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    head = load_head(None, model, "mtp")
    assert torch.equal(head.fc.weight, written.tensors["model.layers.3.eh_proj.weight"])
    assert head.embedding is model.get_input_embeddings().weight
    assert model.config._attn_implementation != head.block.self_attn.config._attn_implementation
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("name", "number"), [("mtp_mimo", "mtp_layers.{}."), ("mtp_qwen", "mtp.layers.{}.")]
)  # fmt: skip
def test_further_modules_are_read(write, read, name, number):
    """Qwen's share all tensors but the layer's."""
    own = {n: v for n, v in write(name).tensors.items() if number.format(0) in n}
    head = read(name, {n.replace(number.format(0), number.format(1)): v + 1 for n, v in own.items()})
    weights = [module.block.self_attn.q_proj.weight for module in (head, *head.further)]
    assert torch.equal(weights[1], weights[0] + 1)
    assert torch.equal(head.further[0].fc.weight, head.fc.weight + (name == "mtp_mimo"))
    assert "2 modules, each of which drafts one token" in head.report[0]


def test_experts_stored_together(write, read):
    """As Qwen3.5 stores them."""
    stem, tensors = "mtp.layers.0.mlp.experts", write("mtp_qwen").tensors
    names = {part: [f"{stem}.{e}.{part}_proj.weight" for e in range(4)] for part in ("gate", "up", "down")}
    pairs = zip(*([tensors[name] for name in names[part]] for part in ("gate", "up")))
    joined = {
        f"{stem}.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]),
        f"{stem}.down_proj": torch.stack([tensors[name] for name in names["down"]]),
    }
    together = read("mtp_qwen", dict.fromkeys(itertools.chain(*names.values())) | joined)
    for one, other in zip(read("mtp_qwen").state_dict().values(), together.state_dict().values(), strict=True):
        assert torch.equal(one, other)


# Taps and meanings


@pytest.mark.parametrize(
    ("where", "ids", "taps", "others"),
    [
        ("eagle_config", [1, 3, 4], (2, 4, 5), [(1, 3, 4)]),
        ("eagle_config", [2, 4, 5], (2, 4, 5), [(3, 5, 6)]),
        ("eagle_config", [2, 4, 8], (2, 4, 8), []),  # 9 would be beyond the last layer
        ("target_layer_ids", [2, 4, 5], (3, 5, 6), []),
    ],
)
def test_conventions_of_taps(read, where, ids, taps, others):
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if where == "eagle_config" else {where: ids}
    assert [reading.taps for reading in read("eagle3", **changes).readings()] == [taps, *others]


@pytest.mark.parametrize(
    ("target_layers", "layers", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]), (48, 8, [1, 7, 14, 20, 26, 32, 39, 45]), (7, 3, [1, 2, 4]), (9, 3, [1, 4, 6]),
        (36, 1, [18]),
    ],
)  # fmt: skip
def test_layers_that_are_not_named(target_layers, layers, ids):
    """As the reference rounds: halves to the even number."""
    assert spread_layers(target_layers, layers) == ids


def base(draft):
    return draft.rotary_emb.config.rope_parameters["rope_theta"]


def test_several_meanings(read):
    head = read("eagle31")
    found = {(r.taps, r.recycle_normed, base(r)) for r in head.readings()}
    assert len(found) == len(head.readings()) == 8 and (head.taps, True, 1e6) in found
    assert all(reading.fc is head.fc for reading in head.readings())
    said = read("eagle31", overrides=dict(taps=(0, 1, FINAL), recycle_normed=False, rope_theta=20000))
    assert (said.taps, said.recycle_normed, base(said), len(said.readings())) == ((0, 1, FINAL), False, 20000, 1)
    assert len(read("eagle3_speculators_31").readings()) == 1
    assert [r.taps for r in read("mtp_glm").readings()] == [(FINAL,), (2,)]
    assert read("mtp_mimo", overrides=dict(taps=(2,), recycle_normed=False)).taps == (2,)
    assert base(read("eagle", overrides=dict(rope_theta=5000))) == 5000
    draft = read("dflash_speculators", overrides=dict(rope_theta=500))
    assert base(draft) == 500 and "rope_theta=500" in draft.report[3]


def test_trainers_of_latent_attention_may_have_left_out_the_base_of_rope(read):
    head = read("eagle3_mla")
    ropes = [r.rotary_emb.config.rope_parameters for r in head.readings()]
    assert {(rope["rope_type"], rope["factor"], rope["rope_theta"]) for rope in ropes} == {
        ("yarn", 64.0, 50000.0), ("yarn", 64.0, 10000.0),
    }  # fmt: skip
    assert "rope_theta=50000 (yarn), latent attention of rank 20" in "\n".join(head.report)


def test_keys_of_latent_attention(read):
    """In the config of a head with grouped queries they are left over from the target."""
    assert not read("eagle3_mla_specforge", rope_interleave=False).blocks[0].self_attn.sizes.pairs
    assert "qkv_bias=False" in "".join(read("eagle3", **drafts.LATENT).report)


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
def test_what_goes_round(read, flags, recycle, readings):
    head = read("eagle3", **flags)
    assert (head.recycle_normed, len(head.readings())) == (recycle, readings)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},  # SpecForge: qwen2-5-vl-eagle3.json
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},  # transformers 5
    ],
)
def test_rope_of_several_axes_is_that_of_a_text(read, said):
    """All axes have the same position there."""
    head = read("eagle3_sglang", **said)
    assert torch.equal(head.rotary_emb.inv_freq, read("eagle3_sglang").rotary_emb.inv_freq)
    assert any("multimodal RoPE" in line for line in head.report) == ("mrope" in str(said))


def test_rope_on_a_part_of_each_head(read):
    """Its other meaning, the reference trainer's base, turns the same part."""
    for said in ({"partial_rotary_factor": 0.5}, {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}):
        readings = read("eagle3", rope_theta=1e6, **said).readings()
        assert [len(reading.rotary_emb.inv_freq) for reading in readings] == [drafts.D // 4] * 2


# Keys without effect

EXPORTED = {
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
    },
    "target_model_type": "gemma3_text", "num_local_experts": 16, "experts_per_token": 4, "do_sample": False,
    "attention_dropout": 0.1, "max_window_layers": 48, "initializer_range": 0.02, "pretraining_tp": 1,
    "embedding_multiplier": 1.0, "loss_decay_gamma": 4.0, "attn_logit_softcapping": None,
}  # fmt: skip
"""What the exporters of published heads write besides, all of it without effect."""
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
BLOCKS = {
    "dflash_config": {
        "causal_head": False, "emb_dim": 256, "conv_kernel_size": 0, "conv_group_size": 16, "target_hidden_size": H,
        "output_multiplier": 1.0, "num_target_layers": drafts.LAYERS,
    },
    "eagle_aux_hidden_state_layer_ids": [2, 4, 7], "dflash2_selector_top_k": 16, "dflash2_dynamic_conv": False,
    "dflash2_selector_loss_weight": 1.0,
}  # fmt: skip
"""What is off, of a training, or the size of a part that is off."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("eagle3_sglang", EXPORTED), ("eagle3_mla", EXPORTED | MODEL_OPTIMIZER),
        ("eagle3_gpt_oss", EXPORTED | MODEL_OPTIMIZER), ("dflash", BLOCKS),
    ],
)  # fmt: skip
def test_keys_without_effect(read, name, more):
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}} if "eagle_config" in more else {}
    plain, exported = read(name, **taps), read(name, **more)
    assert plain.taps == exported.taps and plain.report[1:4] == exported.report[1:4]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), exported.parameters(), strict=True))


# Embeddings and output matrices


def test_a_tied_output_matrix_stays_its_own(read):
    """Targets with tied embeddings hand that flag on to drafts of fewer words."""
    assert read("eagle3", tie_word_embeddings=True).head_weight.shape == (drafts.VD, H)


def test_kept_tokens_may_be_a_mask_alone(read):
    assert torch.equal(read("eagle3", {"d2t": None}).draft_to_target, drafts.draft_to_target())


def test_trained_and_random_embeddings(write, read):
    name, own = "eagle3_speculators_31", "embed_tokens.weight"
    assert torch.equal(read(name).embedding, write(name).tensors[own])
    written = write(name, {own: lambda x: x.flip(0)})
    head = load_head(written.folder, written.target)
    assert head.embedding is written.target.get_input_embeddings().weight
    assert f"ignored: {own}, the target's is used, though it is another" in head.report


def test_a_copy_of_the_output_matrix_is_shared_and_another_one_is_the_drafts(write):
    written = write("dflash_deepspec", {"lm_head.weight": lambda x: x.flip(0)})
    draft = load_head(written.folder, written.target, "dflash")
    assert torch.equal(draft.head_weight, written.tensors["lm_head.weight"]) and draft.draft_to_target is None
    assert "its own, 96 of 96 tokens" in draft.report[4]


def test_further_tensors_that_change_nothing(read):
    more = {"confidence_head.proj.weight": torch.zeros(1, H), "verifier_norm.weight": torch.ones(H)}
    report = read("dflash_speculators", more).report
    assert [line.split(",")[0] for line in report[-2:]] == [f"ignored: {name}" for name in sorted(more)]


# FR-Spec


@pytest.mark.parametrize("name", ["eagle", "mtp_mimo", "eagle3_deepspec"])
def test_token_map(write, tmp_path, name):
    """As thunlp publishes them: a list by frequency, with an id twice."""
    listed, written = [17, 3, 90, 5, 3], write(name)
    whole = load_head(written.folder, written.target)
    torch.save(listed, tmp_path / "freq_4.pt")
    for given in (tmp_path / "freq_4.pt", listed, torch.tensor(listed)):
        head = load_head(written.folder, written.target, token_map=given)
        assert head.draft_to_target.tolist() == [17, 3, 90, 5] and head.draft_to_target.dtype == torch.int64
        assert torch.equal(head.head_weight, whole.head_weight[[17, 3, 90, 5]]) and not head.head_weight.requires_grad


def test_token_maps_that_cannot_be_used(tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"PK")
    for listed, error, message in (
        ([3, 96], ValueError, "got 96"),
        ([-1], ValueError, "got -1"),
        ([], ValueError, "got no ids"),
        ([1.5], TypeError, "expected token ids"),
        ([True], TypeError, "expected token ids"),
        ({1: 2}, TypeError, "expected token ids"),
        (tmp_path / "none.pt", ValueError, "neither a file nor owner/repository/file"),
        (str(tmp_path / "bad.pt"), ValueError, r"bad.pt cannot be read"),
    ):
        with pytest.raises(error, match=message):
            read_token_map(listed, 96)


# The hub


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


def test_heads_and_maps_on_the_hub(hub, tmp_path):
    written = drafts.write("eagle3_sglang", tmp_path / "head")
    hub("someone/head", written.folder)
    assert load_head("someone/head", written.target, "eagle3").taps == (2, 3, 5)
    (tmp_path / "maps").mkdir()
    torch.save([1, 2], tmp_path / "maps" / "freq.pt")
    hub("someone/maps", tmp_path / "maps")
    assert read_token_map("someone/maps/freq.pt", 96).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"nobody/nothing has none of model.safetensors"):
        load_head("nobody/nothing", written.target)
    written = drafts.write("mtp_mimo", tmp_path / "block")
    hub("someone/target", written.folder)
    written.target.config._name_or_path = "someone/target"
    assert load_head(None, written.target, "mtp").flavour == "MTP (MiMo)"


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no connection"), TimeoutError("no connection")])
def test_a_download_that_fails_names_the_file(monkeypatch, error):
    monkeypatch.setattr(files, "hf_hub_download", mock.Mock(side_effect=error))
    monkeypatch.setattr(files.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"draft: [\w.]+ of some/head could not be downloaded: no connection"):
        load_head("some/head", drafts.llama())
    if isinstance(error, LocalEntryNotFoundError):
        assert files.fetcher("some/head", local=True)("config.json") is None
