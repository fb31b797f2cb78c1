"""Inkling: biases that each query mixes, in rounds against transformers' own generate(), for tiny random models."""

import functools

import models
import pytest
import torch
import transformers

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture.trace import capture
from spec_compile.contrib import inkling

WINDOW, EXTENT, FAR = 12, 20, 60
"""Tokens of a window, distances that have a bias in layers without a window, and tokens of an answer."""
SIZES = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    swa_num_attention_heads=6, swa_num_key_value_heads=3, swa_head_dim=8, sliding_window_size=WINDOW, d_rel=4,
    rel_extent=EXTENT, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, local_layer_ids=[1], mlp_layer_types=["dense", "sparse", "sparse"], pad_token_id=0,
    logits_mup_width_multiplier=2.0,
)  # fmt: skip


def build(**changes):
    """A model and its speculative version."""
    config = transformers.InklingTextConfig(**SIZES | changes)
    model = transformers.InklingForCausalLM(config).eval()
    models._randomise(model, torch.Generator().manual_seed(0), std=0.3, embed=0.25)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model, spec_compile.speculate(model, compile=False, cache=False)


pair = functools.cache(build)


def prompts(batch, padded=0):
    ids = torch.randint(3, 96, (batch, 20), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    ids[-1, :padded], mask[-1, :padded] = 0, 0
    return dict(input_ids=ids, attention_mask=mask, max_new_tokens=FAR, do_sample=False)


def answers(options, **changes):
    """The answers of both, and the mean number of tokens of a round. Drafts come from the right answer."""
    model, fast = pair(**changes)
    expected = model.generate(**options)
    fast.speculation.stats.reset()
    return expected, fast.generate(**options, reference=expected.tolist()), fast.speculation.stats.accept_length


@pytest.mark.parametrize("changes", [{}, dict(log_scaling_n_floor=16)], ids=["plain", "scaled by the position"])
@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_equal(batch, changes):
    expected, answer, length = answers(prompts(batch), **changes)
    assert torch.equal(expected, answer) and length > 2


def test_padding():
    expected, answer, length = answers(prompts(2, padded=5))
    assert torch.equal(expected, answer) and length > 2


def test_padding_where_transformers_counts_it_as_positions():
    model, fast = pair(log_scaling_n_floor=16)
    with pytest.warns(UserWarning, match="padding on the left.* without speculation"):
        answer = fast.generate(**prompts(2, padded=5))
    assert torch.equal(model.generate(**prompts(2, padded=5)), answer)


def test_many_requests():
    model, fast = pair()
    texts = [[3, 4, 5, 6, 7] * 6, [9, 8, 7]]
    outputs = fast.generate_batch(texts, max_new_tokens=FAR).values()
    for text, output in zip(texts, outputs, strict=True):
        expected = model.generate(torch.tensor([text]), max_new_tokens=FAR, do_sample=False)
        assert output.generated_tokens == expected[0, len(text) :].tolist()


@pytest.mark.slow
def test_a_capture_by_kinds_is_the_same():
    """Most of the layers repeat one that was traced."""
    changes = dict(num_hidden_layers=16, local_layer_ids=[*range(1, 16)], mlp_layer_types=["dense"] * 16)
    model, fast = build(**changes)
    graph = capture(model)
    assert 0 < graph.traced_layers < 16 and [layer.slopes for layer in graph.layers] == [True] * 16
    assert torch.equal(model.generate(**prompts(1)), fast.generate(**prompts(1)))


def test_the_next_version_is_refused():
    config = transformers.Inkling2TextConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, n_routed_experts=4)
    with torch.device("meta"):
        model = transformers.Inkling2ForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="Inkling2ForCausalLM has layers of type hybrid"):
        spec_compile.speculate(model, compile=False)
    assert "inkling2_text" not in inkling.OF_FAMILY
