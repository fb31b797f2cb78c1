"""What blocks of heads compute, as formulas in float64, of one sequence."""

import math

import draft_checkpoints as drafts
import numpy as np

HEADS, KV, D, H = drafts.HEADS, drafts.KV, drafts.D, drafts.H


def rms(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def frequencies(theta, size=D):
    return theta ** (-np.arange(0, size, 2) / size)


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


def attend(q, k, v, scale, window=None, chosen=None, sinks=None):
    """q [T, heads, d], k, v [T, kv, d]: causal softmax attention, one place and one head after another.

    chosen: for each place those that it sees; None for all. sinks [heads]: a score of each head that takes weight away.
    """
    group, out = q.shape[1] // k.shape[1], np.zeros((len(q), q.shape[1], v.shape[2]))
    for t in range(len(q)):
        seen = range(0 if window is None else max(0, t - window + 1), t + 1) if chosen is None else chosen[t]
        for h in range(q.shape[1]):
            scores = np.array([q[t, h] @ k[s, h // group] * scale for s in seen])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum() + (0 if sinks is None else np.exp(sinks[h] - scores.max()))
            out[t, h] = sum(w * v[s, h // group] for w, s in zip(weights, seen))
    return out.reshape(len(q), -1)


def linear(t, name, x):
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def mlp(t, name, x):
    return linear(t, f"{name}.down_proj", silu(linear(t, f"{name}.gate_proj", x)) * linear(t, f"{name}.up_proj", x))


def attention(
    t, name, x, positions, freqs, window=None, size=D, turn=rotate, eps=1e-5, gates=None, sinks=None, scale=1.0
):
    """Grouped-query attention with RoPE, biases and norms of queries and keys as far as there are any.

    gates [T, heads, *]: what outputs are multiplied by, before its sigmoid. sinks: see `attend`. scale: multiplies v.
    """
    q, k, v = (linear(t, f"{name}.{part}_proj", x).reshape(len(x), -1, size) for part in "qkv")
    if f"{name}.q_norm.weight" in t:
        q, k = rms(q, t[f"{name}.q_norm.weight"], eps), rms(k, t[f"{name}.k_norm.weight"], eps)
    q, k = (np.stack([[turn(h, p, freqs) for h in row] for row, p in zip(z, positions)]) for z in (q, k))
    return linear(t, f"{name}.o_proj", gated(attend(q, k, v * scale, size**-0.5, window, sinks=sinks), gates))


def gated(heads, gates):
    """The outputs of heads [T, heads * d] times sigmoids of gates [T, heads, *], if there are any."""
    if gates is None:
        return heads
    return (heads.reshape(*gates.shape[:2], -1) * sigmoid(gates)).reshape(len(heads), -1)


def finish(t, prefix, residual, x, positions, freqs, window=None, attend=None):
    """The rest of a decoder layer behind its input norm."""
    name = f"{prefix}.self_attn"
    attended = (
        attend(t, name, x, positions) if attend else attention(t, name, x, positions, freqs, window, 2 * len(freqs))
    )
    y = residual + attended
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
    prefix="midlayer", freqs=None, normed_residual=False, recycle=False, own=False, window=None, further=None,
    attend=None,
):  # fmt: skip
    """q, k, v read [norm(e); norm(z)]; y = z + attention (or norm(z) + attention); y += mlp(norm(y)).

    attend: replaces grouped-query attention.
    """
    freqs = frequencies(10000.0) if freqs is None else freqs

    def forward(t, embedding, ids, positions, state):
        e = (t["embed_tokens.weight"] if own else embedding)[ids]
        z = rms(state, t[f"{prefix}.hidden_norm.weight"])
        x = np.concatenate([rms(e, t[f"{prefix}.input_layernorm.weight"]), z], 1)
        y = finish(t, prefix, z if normed_residual else state, x, positions, freqs, window, attend)
        if further:
            second, norm = further
            y = finish(t, second, y, rms(y, t[f"{second}.{norm}.weight"]), positions, freqs, attend=attend)
        out = rms(y, t["norm.weight"])
        return (out if recycle else y), out

    return forward


def yarn(theta, size, factor, original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim, type):
    """YaRN after SpecForge's ``LlamaYarnRotaryEmbedding``: frequencies, factor of turned numbers, factor of scores."""

    def place(turns):
        """The index, not rounded, of a frequency that turns so often within the original length."""
        return size * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def grown(by):
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1

    low, high = max(math.floor(place(beta_fast)), 0), min(math.ceil(place(beta_slow)), size - 1)
    blend = np.clip((np.arange(size // 2) - low) / ((high - low) or 0.001), 0, 1)
    freqs = frequencies(theta, size)
    return (
        freqs / factor * blend + freqs * (1 - blend),
        grown(mscale) / grown(mscale_all_dim),
        grown(mscale_all_dim) ** 2,
    )


def latent_attention(
    t, name, x, positions, rank=24, nope=16, rope=8, values=12, eps=1e-6, scaled=None, turn=rotate_pairs,
    chosen=None, gates=None, last="o_proj",
):  # fmt: skip
    """DeepSeek's MLA: low-rank queries, one compressed row for keys and values, RoPE on a part of its own.

    scaled: see the return values of `yarn`. last: the name of the last product.
    """
    freqs, grown, scale = scaled or (frequencies(10000.0, rope), 1.0, 1.0)
    if f"{name}.q_proj.weight" in t:
        q = linear(t, f"{name}.q_proj", x)
    else:
        q_row = rms(linear(t, f"{name}.q_a_proj", x), t[f"{name}.q_a_layernorm.weight"], eps)
        q = linear(t, f"{name}.q_b_proj", q_row)
    down = linear(t, f"{name}.kv_a_proj_with_mqa", x)
    up = linear(t, f"{name}.kv_b_proj", rms(down[:, :rank], t[f"{name}.kv_a_layernorm.weight"], eps))
    q, up = q.reshape(len(x), HEADS, nope + rope), up.reshape(len(x), HEADS, nope + values)
    queries, keys = np.zeros_like(q), np.zeros_like(q)
    for i, position in enumerate(positions):
        turned = grown * turn(down[i, rank:], position, freqs)
        for h in range(HEADS):
            queries[i, h] = np.concatenate([q[i, h, :nope], grown * turn(q[i, h, nope:], position, freqs)])
            keys[i, h] = np.concatenate([up[i, h, :nope], turned])
    out = attend(queries, keys, up[:, :, nope:], (nope + rope) ** -0.5 * scale, None, chosen)
    return linear(t, f"{name}.{last}", gated(out, gates))
