"""Every block against its formulas: slow float64 arithmetic on the published tensors, written place by place."""

import math

import draft_checkpoints as drafts
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from spec_compile.capture.trace import capture_head
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.modules.eagle import Eagle3Head
from spec_compile.drafters.modules.layers import LayerKnobs, rotary

HEADS, KV, D, H = drafts.HEADS, drafts.KV, drafts.D, drafts.H


# The formulas


def rms(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def frequencies(theta, size=D):
    return theta ** (-np.arange(0, size, 2) / size)


def llama3(freqs, factor=8.0, low=1.0, high=4.0, original=64):
    """Llama-3.1's scaling: long waves are stretched, short ones stay, those between are blended."""
    out = []
    for f in freqs:
        wave = 2 * math.pi / f
        smooth = (original / wave - low) / (high - low)
        kept = f if wave < original / high else f / factor if wave > original / low else None
        out.append((1 - smooth) * f / factor + smooth * f if kept is None else kept)
    return np.array(out)


def rotate(x, position, freqs):
    """Pairs (i, i + r/2) of the first r = 2 len(freqs) numbers turn by position * freqs[i]; the rest stays."""
    half, out = len(freqs), x.copy()
    for i, angle in enumerate(position * freqs):
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rotate_pairs(x, position, freqs):
    """Pairs (2i, 2i + 1) turn; the result lists all first numbers, then all second ones (DeepSeek)."""
    first, second = [], []
    for i, angle in enumerate(position * freqs):
        first.append(x[2 * i] * math.cos(angle) - x[2 * i + 1] * math.sin(angle))
        second.append(x[2 * i + 1] * math.cos(angle) + x[2 * i] * math.sin(angle))
    return np.array(first + second)


def attend(q, k, v, scale, window=None):
    """q [T, heads, d], k, v [T, kv, d]: causal softmax attention, one place and one head after another."""
    group, out = q.shape[1] // k.shape[1], np.zeros((len(q), q.shape[1], v.shape[2]))
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(q.shape[1]):
            scores = np.array([q[t, h] @ k[s, h // group] * scale for s in range(first, t + 1)])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[t, h] = sum(w * v[s, h // group] for w, s in zip(weights, range(first, t + 1)))
    return out.reshape(len(q), -1)


def linear(t, name, x):
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def mlp(t, name, x):
    return linear(t, f"{name}.down_proj", silu(linear(t, f"{name}.gate_proj", x)) * linear(t, f"{name}.up_proj", x))


def attention(t, name, x, positions, freqs, window=None, size=D):
    """Grouped-query attention with RoPE, biases and norms of queries and keys as far as there are any."""
    q, k, v = (linear(t, f"{name}.{part}_proj", x).reshape(len(x), -1, size) for part in "qkv")
    if f"{name}.q_norm.weight" in t:
        q, k = rms(q, t[f"{name}.q_norm.weight"]), rms(k, t[f"{name}.k_norm.weight"])
    q, k = (np.stack([[rotate(h, p, freqs) for h in row] for row, p in zip(z, positions)]) for z in (q, k))
    return linear(t, f"{name}.o_proj", attend(q, k, v, size**-0.5, window))


def finish(t, prefix, residual, x, positions, freqs, window=None):
    """The rest of a decoder layer behind its input norm."""
    y = residual + attention(t, f"{prefix}.self_attn", x, positions, freqs, window, 2 * len(freqs))
    return y + mlp(t, f"{prefix}.mlp", rms(y, t[f"{prefix}.post_attention_layernorm.weight"]))


def eagle(prefix="layers.0", fc="fc", theta=10000.0, embedding_norm=None, input_norm=None, output_norm=None,
          further=None):  # fmt: skip
    """u = fc [e; f]; y = u + attention(u); y += mlp(norm(y)); no other norms unless they are named."""

    def forward(t, embedding, ids, positions, state):
        e = embedding[ids]
        e = rms(e, t[embedding_norm]) if embedding_norm else e
        u = linear(t, fc, np.concatenate([e, state], 1))
        x = rms(u, t[input_norm]) if input_norm else u
        y = finish(t, prefix, u, x, positions, frequencies(theta))
        if further:
            x = rms(y, t[f"{further}.input_layernorm.weight"])
            y = finish(t, further, y, x, positions, frequencies(theta))
        return y, rms(y, t[output_norm]) if output_norm else y

    return forward


def project(t, features, fc_norm=False, input_norm=False, fc=True):
    if fc_norm:
        features = [rms(f, t[f"fc_norm.{i}.weight"]) for i, f in enumerate(features)]
    joined = np.concatenate(features, 1)
    joined = rms(joined, t["input_norm.weight"]) if input_norm else joined
    return linear(t, "fc", joined) if fc else joined


def eagle3(
    prefix="midlayer", freqs=None, normed_residual=False, recycle=False, own=False, window=None, further=None
):  # fmt: skip
    """q, k, v read [norm(e); norm(z)]; y = z + attention (or norm(z) + attention); y += mlp(norm(y))."""
    freqs = frequencies(10000.0) if freqs is None else freqs

    def forward(t, embedding, ids, positions, state):
        e = (t["embed_tokens.weight"] if own else embedding)[ids]
        z = rms(state, t[f"{prefix}.hidden_norm.weight"])
        x = np.concatenate([rms(e, t[f"{prefix}.input_layernorm.weight"]), z], 1)
        y = finish(t, prefix, z if normed_residual else state, x, positions, freqs, window)
        if further:
            second, norm = further
            y = finish(t, second, y, rms(y, t[f"{second}.{norm}.weight"]), positions, freqs)
        out = rms(y, t["norm.weight"])
        return (out if recycle else y), out

    return forward


def mtp(names, layer, embedding_first=True, zero_first=True, gemma=False, eps=1e-6):
    """u = fc [norm(e); norm(s)] or the other order; y = layer(u); norm(y) goes round. names: fc, both norms, last."""

    def forward(t, embedding, ids, positions, state):
        fc, for_embedding, for_state, last = names
        t = dict(t)
        if gemma:  # norms are stored less 1
            t.update({name: value + 1 for name, value in t.items() if "norm" in name})
        e = embedding[ids] * (positions != 0)[:, None] if zero_first else embedding[ids]
        parts = [rms(e, t[for_embedding], eps), rms(state, t[for_state], eps)]
        u = linear(t, fc, np.concatenate(parts if embedding_first else parts[::-1], 1))
        out = rms(layer(t, u, positions), t[last], eps)
        return out, out

    return forward


def pre_norm(prefix, attend, feed, eps=1e-6):
    def layer(t, u, positions):
        y = u + attend(t, f"{prefix}.self_attn", rms(u, t[f"{prefix}.input_layernorm.weight"], eps), positions)
        return y + feed(t, f"{prefix}.mlp", rms(y, t[f"{prefix}.post_attention_layernorm.weight"], eps))

    return layer


def latent_attention(t, name, x, positions, rank=24, nope=16, rope=8, values=12):
    """DeepSeek's MLA: low-rank queries, one compressed row for keys and values, RoPE on a part of its own."""
    q = linear(t, f"{name}.q_b_proj", rms(linear(t, f"{name}.q_a_proj", x), t[f"{name}.q_a_layernorm.weight"], 1e-6))
    down, freqs = linear(t, f"{name}.kv_a_proj_with_mqa", x), frequencies(10000.0, rope)
    up = linear(t, f"{name}.kv_b_proj", rms(down[:, :rank], t[f"{name}.kv_a_layernorm.weight"], 1e-6))
    q, up = q.reshape(len(x), HEADS, nope + rope), up.reshape(len(x), HEADS, nope + values)
    queries, keys = np.zeros_like(q), np.zeros_like(q)
    for i, position in enumerate(positions):
        turned = rotate_pairs(down[i, rank:], position, freqs)
        for h in range(HEADS):
            queries[i, h] = np.concatenate([q[i, h, :nope], rotate_pairs(q[i, h, nope:], position, freqs)])
            keys[i, h] = np.concatenate([up[i, h, :nope], turned])
    return linear(t, f"{name}.o_proj", attend(queries, keys, up[:, :, nope:], (nope + rope) ** -0.5))


def half_rope_attention(t, name, x, positions):
    """GLM-4.5: norms of queries and keys, RoPE on half of each head."""
    return attention(t, name, x, positions, frequencies(10000.0, D // 2))


def gated_attention(t, name, x, positions):
    """Qwen3-Next: each head's projection holds its query, then its gate; RoPE on a quarter of each head."""
    both = linear(t, f"{name}.q_proj", x).reshape(len(x), HEADS, 2 * D)
    q, gate = rms(both[:, :, :D], t[f"{name}.q_norm.weight"], 1e-6), both[:, :, D:].reshape(len(x), -1)
    k = rms(linear(t, f"{name}.k_proj", x).reshape(len(x), KV, D), t[f"{name}.k_norm.weight"], 1e-6)
    v, freqs = linear(t, f"{name}.v_proj", x).reshape(len(x), KV, D), frequencies(10000.0, D // 4)
    q, k = (np.stack([[rotate(h, p, freqs) for h in row] for row, p in zip(z, positions)]) for z in (q, k))
    return linear(t, f"{name}.o_proj", attend(q, k, v, D**-0.5) * sigmoid(gate))


def grouped_experts(t, name, x, experts=8, groups=2, chosen=2, scale=1.0):
    """DeepSeek-V3 and GLM: sigmoid scores; with a bias they choose the best group by its two best, then 2 experts."""
    out = mlp(t, f"{name}.shared_experts", x)
    for i, row in enumerate(x):
        scores = sigmoid(linear(t, f"{name}.gate", row))
        biased = (scores + t[f"{name}.gate.e_score_correction_bias"]).reshape(groups, -1)
        group = np.sort(biased, 1)[:, -2:].sum(1).argmax()
        best = group * (experts // groups) + np.argsort(-biased[group])[:chosen]
        for expert in best:
            out[i] += scale * scores[expert] / scores[best].sum() * mlp(t, f"{name}.experts.{expert}", row)
    return out


def softmax_experts(t, name, x, chosen=2):
    """Qwen3-Next: softmax scores, the chosen ones made to sum to 1; the shared expert has a gate."""
    out = sigmoid(linear(t, f"{name}.shared_expert_gate", x)) * mlp(t, f"{name}.shared_expert", x)
    for i, row in enumerate(x):
        scores = np.exp(linear(t, f"{name}.gate", row))
        best = np.argsort(-scores)[:chosen]
        for expert in best:
            out[i] += scores[expert] / scores[best].sum() * mlp(t, f"{name}.experts.{expert}", row)
    return out


def nextn(at, attend, scale, eps=1e-6):
    prefix = f"model.layers.{at}"
    names = [f"{prefix}.{name}" for name in ("eh_proj", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")]
    return mtp(names, pre_norm(prefix, attend, lambda *args: grouped_experts(*args, scale=scale), eps), eps=eps)


MIMO = "model.mtp_layers.0"
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
    "eagle3_deepspec": eagle3("layers.0", frequencies(1e6)),
    "mtp_deepseek": nextn(3, latent_attention, 2.5),
    "mtp_deepseek_nextn": nextn(0, latent_attention, 2.5),
    "mtp_glm": nextn(2, half_rope_attention, 1.0, 1e-5),
    "mtp_mimo": mtp(
        [f"{MIMO}.{name}" for name in ("input_proj", "token_layernorm.weight", "hidden_layernorm.weight",
                                       "final_layernorm.weight")],
        pre_norm(MIMO, lambda t, name, x, at: attention(t, name, x, at, frequencies(10000.0)), mlp),
        embedding_first=False,
    ),
    "mtp_qwen": mtp(
        ["mtp.fc", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"],
        pre_norm("mtp.layers.0", gated_attention, softmax_experts), zero_first=False, gemma=True,
    ),
}  # fmt: skip
FORMULAS["mtp_qwen35"] = FORMULAS["mtp_qwen"]
PROJECTIONS = {
    "eagle31": {"fc_norm": True},
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


@torch.no_grad()
def difference(name, written, head, swap=False) -> float:
    """How far a head is from the formulas, at most, over its projection and both its outputs."""
    tensors = {key: value.numpy().astype(np.float64) for key, value in written.tensors.items()}
    embedding = written.target.get_input_embeddings().weight.numpy().astype(np.float64)
    ids, positions, features = example(head)
    state = head.project(features[::-1] if swap else features)
    got, worst = head(ids, positions, state), 0.0
    for row in range(2):
        numbers = [feature[row].numpy().astype(np.float64) for feature in features]
        right = numbers[0]
        if name.startswith("eagle3"):
            right = project(tensors, numbers, **PROJECTIONS.get(name, {}))
        outputs = FORMULAS[name](tensors, embedding, ids[row].numpy(), positions[row].numpy(), right)
        for ours, expected in zip((state, *got), (right, *outputs)):
            worst = max(worst, np.abs(ours[row].numpy() - expected).max())
    return worst


@pytest.mark.parametrize("name", drafts.FLAVOURS)
def test_a_head_computes_its_formulas(load, name):
    written, head = load(name)
    assert difference(name, written, head) < 1e-5


def turned(head, theta):
    config = head.rotary_emb.config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    head.rotary_emb = type(head.rotary_emb)(config)


def attribute(path, value):
    def change(head):
        *owners, last = path.split(".")
        for name in owners:
            head = getattr(head, name)
        setattr(head, last, value(getattr(head, last)))

    return change


def swapped(path, one, other):
    def change(head):
        owner = head.get_submodule(path)
        first, second = getattr(owner, one), getattr(owner, other)
        setattr(owner, one, second)
        setattr(owner, other, first)

    return change


def drop(value):
    return None


def plain(norm):
    return nn.Identity()


def flip(value):
    return not value


def stray_norm(module):
    return LlamaRMSNorm(H)


def not_gemma(norm):
    other = LlamaRMSNorm(H)
    other.weight = norm.weight
    return other


WRONG = [
    ("eagle", "no bias of fc", attribute("fc.bias", drop)),
    ("eagle", "[state; embedding]", attribute("embedding_first", flip)),
    ("eagle", "an input norm", attribute("blocks.0.input_layernorm", stray_norm)),
    ("eagle", "a final norm", attribute("output_norm", stray_norm)),
    ("eagle", "a normed state", attribute("state_norm", stray_norm)),
    ("eagle_no_bias", "RoPE base", lambda head: turned(head, 10000.0)),
    ("eagle_qwen2", "no bias of queries", attribute("blocks.0.self_attn.q_proj.bias", drop)),
    ("eagle_qwen2", "no bias of values", attribute("blocks.0.self_attn.v_proj.bias", drop)),
    ("eagle_speculators", "no norm of embeddings", attribute("embedding_norm", plain)),
    ("eagle_speculators", "no input norm", attribute("blocks.0.input_layernorm", plain)),
    ("eagle_speculators", "no norm of the output", attribute("output_norm", plain)),
    ("eagle3", "norm_before_residual", attribute("blocks.0.norm_before_residual", flip)),
    ("eagle3", "recycle_normed", attribute("recycle_normed", flip)),
    ("eagle3", "norms swapped", swapped("blocks.0", "hidden_norm", "input_layernorm")),
    ("eagle3", "no final norm", attribute("norm", plain)),
    ("eagle3_sglang", "RoPE base", lambda head: turned(head, 10000.0)),
    ("eagle3_vllm_layers", "one layer only", attribute("blocks", lambda blocks: blocks[:1])),
    ("eagle3_borrowed", "no scaling of RoPE", attribute("rotary_emb.inv_freq", lambda freqs: freqs * 2)),
    ("eagle31", "no norms of states", attribute("fc_norm", drop)),
    ("eagle31", "recycle_normed", attribute("recycle_normed", flip)),
    ("eagle3_gpt_oss", "no norm before fc", attribute("input_norm", plain)),
    ("eagle3_llama3_rope", "no window", attribute("blocks.0.self_attn.window", drop)),
    ("eagle3_speculators", "norm_before_residual", attribute("blocks.0.norm_before_residual", flip)),
    ("eagle3_speculators_31", "the target's embedding", attribute("embedding", lambda e: nn.Parameter(e + 0.1))),
    ("eagle3_deepspec", "no norm of queries", attribute("blocks.0.self_attn.q_norm", plain)),
    ("eagle3_deepspec", "no norm of keys", attribute("blocks.0.self_attn.k_norm", plain)),
    ("mtp_deepseek", "[state; embedding]", attribute("embedding_first", flip)),
    ("mtp_deepseek", "an embedding at position 0", attribute("zero_first", flip)),
    ("mtp_deepseek", "recycle_normed", attribute("recycle_normed", flip)),
    ("mtp_deepseek", "norms swapped", swapped("", "embedding_norm", "state_norm")),
    ("mtp_deepseek", "no bias of experts", attribute("block.mlp.gate.e_score_correction_bias", torch.zeros_like)),
    ("mtp_deepseek", "gate and up swapped", attribute(
        "block.mlp.experts.gate_up_proj", lambda p: nn.Parameter(torch.cat(p.chunk(2, 1)[::-1], 1)))),
    ("mtp_deepseek", "experts turned round", attribute(
        "block.mlp.experts.down_proj", lambda p: nn.Parameter(p.flip(0)))),
    ("mtp_glm", "RoPE base", lambda head: turned(head, 1e6)),
    ("mtp_mimo", "[embedding; state]", attribute("embedding_first", flip)),
    ("mtp_qwen", "norms as stored", attribute("state_norm", not_gemma)),
    ("mtp_qwen", "no embedding at position 0", attribute("zero_first", flip)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "change"), WRONG, ids=[f"{name}: {what}" for name, what, _ in WRONG])
def test_a_knob_that_is_wrong_shows(load, name, what, change):
    written, head = load(name)
    change(head)
    assert difference(name, written, head) > 1e-3


def test_states_in_another_order_show(load):
    written, head = load("eagle3")
    assert difference("eagle3", written, head, swap=True) > 1e-3


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
        config, embedding, tuple(range(taps)), 5, draft_vocab_size=7, layer=layer, fc_bias=bias,
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


# What our compiler asks of a head

CAPTURED = [
    "eagle_qwen2", "eagle_speculators", "eagle3_sglang_layers", "eagle3_plain_state", "eagle31", "eagle3_wide",
    "eagle3_deepspec", "mtp_deepseek", "mtp_glm", "mtp_mimo", "mtp_qwen35",
]  # fmt: skip


@pytest.mark.sweep("eagle_qwen2 eagle3_sglang_layers mtp_deepseek mtp_qwen35")
@pytest.mark.parametrize("name", CAPTURED)
@torch.no_grad()
def test_a_head_is_captured_for_any_batch_and_length(load, name):
    _, head = load(name)
    graph = capture_head(head, head.hidden_size)
    assert len(graph.layers) == head.layers
    assert [layer.kv_heads for layer in graph.layers] == [4 if "deepseek" in name else KV] * head.layers
    for batch, length in ((1, 5), (3, 4)):
        ids, state = torch.randint(0, drafts.V, (batch, length)), torch.randn(batch, length, head.hidden_size)
        positions = torch.arange(length).expand(batch, -1)
        for ours, eager in zip(graph.gm(ids, positions, state), head(ids, positions, state)):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_slots_see_only_what_came_before(load):
    _, head = load("eagle3")
    ids, positions, features = example(head)
    before = head(ids, positions, head.project(features))[0]
    ids[:, 6:], features[0][:, 6:] = 5, 1.0
    after = head(ids, positions, head.project(features))[0]
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6:], after[:, 6:])


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
