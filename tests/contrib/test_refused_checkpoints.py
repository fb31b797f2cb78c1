"""Checkpoints of young formats that are refused: every tensor is needed, and what is wrong with one is named."""

import changed_drafts as changed
import draft_checkpoints as drafts
import pytest
import torch


def inner(**flags):
    return {"dflash_config": flags}


@pytest.mark.parametrize("name", drafts.LINKED)
def test_every_tensor_is_needed(tmp_path, name):
    changed.assert_each_is_needed(tmp_path, name, "conv|selector|markov|gru|embed_proj|confidence")


CONFIDENT = dict(enable_confidence_head=True, confidence_head_with_markov=True)
CASES = [
    ("dflash2", inner(selector_top_k=32), "selector_top_k 32, at most 16 are built here"),
    ("dflash2", inner(selector_rank=None), "must have a selector_rank of 1 or more, it has None"),
    ("dflash2", inner(conv_group_size=24), "conv_group_size 24, which does not divide its hidden_size"),
    ("dflash2", inner(conv_kernel_size=0), "tensors that this format does not know: layers.0.attention_conv"),
    ("dflash2", inner(markov_rank=8), "markov_rank and selector_rank, of which a draft can have one"),
    ("dflash2", inner(**CONFIDENT), "confidence_head_with_markov, and no markov_rank"),
    ("dflash_confident", CONFIDENT, "confidence_head_with_markov, and no markov_rank"),
    ("dspark", dict(confidence_head_with_markov=False), r"proj.weight is \[1, 72\], expected \[1, 64\]"),
    ("dspark", dict(markov_head_type="lstm"), "markov_head_type 'lstm'; expected one of vanilla, gated, rnn"),
    ("dspark", dict(markov_head_type="gated"), r"has no markov_head.gate_proj"),
    ("dspark", dict(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel has layers of Gemma 4"),
    ("dspark_projector", inner(markov_rank=None), "must have a markov_rank of 1 or more, it has None"),
    ("domino", inner(gru_hidden_dim=None), "must have a gru_hidden_dim of 1 or more, it has None"),
    ("domino", inner(projector_type="dflash"), "tensors that this format does not know: embed_proj"),
    ("domino", inner(dspine_config={"top_k": 16}), "dspine_config .* which is not known here"),
    ("p_eagle", dict(tensors={"layers.1.input_layernorm.weight": None}), "has no layers.1.input_layernorm.weight"),
    ("p_eagle", dict(tensors={"fc.weight": None}), "fc.weight"),
    ("p_eagle", dict(tensors={"norm.weight": None}), "has no norm.weight"),
    ("p_eagle", dict(tensors={"mask_hidden": torch.zeros(1, 1, 64)}), r"is \[1, 1, 64\], expected \[1, 1, 192\]"),
    ("p_eagle", dict(tensors={"mask_hidden": None}, speculators_model_type="peagle"), "has no mask_hidden"),
    ("p_eagle", dict(ptd_token_id=None), r"mask_token_id or pard_token or ptd_token_id below 96, .* it has None"),
    ("p_eagle", dict(ptd_token_id=96), "it has 96"),
    ("p_eagle", dict(gating="per-head"), "its config has gating 'per-head', which is not known here"),
    ("p_eagle", dict(algorithm="eagle3"), "holds a head for algo='p_eagle', not for algo='eagle3'"),
    ("eagle_mistral", dict(llama_4_scaling={"beta": 0.1}), "its config has llama_4_scaling .*not known here"),
    ("eagle_mistral", dict(moe={"num_experts": 4}), "its config has moe .*not known here"),
    ("eagle_mistral", dict(yarn={"gamma": 1}), "params.json has yarn.gamma"),
    (
        "eagle_mistral",
        dict(tensors={"eagle_linear.qscale_weight": torch.ones(1)}),
        "quantised weights are read only as",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), CASES)
def test_what_is_wrong_is_named(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        changed.read(tmp_path, name, **changes)
