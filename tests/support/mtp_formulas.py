"""What modules of multi-token prediction compute, as slow float64 arithmetic on the published tensors.

``FORMULAS[name](tensors, embedding, ids, positions, state, number)`` gives norm(y) [T, H] of module `number` of a
family in `mtp_checkpoints.MTP` or a flavour in `draft_checkpoints.FLAVOURS`. They follow the definitions that the table
of families names.
"""

import functools

import numpy as np
from draft_formulas import (
    HEADS,
    D,
    attention,
    frequencies,
    latent_attention,
    linear,
    mlp,
    rms,
    rotate,
    rotate_pairs,
    sigmoid,
)
from mtp_checkpoints import EXPERTS, WINDOW

FREQS = frequencies(10000.0)


def module(fc, for_embedding, for_state, last, layer, eps=1e-5, zero_first=False, own=None, state_first=False):
    """norm(layer(fc [norm(e); norm(s)])). The names are formats of the module's number; last: None for no norm."""

    def forward(t, embedding, ids, positions, state, number):
        e = (t[own] if own else embedding)[ids]
        e = e * (positions != 0)[:, None] if zero_first else e
        names = [f"{name}.weight".format(number) for name in (for_embedding, for_state)]
        both = [rms(e, t[names[0]], eps), rms(state, t[names[1]], eps)]
        u = linear(t, fc.format(number), np.concatenate(both[::-1] if state_first else both, 1))
        y = layer(t, u, positions, number)
        return rms(y, t[f"{last}.weight".format(number)], eps) if last else y

    return forward


def layer(prefix, attend, feed, eps=1e-5, second="post_attention_layernorm"):
    """A decoder layer. prefix: a format of the module's number. second: the name of its second norm."""

    def forward(t, u, positions, number):
        name = prefix.format(number)
        y = u + attend(t, f"{name}.self_attn", rms(u, t[f"{name}.input_layernorm.weight"], eps), positions)
        return y + feed(t, f"{name}.mlp", rms(y, t[f"{name}.{second}.weight"], eps))

    return forward


def nextn(prefix, block, last, **kwargs):
    return module(f"{prefix}.eh_proj", f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.{last}", block, **kwargs)


def after(layers, attend, feed, last, eps=1e-5, **kwargs):
    """Modules that are layers number `layers` and so on."""

    def forward(t, embedding, ids, positions, state, number):
        prefix = f"model.layers.{layers + number}"
        block = layer(prefix, attend, feed, eps)
        return nextn(prefix, block, last, eps=eps, **kwargs)(t, embedding, ids, positions, state, number)

    return forward


def rope_attention(window=None):
    return lambda t, name, x, positions: attention(t, name, x, positions, FREQS, window)


def half_rope_attention(t, name, x, positions):
    """GLM-4.5: norms of queries and keys, RoPE on half of each head."""
    return attention(t, name, x, positions, frequencies(10000.0, D // 2))


def gated_attention(t, name, x, positions):
    """Qwen3-Next: each head's projection holds its query, then its gate; RoPE on a quarter of each head."""
    q, gates = np.split(t[f"{name}.q_proj.weight"].reshape(HEADS, 2 * D, -1), 2, axis=1)
    gates = (x @ gates.reshape(HEADS * D, -1).T).reshape(len(x), HEADS, D)
    t = {**t, f"{name}.q_proj.weight": q.reshape(HEADS * D, -1)}
    return attention(t, name, x, positions, frequencies(10000.0, D // 4), eps=1e-6, gates=gates)


def plain_attention(t, name, x, positions):
    """Without RoPE; norms of queries and keys if there are any."""
    return attention(t, name, x, positions, 0 * FREQS)


def pairs_attention(t, name, x, positions):
    """ERNIE: neighbouring numbers of a head turn together."""
    return attention(t, name, x, positions, FREQS, turn=rotate_pairs)


def sink_attention(t, name, x, positions):
    """MiMo-V2: RoPE on half of each head, values times 0.707, a window, and a learned score that takes weight away."""
    sinks = t[f"{name}.attention_sink_bias"]
    return attention(t, name, x, positions, frequencies(10000.0, D // 2), WINDOW, sinks=sinks, scale=0.707)


def scaled_latent_attention(t, name, x, positions):
    """LongCat-Flash: what the compressed rows are normed to is multiplied by sqrt(hidden size / rank)."""
    t = dict(t)
    for part, rank in (("q", 32), ("kv", 24)):
        t[f"{name}.{part}_a_layernorm.weight"] = t[f"{name}.{part}_a_layernorm.weight"] * (64 / rank) ** 0.5
    return latent_attention(t, name, x, positions)


def indexed_attention(turn, topk=8):
    """MLA to the tokens with the `topk` largest index scores. turn: rotates the first 8 numbers of an index head."""

    def attend_to_chosen(t, name, x, positions):
        q = rms(linear(t, f"{name}.q_a_proj", x), t[f"{name}.q_a_layernorm.weight"], 1e-6)
        q = linear(t, f"{name}.indexer.wq_b", q).reshape(len(x), -1, 16)
        k = linear(t, f"{name}.indexer.wk", x)
        k = (k - k.mean(1, keepdims=True)) / np.sqrt(k.var(1, keepdims=True) + 1e-6)
        k = k * t[f"{name}.indexer.k_norm.weight"] + t[f"{name}.indexer.k_norm.bias"]
        freqs, weights = frequencies(10000.0, 8), linear(t, f"{name}.indexer.weights_proj", x)
        k = np.stack([np.concatenate([turn(row[:8], p, freqs), row[8:]]) for row, p in zip(k, positions)])
        chosen = []
        for at, position in enumerate(positions):
            heads = np.stack([np.concatenate([turn(head[:8], position, freqs), head[8:]]) for head in q[at]])
            scores = weights[at] @ np.maximum(heads @ k[: at + 1].T, 0)
            chosen.append(np.argsort(-scores)[:topk])
        return latent_attention(t, name, x, positions, chosen=chosen)

    return attend_to_chosen


def ling_attention(t, name, x, positions):
    """Ling: a gate for each head, before the last product, which is called dense."""
    name = name.replace("self_attn", "attention")
    gates = linear(t, f"{name}.g_proj", x)[:, :, None]
    return latent_attention(t, name, x, positions, gates=gates, last="dense")


def experts(gate="gate", bias="", shared="shared_experts", scale=1.0, groups=1, count=EXPERTS, expert=mlp):
    """Two experts by sigmoid scores with a bias, or by a softmax without one, whose weights are made to sum to 1."""

    def feed(t, name, x):
        out = expert(t, f"{name}.{shared}", x) if shared else np.zeros_like(x)
        if f"{name}.{shared}_gate.weight" in t:
            out *= sigmoid(linear(t, f"{name}.{shared}_gate", x))
        for i, row in enumerate(x):
            scores = linear(t, f"{name}.{gate}", row)
            scores = sigmoid(scores) if bias else np.exp(scores)
            biased = scores + t[f"{name}.{bias}"] if bias else scores
            best = np.sort(biased.reshape(groups, -1), 1)[:, -2:].sum(1).argmax() * (count // groups)
            chosen = best + np.argsort(-biased[best : best + count // groups])[:2]
            for number in chosen:
                weight = scale * scores[number] / scores[chosen].sum()
                out[i] += weight * expert(t, f"{name}.experts.{number}", row)
        return out

    return feed


def squared(t, name, x):
    """Nemotron-H: relu(x) ** 2 between two products."""
    return linear(t, f"{name}.down_proj", np.maximum(linear(t, f"{name}.up_proj", x), 0) ** 2)


def half_layers(t, u, positions, number):
    """Nemotron-H: attention and experts, each with its norm before it."""
    y = u + plain_attention(t, "mtp.layers.0.mixer", rms(u, t["mtp.layers.0.norm.weight"], 1e-5), positions)
    feed = experts(bias="gate.e_score_correction_bias", expert=squared)
    return y + feed(t, "mtp.layers.1.mixer", rms(y, t["mtp.layers.1.norm.weight"], 1e-5))


def sandwich(prefix, attend, feed, before=True):
    """A layer with norms after its parts, and before them if `before`. prefix: a format of the module's number."""

    def forward(t, u, positions, number):
        name = prefix.format(number)

        def normed(norm, x):
            return rms(x, t[f"{name}.{norm}.weight"])

        first, second, third, fourth = (
            ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
            if before
            else (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
        )
        y = u + normed(second, attend(t, f"{name}.self_attn", normed(first, u) if first else u, positions))
        return y + normed(fourth, feed(t, f"{name}.mlp", normed(third, y) if third else y))

    return forward


def merged_mlp(t, name, x):
    """GLM: gate and up in one matrix."""
    gate, up = np.split(t[f"{name}.gate_up_proj.weight"], 2)
    return mlp({**t, f"{name}.gate_proj.weight": gate, f"{name}.up_proj.weight": up}, name, x)


def step_attention(t, name, x, positions):
    """Step: a gate for each head. The second of three modules has no window, and RoPE on half of each head."""
    freqs, window = (frequencies(1e4, D // 2), None) if ".4." in name else (FREQS, WINDOW)
    return attention(t, name, x, positions, freqs, window, gates=linear(t, f"{name}.g_proj", x)[:, :, None])


def less_one(forward):
    """With norms that are stored less 1."""

    def shifted(t, *args):
        return forward({name: value + ("norm" in name) for name, value in t.items()}, *args)

    return shifted


def exaone_attention(t, name, x, positions):
    """K-EXAONE: RoPE goes with a window, which the first of two modules has."""
    return (rope_attention(WINDOW) if ".0." in name else plain_attention)(t, name, x, positions)


def pre_fc(layer, **kwargs):
    return module("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", layer, **kwargs)


def mimo(prefix, **kwargs):
    names = (f"{prefix}.{name}" for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"))
    return module(*names, layer(prefix, rope_attention(), mlp, 1e-6), 1e-6, **kwargs)


GROUPED = dict(bias="gate.e_score_correction_bias", groups=2, count=8)
MIXED = dict(bias="gate.e_score_correction_bias", groups=2, count=4)
DEEPSEEK = functools.partial(
    after, attend=latent_attention, feed=experts(**GROUPED, scale=2.5), last="shared_head.norm", eps=1e-6,
    zero_first=True,
)  # fmt: skip
QWEN = "mtp.layers.{}"
MIMO, LONGCAT, GLM_V = "model.mtp.layers.{}", "model.mtp.layers.0", "model.language_model.layers.2"
FORMULAS = {
    "deepseek_v3": DEEPSEEK(3),
    "mtp_deepseek": DEEPSEEK(3),
    "mtp_deepseek_nextn": DEEPSEEK(0),
    "mtp_glm": after(2, half_rope_attention, experts(**GROUPED), "shared_head.norm", zero_first=True),
    "mtp_mimo": mimo("model.mtp_layers.0", zero_first=True, state_first=True),
    "mtp_speculators": mimo("mtp_layers.0"),
    "mtp_qwen": less_one(pre_fc(layer(QWEN, gated_attention, experts(shared="shared_expert"), 1e-6), eps=1e-6)),
    "glm4_moe_lite": after(
        2, latent_attention, experts(**GROUPED, scale=1.8), "shared_head.norm", zero_first=True
    ),
    "deepseek_v32": after(
        2, indexed_attention(rotate), experts(**MIXED, scale=2.5), "shared_head.norm", 1e-6, zero_first=True
    ),
    "glm_moe_dsa": after(
        3, indexed_attention(rotate_pairs), experts(**MIXED, scale=2.5), "shared_head.norm", zero_first=True
    ),
    "hy_v3": after(
        2, rope_attention(), experts("router.gate", "expert_bias", "shared_mlp", 2.826), "final_layernorm"
    ),
    "bailing_hybrid": after(
        2, ling_attention, experts(bias="gate.expert_bias", scale=2.5), "final_layernorm", zero_first=True
    ),
    "ernie4_5_moe": module(
        "model.mtp_linear_proj.{}", "model.mtp_emb_norm.{}", "model.mtp_hidden_norm.{}", None,
        layer("model.mtp_block.{}", pairs_attention, mlp), zero_first=True,
    ),
    "exaone_moe": pre_fc(layer(QWEN, exaone_attention, mlp)),
    "mellum": pre_fc(layer(QWEN, rope_attention(WINDOW), experts(shared=""))),
    "mimo_v2": nextn(MIMO, layer(MIMO, sink_attention, mlp, second="pre_mlp_layernorm"), "final_layernorm"),
    "glm_ocr": nextn(
        GLM_V, sandwich(GLM_V, pairs_attention, merged_mlp), "shared_head.norm", zero_first=True
    ),
    "glm4v_moe": nextn(
        GLM_V, layer(GLM_V, half_rope_attention, experts(bias="gate.e_score_correction_bias")),
        "shared_head.norm", zero_first=True,
    ),
    "step3p7": less_one(after(3, step_attention, mlp, "transformer.shared_head.norm")),
    "exaone4_5": pre_fc(sandwich(QWEN, rope_attention(WINDOW), mlp, before=False)),
    "nemotron_h": module(
        "mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm", half_layers,
    ),
    "longcat_flash": module(
        f"{LONGCAT}.eh_proj", f"{LONGCAT}.enorm.m", f"{LONGCAT}.hnorm.m", "model.mtp.norm",
        layer(LONGCAT, scaled_latent_attention, lambda t, name, x: mlp(t, f"{LONGCAT}.transformer_layer.mlp", x)),
        own="model.mtp.embed_tokens.weight",
    ),
}  # fmt: skip
FORMULAS["mtp_qwen35"] = FORMULAS["mtp_qwen"]
