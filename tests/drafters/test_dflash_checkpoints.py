"""Published forms of DFlash: what is read, what is refused by name, and options of a draft."""

import operator
import re
from types import SimpleNamespace

import draft_checkpoints as drafts
import models
import pytest
import torch
from dflash_drafts import MASK, H, loader

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.dflash import DFlash, DFlashOptions
from spec_compile.drafters.modules.dflash import spread_layers


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return loader(tmp_path_factory.mktemp("dflash"))


# --- checkpoints


@pytest.fixture
def write(tmp_path):
    def write(name, change=None, **config):
        """Write a flavour, its tensors changed by `change` and its config by `config`."""
        written = drafts.write(name, tmp_path / name, **config)
        if change:
            change(written.tensors)
            for path in written.folder.glob("*"):
                path.unlink()
            drafts.save(written.folder, written.config, written.tensors, drafts.DFLASH[name].files)
        return written

    return write


def read(written, target=None, **kwargs):
    return load_head(written.folder, target or written.target, "dflash", **kwargs)


@pytest.mark.sweep("dflash dflash_bin dflash_bias dflash_mimo dflash_deepspec dflash_speculators")
@pytest.mark.parametrize("name", drafts.DFLASH)
def test_a_flavour_loads(load, name):
    written, draft, _ = load(name)
    target, kept = written.target, name == "dflash_speculators_kept"
    assert draft.embedding is target.get_input_embeddings().weight
    assert (draft.head_weight is target.get_output_embeddings().weight) != kept
    assert draft.draft_to_target is None or torch.equal(draft.draft_to_target, drafts.draft_to_target())
    assert (draft.draft_to_target is not None) == kept
    shared = {id(p) for p in target.parameters()}
    assert all(not p.requires_grad for p in draft.parameters() if id(p) not in shared)
    assert all(p.requires_grad for p in target.parameters()) and not draft.training
    assert all(not value.is_meta for value in draft.state_dict().values())
    assert target.config._attn_implementation == "sdpa"
    assert draft.flavour in draft.report[0] and str(written.folder) in draft.report[0]
    ignored = [line for line in draft.report if line.startswith("ignored")]
    assert len(ignored) == (2 if name in ("dflash_deepspec", "dflash_confident") else 0)


def required(name):
    return name not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


@pytest.mark.parametrize("name", ["dflash_bias", "dflash_confident", "dflash_speculators_kept"])
def test_every_tensor_is_needed(write, name):
    """Without it, or in another shape, loading stops, and says which."""
    complete = write(name).tensors
    for tensor in filter(required, list(complete)):
        if not (name == "dflash_bias" and ".0." in tensor):  # one layer is enough
            with pytest.raises(ValueError, match=re.escape(tensor)):
                read(write(name, operator.methodcaller("pop", tensor)))
            with pytest.raises(ValueError, match=re.escape(tensor)):
                read(write(name, operator.methodcaller("update", {tensor: complete[tensor][:-1]})))


def test_a_tensor_too_many(write):
    for stray in ("layers.0.self_attn.sinks", "markov_head.w1.weight", "mask_hidden"):
        with pytest.raises(ValueError, match=f"tensors that this format does not know: {stray}"):
            read(write("dflash", lambda tensors, stray=stray: tensors.update({stray: torch.zeros(4)})))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"projector_type": "dspine"}, "projector_type 'dspine'"),
        ({"attention_sink_bias": True}, "attention_sink_bias True"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias True"),
        ({"attention_value_scale": 0.707}, "attention_value_scale 0.707"),
        ({"attention_mode": "mla"}, "attention_mode 'mla'"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state False"),
    ],
)
def test_variants_are_refused_by_name(write, flags, message):
    inner = dict(dflash_config={"target_layer_ids": [1, 3, 6], "mask_token_id": MASK, **flags})
    for name, section, changes in (
        ("dflash", "dflash_config.", inner), ("dflash", "", flags), ("dflash_speculators", "", flags),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"its config has {section}{message}, which is not built here"):
            read(write(name, **changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fc_layernorm", True), ("gating", "per-head"), ("aux_hidden_stream", "attn_res"),
        ("pure_draft_prefix_len", 2), ("dflash_context_residual", True), ("residual_multiplier", 0.2),
    ],
)  # fmt: skip
def test_unknown_keys_are_refused_by_name(write, key, value):
    inner = {"target_layer_ids": [1, 3, 6], "mask_token_id": MASK, key: value}
    layers = {**write("dflash_speculators").config["transformer_layer_config"], key: value}
    for name, path, changes in (
        ("dflash", f"dflash_config.{key}", {"dflash_config": inner}),
        ("dflash_sliding", key, {key: value}),
        ("dflash_deepspec", key, {key: value}),
        ("dflash_speculators", f"transformer_layer_config.{key}", {"transformer_layer_config": layers}),
    ):
        written = write(name, **changes)
        with pytest.raises(ValueError, match=re.escape(f"its config has {path} {value!r}, which is not known here")):
            read(written)


def test_keys_without_effect(write):
    """What is off, of a training, or the size of a part that is off."""
    inner = {
        "target_layer_ids": [1, 3, 6], "mask_token_id": MASK, "causal_head": False, "emb_dim": 256,
        "conv_kernel_size": 0, "conv_group_size": 16, "target_hidden_size": 64, "output_multiplier": 1.0,
        "num_target_layers": drafts.LAYERS,
    }  # fmt: skip
    more = {"dflash2_selector_top_k": 16, "dflash2_dynamic_conv": False, "dflash2_selector_loss_weight": 1.0}
    draft = read(write("dflash", dflash_config=inner, eagle_aux_hidden_state_layer_ids=[2, 4, 7], **more))
    assert draft.report[1:] == read(write("dflash")).report[1:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal_head": True, "is_causal": False}, "causal_head true and is_causal false, which exclude each other"),
        ({"target_hidden_size": 128}, "made for a model with hidden_size 128, LlamaForCausalLM has 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, r"_layer_ids \[1, 3, 6\], inputs .* states 2, 4, 7 other"),
        ({"rope_theta": 0}, "config is not valid: rope_theta must be a positive, finite number, not 0"),
        ({"block_size": None}, "must have a block_size of 2 or more, it has None"),
        ({"block_size": 1}, "must have a block_size of 2 or more, it has 1"),
        ({"mask": None}, "must have a mask_token_id of 0 or more, it has None"),
        ({"mask": 96}, "mask token 96 is outside the 96 rows of the model's embedding; take the draft of this model"),
        ({"ids": [1, 3]}, "its fc reads 3 states of the target, its config names 2"),
        ({"ids": [1, 3, 8]}, "reads states 2, 4, 9 .* 8 layers; take the draft of this model"),
        ({"ids": [-2, 3, 6]}, "reads states -1, 4, 7"),
        ({"ids": None}, "its fc reads 3 states of the target, its config names 2"),  # two layers: the rule gives two
        ({"ids": [1, 3, "6"]}, "must have a list of layers as target_layer_ids"),
        ({"num_target_layers": 36}, "made for a model of 36 layers, LlamaForCausalLM has 8"),
        ({"hidden_size": 32}, "hidden_size 32, LlamaForCausalLM has 64"),
        ({"vocab_size": 128}, "vocab_size 128, LlamaForCausalLM has 96"),
        ({"num_hidden_layers": 1}, r"tensors that this format does not know: layers.1.*|its config must name"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "sliding_attention or full_attention for each"),
        ({"layer_types": ["sliding_attention"] * 2}, "neither sliding_window nor swa_window_size"),
        ({"layer_types": None, "use_sliding_window": True}, "use_sliding_window, and no layer_types"),
        ({"is_neox_style": False}, "interleaved RoPE"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type 'dynamic'"),
        ({"draft_vocab_size": 40}, "has no lm_head.weight for its 40 tokens"),
        ({"attention_bias": True}, "has no layers.0.self_attn.q_proj.bias"),
    ],
)
def test_configs_that_do_not_fit(write, changes, message):
    inner = {"target_layer_ids": changes.pop("ids", [1, 3, 6]), "mask_token_id": changes.pop("mask", MASK)}
    written = drafts.write("dflash", write("dflash").folder)
    written.config.update(changes, dflash_config=inner)
    drafts.save(written.folder, written.config, written.tensors)
    with pytest.raises(ValueError, match=message):
        read(written)


@pytest.mark.parametrize(
    ("target_layers", "layers", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (48, 8, [1, 7, 14, 20, 26, 32, 39, 45]),
        (7, 3, [1, 2, 4]),
        (9, 3, [1, 4, 6]),
        (36, 1, [18]),
    ],
)
def test_layers_that_are_not_named(target_layers, layers, ids):
    """As the reference rounds: halves to the even number."""
    assert spread_layers(target_layers, layers) == ids


def test_a_draft_for_another_target(write):
    with pytest.raises(ValueError, match="made for a model of 8 layers, LlamaForCausalLM has 2"):
        read(write("dflash"), models.ADMITTED["llama"]())
    with pytest.raises(ValueError, match=r"fc.weight reads 190 numbers, which is no multiple"):
        read(write("dflash", lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-2]})))


def test_what_is_no_dflash_draft(write, tmp_path):
    for name in ("eagle", "eagle3", "eagle3_deepspec"):
        written = drafts.write(name, tmp_path / name)
        with pytest.raises(ValueError, match=r"holds no DFlash draft: .* or 'eagle3', whole models with"):
            read(written)
    for name in ("dflash", "dflash_deepspec", "dflash_speculators"):
        with pytest.raises(ValueError, match="use algo='dflash'"):
            load_head(write(name).folder, drafts.llama())
    with pytest.raises(TypeError, match="got NoneType"):
        load_head(None, drafts.llama(), "dflash")
    with pytest.raises(TypeError, match="got int"):
        load_head(3, drafts.llama(), "dflash")


def test_output_matrices(write):
    """A copy is shared, another one is the draft's own."""
    flipped = lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].flip(0)})  # noqa: E731
    written = write("dflash_deepspec", flipped)
    draft = read(written)
    assert torch.equal(draft.head_weight, written.tensors["lm_head.weight"]) and draft.draft_to_target is None
    assert "its own, 96 of 96 tokens" in draft.report[4]
    with pytest.raises(ValueError, match="has no d2t"):
        read(write("dflash_speculators_kept", lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")]))


def test_further_tensors_that_change_nothing(write):
    more = {"confidence_head.proj.weight": torch.zeros(1, H), "verifier_norm.weight": torch.ones(H)}
    draft = read(write("dflash_speculators", lambda tensors: tensors.update(more)))
    assert [line.split(",")[0] for line in draft.report[-2:]] == [f"ignored: {name}" for name in sorted(more)]


def test_mask_embeddings_in_a_file_of_their_own(write):
    values = torch.randn(1, H)
    for content in (values, {"embedding": values, "mask_token_id": MASK}, {"embedding": values[0]}):
        written = write("dflash")
        torch.save(content, written.folder / "mask_embedding.pt")
        draft = read(written)
        assert torch.equal(draft.mask_embedding, values[0]) and not draft.mask_embedding.requires_grad
    for content, message in (
        ({"embedding": values, "mask_token_id": 3}, "is for token 3, its config says mask_token_id 93"),
        (values[:, :-1], r"must be 64 finite numbers, it is \[1, 63\]"),
        (values * float("nan"), "must be 64 finite numbers"),
        ({"mask": values}, "it is NoneType"),
    ):
        torch.save(content, written.folder / "mask_embedding.pt")
        with pytest.raises(ValueError, match=message):
            read(written)


def test_drafts_made_elsewhere(load):
    written, draft, _ = load("dflash")
    assert load_head(draft, written.target, "dflash") is draft
    with pytest.raises(TypeError, match="rope_theta: a draft that is already loaded"):
        load_head(draft, written.target, "dflash", rope_theta=1e4)
    with pytest.raises(TypeError, match="got Embedding"):
        load_head(written.target.get_input_embeddings(), written.target, "dflash")
    with pytest.raises(ValueError, match=r"in torch.float32, the model on cpu in torch.bfloat16"):
        load_head(draft, drafts.llama().to(torch.bfloat16), "dflash")
    with pytest.raises(ValueError, match="vocab_size 96, LlamaForCausalLM has 80"):
        small = drafts.llama()
        small.resize_token_embeddings(80)
        load_head(draft, small, "dflash")


def test_another_rope_theta(write):
    draft = read(write("dflash_speculators"), rope_theta=500)
    assert draft.rotary_emb.config.rope_parameters["rope_theta"] == 500 and "rope_theta=500" in draft.report[3]


# --- options


def test_options_are_checked(load):
    for options, error, message in (
        (dict(block_size=0), ValueError, "block_size must be from 1 to 64"),
        (dict(block_size="6"), TypeError, "block_size: expected int"),
        (dict(topk=17), ValueError, "topk must be from 1 to 16"),
        (dict(num_draft_tokens=1), ValueError, "num_draft_tokens must be from 2 to 64"),
        (dict(score_temperature=0.0), ValueError, "score_temperature must be positive"),
        (dict(draft_sample_method="random"), ValueError, "draft_sample_method: expected 'greedy' or 'probabilistic'"),
        (dict(draft_sample_method="probabilistic", topk=2), ValueError, "topk: drafts that are drawn"),
    ):
        with pytest.raises(error, match=message):
            DFlashOptions(**options)
    _, draft, _ = load("dflash")
    for options, message in (
        (dict(block_size=7), "block_size: this draft was trained with blocks of 6, not 7; lower it"),
        (dict(block_size=1), "the first slot of this draft's blocks drafts nothing; it must be at least 2"),
        (dict(num_draft_tokens=7), "num_draft_tokens must be at most 6, the drafts of a block of 6 and"),
        (dict(topk=2, block_size=3, num_draft_tokens=8), "num_draft_tokens must be at most 7"),
    ):
        with pytest.raises(ValueError, match=message):
            DFlash(draft, DFlashOptions(**options))
    assert DFlashOptions().fit(draft) == (6, 6) and DFlashOptions(block_size=4).fit(draft) == (4, 4)
    assert DFlashOptions(topk=4, num_draft_tokens=30).fit(draft) == (6, 30)
    assert DFlashOptions(block_size=1).fit(load("dflash_deepspec")[1]) == (1, 2)
    assert DFlashOptions().fit(SimpleNamespace(block_size=128, first=0)) == (64, 64)


def test_what_was_loaded_is_told(load):
    written, *_ = load("dflash_sliding")
    fast = speculate(written.target, "DFlash", draft=written.folder, compile=False, max_cache_len=100)
    told = "\n".join(fast.speculation.engine.runtime.algorithm.explain())
    for part in (
        "DFlash draft from", "reads states 2, 4, 7 (target_layer_ids [1, 3, 6], outputs of layers: one more)",
        "blocks of 6, masked by token 93; slot j drafts the token of its own place", "rope_theta=20000",
        "sliding windows 7, None, 1 of them causal", "embedding: the target's; output matrix: the target's",
    ):  # fmt: skip
        assert part in told
    runtime = fast.speculation.engine.runtime
    assert runtime.algorithm.plan.nodes == 6 and runtime.sizes == (6,)
    assert "1 layers see the block causally, 1 all of it" in runtime.algorithm.graph.log[-1].summary
