"""Every block against its formulas: slow float64 arithmetic on the published tensors, written place by place."""

import functools
import math
import re

import draft_checkpoints as drafts
import hypothesis
import mtp_formulas
import numpy as np
import pytest
import torch
from draft_formulas import (
    D,
    H,
    attention,
    eagle,
    eagle3,
    finish,
    frequencies,
    latent_attention,
    linear,
    project,
    rms,
    rotate,
    rotate_pairs,
    yarn,
)
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig

from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.modules.eagle import Eagle3Head
from spec_compile.drafters.modules.layers import LatentAttention, LatentSizes, LayerKnobs, rotary


def llama3(freqs, factor=8.0, low=1.0, high=4.0, original=64):
    """Llama-3.1's scaling: long waves are stretched, short ones stay, those between are blended."""
    out = []
    for f in freqs:
        wave = 2 * math.pi / f
        smooth = (original / wave - low) / (high - low)
        kept = f if wave < original / high else f / factor if wave > original / low else None
        out.append((1 - smooth) * f / factor + smooth * f if kept is None else kept)
    return np.array(out)


def latent(theta=10000.0, scaled=False, turn=rotate_pairs):
    """MLA of a head, whose norms have the epsilon of its config."""
    size = drafts.LATENT["qk_rope_head_dim"]
    scaled = yarn(theta, size, **drafts.YARN) if scaled else (frequencies(theta, size), 1.0, 1.0)
    rank = drafts.LATENT["kv_lora_rank"]
    return functools.partial(latent_attention, rank=rank, eps=1e-5, scaled=scaled, turn=turn)


def mistral(t, embedding, ids, positions, state):
    """EAGLE with input norms and a last norm, whose output goes round; RoPE of pairs, scaled by YaRN."""
    freqs, _, _ = yarn(1e6, D, 64.0, 64, 4.0, 1.0, 0, 0, "yarn")
    names = {own: name for name, own in drafts.MISTRALS_NAMES.items()}
    t = {re.sub("|".join(names), lambda match: names[match[0]], name): value for name, value in t.items()}
    y = linear(t, "eagle_linear", np.concatenate([embedding[ids], state], 1))
    for number, window in enumerate((None, 3)):
        attend = functools.partial(attention, freqs=freqs, window=window, turn=rotate_pairs)
        x = rms(y, t[f"layers.{number}.input_layernorm.weight"])
        y = finish(t, f"layers.{number}", y, x, positions, freqs, attend=attend)
    out = rms(y, t["norm.weight"])
    return out, out


def of_two_layers(t, name, x, positions):
    """Grouped queries with RoPE on half of each head; the first layer has a window."""
    return attention(t, name, x, positions, frequencies(1e7, D // 2), 3 if name.startswith("layers.0") else None)


FORMULAS = {
    "eagle": eagle(),
    "eagle_no_bias": eagle(theta=500000.0),
    "eagle_qwen2": eagle(theta=500000.0),
    "eagle_layers": eagle(theta=500000.0, further="layers.1"),
    "eagle_vllm": eagle("model.layers.0"),
    "eagle_speculators": eagle(
        "transformer", "fusion_fc", embedding_norm="embedding_layernorm.weight",
        input_norm="transformer.input_layernorm.weight", output_norm="pre_lm_head_layernorm.weight",
    ),
    "eagle_mistral": mistral,
    "eagle3": eagle3(),
    "eagle3_sglang": eagle3(freqs=frequencies(1e6)),
    "eagle3_sglang_layers": eagle3("model.midlayer", further=("model.additional_layers.0", "hidden_norm")),
    "eagle3_vllm_layers": eagle3("layers.0", further=("layers.1", "input_layernorm")),
    "eagle3_full": eagle3(),
    "eagle3_full_zeros": eagle3(),
    "eagle3_borrowed": eagle3(freqs=frequencies(150000.0) / 2),
    "eagle3_plain_state": eagle3(),
    "eagle31": eagle3(freqs=frequencies(1e6), recycle=True),
    "eagle3_gpt_oss": eagle3(freqs=frequencies(1e6), recycle=True),
    "eagle3_wide": eagle3(own=True),
    "eagle3_llama3_rope": eagle3(freqs=llama3(frequencies(500000.0)), window=3),
    "eagle3_speculators": eagle3("layers.0", frequencies(500000.0), normed_residual=True),
    "eagle3_speculators_31": eagle3("layers.0", frequencies(500000.0), recycle=True, own=True),
    "eagle3_speculators_09": eagle3(
        "layers.0", attend=of_two_layers, recycle=True, further=("layers.1", "input_layernorm")
    ),
    "eagle3_deepspec": eagle3("layers.0", frequencies(1e6)),
    "eagle3_mla": eagle3("layers.0", attend=latent(50000.0, scaled=True)),
    "eagle31_mla": eagle3("layers.0", attend=latent(50000.0, scaled=True), recycle=True),
    "eagle3_mla_specforge": eagle3(attend=latent()),
    "eagle3_mla_layers": eagle3(
        "layers.0", attend=latent(50000.0, scaled=True), further=("layers.1", "input_layernorm")
    ),
}  # fmt: skip
PROJECTIONS = {
    "eagle31": {"fc_norm": True},
    "eagle31_mla": {"fc_norm": True},
    "eagle3_speculators_09": {"fc_norm": True},
    "eagle3_gpt_oss": {"input_norm": True},
    "eagle3_plain_state": {"fc": False},
}


# The comparison


@pytest.fixture
def load(tmp_path):
    def load(name):
        written = drafts.write(name, tmp_path / name)
        draft = None if name in ("mtp_deepseek", "mtp_qwen") else written.folder
        return written, load_head(draft, written.target, drafts.FLAVOURS[name].algorithm)

    return load


def example(head, length=9):
    """Two rows of tokens, positions (one starts at 0) and states."""
    ids = torch.randint(0, drafts.V, (2, length))
    positions = torch.arange(length) + torch.tensor([[0], [5]])
    return ids, positions, [torch.randn(2, length, H) for _ in head.taps]


@pytest.mark.parametrize("name", drafts.FLAVOURS)
@torch.no_grad()
def test_a_head_computes_its_formulas(load, name):
    """Its projection and both its outputs."""
    written, head = load(name)
    tensors = {key: value.numpy().astype(np.float64) for key, value in written.tensors.items()}
    embedding = written.target.get_input_embeddings().weight.numpy().astype(np.float64)
    ids, positions, features = example(head)
    state = head.project(features)
    got = head(ids, positions, state)
    for row in range(2):
        numbers = [feature[row].numpy().astype(np.float64) for feature in features]
        right = numbers[0]
        if name.startswith("eagle3"):
            right = project(tensors, numbers, **PROJECTIONS.get(name, {}))
        given = tensors, embedding, ids[row].numpy(), positions[row].numpy(), right
        outputs = FORMULAS[name](*given) if name in FORMULAS else [mtp_formulas.FORMULAS[name](*given, 0)] * 2
        for ours, expected in zip((state, *got), (right, *outputs)):
            assert np.abs(ours[row].numpy() - expected).max() < 3e-5


@hypothesis.given(
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]), size=st.sampled_from([2, 6, 8]),
    hidden=st.sampled_from([12, 24]), taps=st.integers(1, 5), length=st.integers(1, 7), qk_norm=st.booleans(),
    bias=st.booleans(), window=st.sampled_from([None, 1, 3]), recycle=st.booleans(), normed_residual=st.booleans(),
)  # fmt: skip
@hypothesis.settings(max_examples=30)
@torch.no_grad()
def test_eagle3_of_any_size(heads, size, hidden, taps, length, qk_norm, bias, window, recycle, normed_residual):
    """Head size times heads need not be the hidden size, and the draft's need not be the target's."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=10, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=size, rms_norm_eps=1e-5,
    )  # fmt: skip
    layer = LayerKnobs(qkv_bias=bias, output_bias=bias, qk_norm=qk_norm, windows=(window,))
    embedding = nn.Parameter(torch.randn(11, hidden))
    head = Eagle3Head(
        config, embedding, tuple(range(taps)), 5, nn.Parameter(torch.zeros(7, hidden)), layer=layer, fc_bias=bias,
        norm_before_residual=normed_residual, recycle_normed=recycle,
    )  # fmt: skip
    for value in head.parameters():
        value.normal_(std=0.4)
    tensors = {name: value.double().numpy() for name, value in head.state_dict().items()}
    ids, positions = torch.randint(0, 11, (1, length)), torch.randint(0, 50, (1, length))
    features = [torch.randn(1, length, 5) for _ in range(taps)]
    state = head.project(features)
    right = project(tensors, [feature[0].double().numpy() for feature in features])
    forward = eagle3("blocks.0", frequencies(10000.0, size), normed_residual, recycle, window=window)
    expected = forward(tensors, tensors["embedding"], ids[0].numpy(), positions[0].numpy(), right)
    for ours, formula in zip((state, *head(ids, positions, state)), (right, *expected)):
        np.testing.assert_allclose(ours[0].numpy(), formula, rtol=1e-4, atol=1e-5)


@hypothesis.given(
    ranks=st.tuples(st.sampled_from([None, 5]), st.integers(1, 6)), nope=st.integers(1, 5),
    turned=st.sampled_from([2, 6]), values=st.integers(1, 7), inputs=st.sampled_from([7, 12]),
    length=st.integers(1, 6), pairs=st.booleans(),
)  # fmt: skip
@hypothesis.settings(max_examples=20)
@torch.no_grad()
def test_latent_attention_of_any_size(ranks, nope, turned, values, inputs, length, pairs):
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, head_dim=turned, rms_norm_eps=1e-5)
    sizes = LatentSizes(*ranks, nope, turned, values, scale=0.3, pairs=pairs)
    attention = LatentAttention(config, 0, inputs, LayerKnobs(latent=sizes))
    for value in attention.parameters():
        value.normal_(std=0.4)
    tensors = {f"x.{name}": value.double().numpy() for name, value in attention.state_dict().items()}
    x, positions = torch.randn(1, length, inputs), torch.randint(0, 50, (1, length))
    got = attention(x, rotary(config, torch.device("cpu"))(x, positions))
    scaled = frequencies(10000.0, turned), 1.0, 0.3 * (nope + turned) ** 0.5
    expected = latent_attention(
        tensors, "x", x[0].double().numpy(), positions[0].numpy(), ranks[1], nope, turned, values, 1e-5, scaled,
        rotate_pairs if pairs else rotate,
    )  # fmt: skip
    np.testing.assert_allclose(got[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_rope_reaches_beyond_max_position_embeddings(load):
    """That number is the length of training, and sizes no table."""
    _, head = load("eagle3")
    config = head.rotary_emb.config
    assert config.max_position_embeddings == 2048
    positions = torch.tensor([[0, 2047, 2048, 100000]])
    cos, _ = rotary(config, torch.device("cpu"))(torch.zeros(1), positions)
    expected = [[math.cos(p * f) for f in frequencies(10000.0)] for p in positions[0].tolist()]
    torch.testing.assert_close(cos[0, :, : D // 2], torch.tensor(expected), rtol=0, atol=1e-2)


def test_a_head_of_another_dtype(load):
    """In bfloat16 a head is near the one in float32, and bias buffers of routers keep float32."""
    for name in ("eagle3_sglang", "mtp_deepseek"):
        written, head = load(name)
        target = written.target.to(torch.bfloat16)
        half = load_head(written.folder, target, drafts.FLAVOURS[name].algorithm)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert {b.dtype for n, b in half.named_buffers() if "bias" in n} <= {torch.float32}
        ids, positions, features = example(head)
        with torch.no_grad():
            fine = head(ids, positions, head.project(features))[1]
            coarse = half(ids, positions, half.project([f.bfloat16() for f in features]))[1]
        assert coarse.dtype == torch.bfloat16
        assert torch.cosine_similarity(fine.flatten(), coarse.float().flatten(), dim=0) > 0.99
