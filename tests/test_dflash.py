"""DFlash: blocks against their formulas, every published format, trees against all paths, and whole rounds against
plain decoding and against a draft without any cache."""

import copy
import dataclasses
import functools
import itertools
import operator
import re
from types import SimpleNamespace
from unittest import mock

import draft_checkpoints as drafts
import models
import numpy as np
import pytest
import test_draft_block as formulas
import test_draft_rounds as rounds
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_compile import speculate
from spec_compile.drafters.checkpoints.dflash import load_dflash, spread_layers
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.dflash import DFlash, DFlashOptions, accepted_of_own_text
from spec_compile.drafters.hidden_states import tapped_states
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.self_check import STRIDE
from spec_compile.drafters.trees.block import BlockTree
from spec_compile.kernels import ops

BLOCK, MASK, H = drafts.BLOCK, drafts.MASK, drafts.H


# --- the formulas


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a flavour's config means."""

    taps: tuple = (2, 4, 7)
    windows: tuple = (None, None)
    causal: tuple = (False, False)
    anchor: bool = False
    scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None
    ends: tuple | None = None


MEANINGS = {
    "dflash": Meaning(),
    "dflash_bin": Meaning(),
    "dflash_bias": Meaning(),
    "dflash_sliding": Meaning(windows=(7, None), causal=(True, False)),
    "dflash_bidirectional": Meaning(windows=(7, None)),
    "dflash_causal": Meaning(causal=(True, True)),
    "jetspec": Meaning(causal=(True, True)),
    "dflash_anchor": Meaning(anchor=True),
    "dflash_scaled": Meaning(scale=1.7, multiplier=0.6, softcap=2.0),
    "dflash_without_taps": Meaning(taps=(2, 6)),
    "dflash_mimo": Meaning(windows=(9, 9)),
    "dflash_deepspec": Meaning(taps=(0, 4, 7), anchor=True),
    "dflash_speculators": Meaning(),
    "dflash_speculators_shifted": Meaning(anchor=True),
    "dflash_speculators_kept": Meaning(windows=(None, 7), causal=(False, True)),
    "dflash_speculators_non_causal": Meaning(windows=(7, 7)),
}


def context(t, features, freqs, first=0):
    """Of each layer the keys and values [p, heads, d] of p tokens with states [p, h], at positions `first` onwards."""
    c = formulas.rms(formulas.linear(t, "fc", np.concatenate(features, 1)), t["hidden_norm.weight"])
    layers = sum(".q_norm." in name for name in t)
    return [heads_of(t, f"layers.{i}.self_attn", c, range(first, first + len(c)), freqs) for i in range(layers)]


def heads_of(t, name, x, positions, freqs):
    """Keys and values [T, heads, d] of a layer."""
    shape = len(x), len(t[f"{name}.k_proj.weight"]) // (2 * len(freqs)), 2 * len(freqs)
    k, v = (formulas.linear(t, f"{name}.{part}_proj", x).reshape(shape) for part in "kv")
    k = formulas.rms(k, t[f"{name}.k_norm.weight"])
    k = [[formulas.rotate(head, p, freqs) for head in row] for row, p in zip(k, positions)]
    return np.array(k).reshape(shape), v


def block_logits(t, embedding, output, features, root, size, meaning, **knobs):
    """Logits [size, Vd] of a block behind p tokens with states [p, h]: every sum and every product by itself."""
    return head_logits(block_states(t, embedding, features, root, size, meaning, **knobs), output, meaning)


def head_logits(normed, output, meaning):
    """Logits of the normed states of a block."""
    logits = normed @ np.asarray(output, dtype=np.float64).T * meaning.multiplier
    return logits if meaning.softcap is None else meaning.softcap * np.tanh(logits / meaning.softcap)


def block_states(t, embedding, features, root, size, meaning, mask=MASK, theta=20000.0, first=0):
    """The normed states [size, h] that the output matrix multiplies."""
    t, p = {n: np.asarray(v, dtype=np.float64) for n, v in t.items()}, len(features[0])
    features = [np.asarray(feature, dtype=np.float64) for feature in features]
    freqs = formulas.frequencies(theta)
    ids = [root] + [mask] * (size - 1)
    x = np.asarray(embedding, dtype=np.float64)[ids]
    if "mask_embedding" in t:
        x[np.array(ids) == mask] = t["mask_embedding"]
    x = x * meaning.scale
    for i, (past_k, past_v) in enumerate(context(t, features, freqs, first)):
        name, positions, window = f"layers.{i}.self_attn", range(p, p + size), meaning.windows[i]
        normed = formulas.rms(x, t[f"layers.{i}.input_layernorm.weight"])
        normed, behind = convolved(t, f"layers.{i}.attention_conv", normed)
        q = formulas.linear(t, f"{name}.q_proj", normed).reshape(size, -1, 2 * len(freqs))
        q = formulas.rms(q, t[f"{name}.q_norm.weight"])
        own_k, own_v = heads_of(t, name, normed, positions, freqs)
        k, v = np.concatenate([past_k, own_k]), np.concatenate([past_v, own_v])
        attended = np.zeros(q.shape)
        for j, h in itertools.product(range(size), range(q.shape[1])):
            seen = [s for s in range(p + size) if s < p or s <= p + j or not meaning.causal[i]]
            seen = [s for s in seen if window is None or abs(p + j - s) < window]
            if meaning.ends is not None:  # first and last tokens of the context
                seen = [s for s in seen if s < meaning.ends[0] or s >= p - meaning.ends[1]]
            turned, group = formulas.rotate(q[j, h], p + j, freqs), h // (q.shape[1] // k.shape[1])
            weights = np.exp([turned @ k[s, group] * (2 * len(freqs)) ** -0.5 for s in seen])
            attended[j, h] = weights @ v[seen, group] / weights.sum()
        x = x + behind(formulas.linear(t, f"{name}.o_proj", attended.reshape(size, -1)))
        normed = formulas.rms(x, t[f"layers.{i}.post_attention_layernorm.weight"])
        normed, behind = convolved(t, f"layers.{i}.mlp_conv", normed)
        x = x + behind(formulas.mlp(t, f"layers.{i}.mlp", normed))
    return formulas.rms(x, t["norm.weight"])


def convolved(t, name, x):
    """DFlash 2: x [T, h] convolved, and the function that convolves what was made of it; without one, x as it is."""
    if f"{name}.base_kernel" not in t:
        return x, lambda y: y
    base, computed = t[f"{name}.base_kernel"], formulas.linear(t, f"{name}.kernel_projection", x)
    taps, group = base.shape[1], 2 * base[0].size // computed.shape[1]

    def convolve(side, y):
        out = np.zeros_like(y)
        for slot, channel, tap in itertools.product(*map(range, y.shape), range(taps)):
            if tap <= slot:
                place = (side * taps + tap) * (y.shape[1] // group) + channel // group
                out[slot, channel] += (base[side, tap, channel] + computed[slot, place]) * y[slot - tap, channel]
        return out

    return convolve(0, x), functools.partial(convolve, 1)


# --- blocks


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: name of a flavour -> what was written, its draft, and what `our_logits` makes of it."""

    def read(written):
        draft = load_dflash(written.folder, written.target)
        return draft, our_logits(draft)

    return drafts.loader(tmp_path_factory.mktemp("dflash"), read)


CONTEXTS = (0, 1, 13)  # tokens of context of each row


def example(taps):
    generator = torch.Generator().manual_seed(3)
    features = [torch.randn(len(CONTEXTS), max(CONTEXTS), H, generator=generator) for _ in taps]
    return features, torch.tensor([5, MASK, 40])


@torch.no_grad()
def our_logits(draft, size=BLOCK, state=(), **options):
    """Logits [B, size, Vd] of a block behind each context, and the trees proposed: through cache and passes.

    state: what `propose` finds besides."""
    drafter = DFlash(draft, DFlashOptions(block_size=size, **options)).drafter(len(CONTEXTS), 64)
    logits, trees = [], []
    drafter.block.register_forward_hook(lambda module, arguments, out: logits.append(out[0]))
    features, root = example(draft.taps)
    for first, last in ((0, 9), (9, max(CONTEXTS))):  # in two chunks; beyond a row's context it is never seen
        chunk = [feature[:, first:last] for feature in features]
        drafter.prefill(SimpleNamespace(lengths=torch.full_like(root, first)), None, None, chunk, 64)
    propose = lambda *tree: trees.append(tree)  # noqa: E731
    state = dict(lengths=torch.tensor(CONTEXTS), tree_tokens=root[:, None], propose=propose, **dict(state))
    drafter.propose(SimpleNamespace(**state), 64)
    return logits[0], trees[0]


def right_logits(written, size=BLOCK, tensors=(), features=lambda features: features, meaning=(), **knobs):
    """The same by the formulas. tensors, features, meaning, knobs: what to change."""
    t = {**written.tensors, **{name: change(written.tensors[name]) for name, change in dict(tensors).items()}}
    embedding = written.target.get_input_embeddings().weight.detach()
    output = t["lm_head.weight"] if "d2t" in t else written.target.get_output_embeddings().weight.detach()
    meaning = dataclasses.replace(MEANINGS[written.folder.name], **dict(meaning))
    states, root = example(meaning.taps)
    return [
        block_logits(t, embedding, output, features([f[b, :p] for f in states]), int(root[b]), size, meaning, **knobs)
        for b, p in enumerate(CONTEXTS)
    ]


def difference(ours, right):
    return max(float(np.abs(a.numpy() - b).max() / np.abs(b).max()) for a, b in zip(ours, right))


@pytest.mark.sweep("dflash_sliding dflash_bias jetspec")
@pytest.mark.parametrize("name", drafts.DFLASH)
def test_blocks_are_their_formulas(load, name):
    written, draft, (logits, (tokens, parents, count, *_)) = load(name)
    meaning, right = MEANINGS[name], right_logits(written)
    assert (draft.taps, draft.sample_from_anchor, draft.causal) == (meaning.taps, meaning.anchor, meaning.causal)
    assert (draft.block_size, draft.mask_token_id) == (BLOCK, MASK)
    assert difference(logits, right) < 1e-5
    ids = drafts.draft_to_target().numpy() if name.endswith("kept") else np.arange(drafts.V)
    chosen = ids[np.stack(right).argmax(-1)][:, 0 if meaning.anchor else 1 :]
    assert tokens[:, 0].tolist() == [5, MASK, 40] and tokens[:, 1:].tolist() == chosen.tolist()
    assert parents.tolist() == [list(range(-1, chosen.shape[1]))] * 3 and count.tolist() == [tokens.shape[1]] * 3


def uneven(weight):
    return weight * torch.linspace(0.5, 1.5, weight.shape[-1])


KNOBS = {
    "mask": ("dflash", dict(mask=MASK - 1)),
    "theta": ("dflash", dict(theta=18000.0)),
    "positions of the context": ("dflash", dict(first=1)),
    "order of the context": ("dflash", dict(features=lambda features: [f.flip(0) for f in features])),
    "a token of the context": ("dflash", dict(features=lambda features: [f[1:] for f in features])),
    "order of taps": ("dflash", dict(features=lambda features: features[::-1])),
    "scale": ("dflash_scaled", dict(meaning=dict(scale=1.0))),
    "multiplier": ("dflash_scaled", dict(meaning=dict(multiplier=1.0))),
    "softcap": ("dflash_scaled", dict(meaning=dict(softcap=None))),
    "window": ("dflash_sliding", dict(meaning=dict(windows=(8, None)))),
    "which layers slide": ("dflash_sliding", dict(meaning=dict(windows=(None, 7)))),
    "causality": ("dflash_sliding", dict(meaning=dict(causal=(False, False)))),
    "which layers are causal": ("dflash_sliding", dict(meaning=dict(causal=(False, True)))),
    "mask embedding": ("dflash_mimo", dict(tensors={"mask_embedding": uneven})),
}  # fmt: skip
UNEVEN = [
    "fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight", "layers.1.mlp.up_proj.weight",
    *(f"layers.0.self_attn.{part}" for part in ("q_norm.weight", "q_proj.bias", "o_proj.bias")),
    *(f"layers.{i}.self_attn.{part}" for i in (0, 1) for part in ("k_norm.weight", "k_proj.bias", "v_proj.weight")),
]  # fmt: skip
KNOBS |= {name: ("dflash_bias", dict(tensors={name: uneven})) for name in UNEVEN}


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_matters(load, knob):
    name, changes = KNOBS[knob]
    written, _, (logits, _) = load(name)
    assert difference(logits, right_logits(written, **changes)) > 1e-3


@pytest.mark.parametrize(("name", "size"), [("dflash_sliding", 2), ("dflash_sliding", 5), ("dflash_deepspec", 3)])
def test_shorter_blocks(load, name, size):
    written, draft, _ = load(name)
    logits, (tokens, *_) = our_logits(draft, size)
    assert difference(logits, right_logits(written, size)) < 1e-5
    assert tokens.shape == (3, size + draft.sample_from_anchor)


def test_windows_shorter_than_a_block(tmp_path):
    """See less of it if they are causal, and are refused if not."""
    written = drafts.write("dflash_sliding", tmp_path / "dflash_sliding", sliding_window=3)
    logits, _ = our_logits(load_dflash(written.folder, written.target))
    assert difference(logits, right_logits(written, meaning=dict(windows=(3, None)))) < 1e-5
    written = drafts.write("dflash_bidirectional", tmp_path / "dflash_bidirectional", sliding_window=5)
    with pytest.raises(ValueError, match="its window of 5 is shorter than its blocks of 6"):
        load_dflash(written.folder, written.target)


@pytest.mark.parametrize(("name", "sinks", "size"), [("dflash", 2, 5), ("jetspec", 0, 4), ("dflash", 4, 1)])
def test_blocks_see_the_ends_of_the_context(load, name, sinks, size):
    written, draft, (whole, _) = load(name)
    logits, _ = our_logits(draft, draft_window_size=size, draft_sink_size=sinks)
    assert difference(logits, right_logits(written, meaning=dict(ends=(sinks, size)))) < 1e-5
    assert difference(logits, right_logits(written, meaning=dict(ends=(sinks, size + 1)))) > 1e-3
    assert difference(logits, right_logits(written, meaning=dict(ends=(sinks + 1, size)))) > 1e-3
    for enough in (dict(draft_window_size=13, draft_sink_size=0), dict(draft_window_size=9)):
        logits, _ = our_logits(draft, **enough)
        assert torch.allclose(logits, whole, atol=1e-5)


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
    return load_dflash(written.folder, target or written.target, **kwargs)


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
    assert len(ignored) == (2 if name == "dflash_deepspec" else 0)


def required(name):
    return name not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


@pytest.mark.parametrize("name", ["dflash_bias", "dflash_deepspec", "dflash_speculators_kept"])
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


def test_damaged_values_and_files(write):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"fc.weight .* holds NaN or infinity"):
            read(write("dflash", lambda tensors, value=value: tensors["fc.weight"].view(-1)[5:6].fill_(value)))
    with pytest.raises(ValueError, match=r"norm.weight in .* is torch.float8_e4m3fn; quantised"):
        change = lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].to(torch.float8_e4m3fn)})  # noqa: E731
        read(write("dflash", change))
    for name, file in (("dflash", "model.safetensors"), ("dflash_bin", "pytorch_model.bin")):
        written = write(name)
        content = (written.folder / file).read_bytes()
        (written.folder / file).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=f"{file} cannot be read"):
            read(written)
    (written.folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json"):
        read(written)


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
    inner = {"target_layer_ids": [1, 3, 6], "mask_token_id": MASK, **flags}
    for name, changes in (("dflash", dict(dflash_config=inner)), ("dflash", flags), ("dflash_speculators", flags)):
        written = write(name, **changes)
        with pytest.raises(ValueError, match=f"its config has {message}, a variant of DFlash that is not built here"):
            read(written)


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
    wide = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, hidden_size=128, num_hidden_layers=8))
    written = write("dflash")
    with pytest.raises(ValueError, match="hidden_size 64, LlamaForCausalLM has 128; take the head of this model"):
        read(written, wide)
    with pytest.raises(ValueError, match="made for a model of 8 layers, LlamaForCausalLM has 2"):
        read(written, models.ADMITTED["llama"]())
    with pytest.raises(ValueError, match=r"fc.weight reads 190 numbers, which is no multiple"):
        read(write("dflash", lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-2]})))
    with pytest.raises(ValueError, match="PhiForCausalLM has an output layer with a bias"):
        read(written, models.ADMITTED["phi"]())


def test_what_is_no_dflash_draft(write, tmp_path):
    for name in ("eagle", "eagle3", "eagle3_deepspec"):
        written = drafts.write(name, tmp_path / name)
        with pytest.raises(ValueError, match=r"holds no DFlash draft: .* or 'eagle3', whole models with"):
            read(written)
    for name in ("dflash", "dflash_deepspec", "dflash_speculators"):
        with pytest.raises(ValueError, match="use algo='dflash'"):
            load_head(write(name).folder, drafts.llama())
    with pytest.raises(TypeError, match="got NoneType"):
        load_dflash(None, drafts.llama())
    with pytest.raises(TypeError, match="got int"):
        load_dflash(3, drafts.llama())


def test_output_matrices(write):
    """A copy is shared, another one is the draft's own."""
    flipped = lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].flip(0)})  # noqa: E731
    written = write("dflash_deepspec", flipped)
    draft = read(written)
    assert torch.equal(draft.head_weight, written.tensors["lm_head.weight"]) and draft.draft_to_target is None
    assert "its own, 96 of 96 tokens" in draft.report[4]
    with pytest.raises(ValueError, match="40 rows, its config says draft_vocab_size 48"):
        read(write("dflash_speculators_kept", draft_vocab_size=48))
    with pytest.raises(ValueError, match=r"d2t .* token of its own below 96"):
        read(write("dflash_speculators_kept", lambda tensors: tensors["d2t"].add_(60)))
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
    assert load_dflash(draft, written.target) is draft
    with pytest.raises(TypeError, match="rope_theta: a draft that is already loaded"):
        load_dflash(draft, written.target, rope_theta=1e4)
    with pytest.raises(TypeError, match="got Embedding"):
        load_dflash(written.target.get_input_embeddings(), written.target)
    with pytest.raises(ValueError, match=r"in torch.float32, the model on cpu in torch.bfloat16"):
        load_dflash(draft, drafts.llama().to(torch.bfloat16))
    with pytest.raises(ValueError, match="vocab_size 96, LlamaForCausalLM has 80"):
        small = drafts.llama()
        small.resize_token_embeddings(80)
        load_dflash(draft, small)


@pytest.mark.parametrize("value", [0, -1e4, float("nan"), float("inf")])
def test_bases_of_rope_are_positive_and_finite(write, value):
    with pytest.raises(ValueError, match=f"rope_theta must be a positive, finite number, not {value}"):
        read(write("dflash"), rope_theta=value)


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
        "of 5 drafts are the target's own next tokens, on average",
    ):  # fmt: skip
        assert part in told
    runtime = fast.speculation.engine.runtime
    assert runtime.algorithm.plan.nodes == 6 and runtime.sizes == (6,)
    assert "1 layers see the block causally, 1 all of it" in runtime.algorithm.graph.log[-1].summary


def test_the_self_check_counts_what_would_be_accepted():
    algorithm, model, text = (
        fast("llama", "chain").speculation.engine.runtime.algorithm,
        rounds.target("llama"),
        texts("llama"),
    )
    right = []
    for row, p in itertools.product(range(4), range(text.shape[1] - 5, 1, -STRIDE)):
        drafted = logits_after(algorithm.draft, model, text[row, : p + 1].tolist(), 5)[1:].argmax(-1)
        right.append(np.cumprod(drafted == text[row, p + 1 : p + 5].numpy()).sum())
    with mock.patch("spec_compile.drafters.dflash.own_text", lambda model: text[:4]):
        assert accepted_of_own_text(model, algorithm) == (pytest.approx(np.mean(right)), 4)
    assert np.mean(right) > 0.5


# --- whole rounds

SCHEDULES = {
    "chain": dict(),
    "short": dict(block_size=3),
    "cut": dict(num_draft_tokens=3),
    "tree": dict(topk=3, num_draft_tokens=9),
    "union": dict(topk=3, num_draft_tokens=12, ngram=True),
}
LAYERS = LayerKnobs(2, qk_norm=True, windows=(8, None))
MEANING = Meaning(taps=(0, 1), windows=(8, None), causal=(True, False))


@functools.cache
def texts(name):
    """[32, 33]: what the target makes of three tokens."""
    starts = torch.randint(3, models.VOCAB, (32, 3), generator=torch.Generator().manual_seed(1))
    return rounds.generated(rounds.target(name), starts, 30)


@functools.cache
def trained(name):
    """A draft that was taught to go on with those texts."""
    model, text, steps = rounds.target(name), texts(name), 220 if name == "llama" else 80
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft = DFlashDraft(config, *shared, MEANING.taps, 5, MASK, LAYERS, causal=MEANING.causal)
    with torch.no_grad():
        features, _ = tapped_states(model, draft.taps, text)
    own = [p for p in draft.parameters() if p is not shared[0] and p is not shared[1]]
    optimizer = torch.optim.Adam(own, lr=5e-3)
    with torch.enable_grad():
        for _ in range(steps):
            p = int(torch.randint(1, text.shape[1] - 5, ()))
            ids = torch.cat([text[:, p : p + 1], torch.full_like(text[:, :4], MASK)], dim=1)
            with mock.patch.object(ops, "attention", behind(draft, [f[:, :p] for f in features])):
                (logits,) = draft(ids, torch.arange(p, p + 5).expand(len(ids), -1))
            loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), text[:, p + 1 : p + 5].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return draft.requires_grad_(False).eval()


def behind(draft, features):
    """Attention of a block behind a context, without masks: near enough to teach."""
    state, layers = draft.project(features), [block.self_attn for block in draft.blocks]
    angles = draft.rotary_emb(state, torch.arange(state.shape[1])[None])

    def attention(q, k, v, sinks, scale, window, softcap, layer):
        project = layers[layer]
        past = [part(state).unflatten(2, (-1, 16)) for part in (project.k_proj, project.v_proj)]
        keys, values = project.k_norm(past[0]).transpose(1, 2), past[1].transpose(1, 2)
        k = torch.cat([apply_rotary_pos_emb(keys, keys, *angles)[0], k], dim=2)
        v = torch.cat([values, v], dim=2)
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2)

    return attention


@functools.cache
def fast(name, schedule, compile=False):
    options = SCHEDULES[schedule] | dict(compile=compile, check=False, max_cache_len=200)
    return models.speculate_captured(rounds.target(name), "dflash", draft=trained(name), **options)


@torch.no_grad()
def logits_after(draft, model, text, size):
    """Logits [size, V] of the block behind a text by the formulas, without any cache."""
    features, _ = tapped_states(model, draft.taps, torch.tensor([text]))
    t = {n.replace("blocks.", "layers."): value for n, value in draft.state_dict().items()}
    shared = draft.embedding.detach(), draft.head_weight.detach()
    return block_logits(t, *shared, [f[0, :-1] for f in features], text[-1], size, MEANING, theta=10000.0)


def best_paths(logits, topk, count):
    """[(score, tokens)] of the best paths over the likeliest tokens of each place, by trying all."""
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    likeliest = [list(zip(*(x.tolist() for x in row.topk(topk)))) for row in logprobs]
    paths = [(0.0, ())]
    for depth, place in enumerate(likeliest):
        before = [found for found in paths if len(found[1]) == depth]
        paths += [(s + t, (*path, i)) for s, path in before for t, i in place]
    return sorted(paths[1:], reverse=True)[:count]


def paths_of(tokens, parents):
    """The tokens on the way to each node below the root."""
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.sweep("tree cut")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_a_draft_without_a_cache(schedule):
    system, options, draft = fast("llama", schedule), SCHEDULES[schedule], trained("llama")
    engine, stats = system.speculation.engine, system.speculation.stats
    run, checked, is_joined = engine.run, 0, schedule == "union"
    nodes, size = engine.runtime.algorithm.plan.nodes, options.get("block_size", 5)

    def watched(request):
        nonlocal checked
        session, given = engine.session(len(request.prompts)), []
        state, drafter = session.state, session.drafter.head if is_joined else session.drafter
        hook = drafter.block.register_forward_hook(lambda module, arguments, out: given.append(out[0]))
        for gained in run(request):
            for row, length in enumerate(state.lengths.tolist()):
                if not state.finished[row]:
                    text = state.tokens[row, : length + 1].tolist()
                    logits = logits_after(draft, rounds.target("llama"), text, size)
                    assert difference([given[-1][row]], [logits]) < 1e-4
                    logits = logits[1:]
                    trees = state.tree_tokens, state.tree_parents
                    if is_joined:  # what the draft has proposed
                        trees = session.drafter.drafts_tokens, session.drafter.drafts_above
                    tree = tuple(column[row, :nodes].tolist() for column in trees)
                    if "topk" in options:
                        right = [path for _, path in best_paths(logits, options["topk"], nodes - 1)]
                        assert tree[0][0] == text[-1] and sorted(paths_of(*tree)) == sorted(right)
                    else:
                        assert tree[0] == [text[-1], *logits.argmax(-1)[: nodes - 1].tolist()]
                        assert tree[1] == list(range(-1, nodes - 1))
                    checked += 1
            yield gained
        hook.remove()

    engine.run = watched
    try:
        stats.reset()
        ids = texts("llama")[:3, :10]
        rounds.generated(system, ids[:1])
        rounds.generated(system, ids, attention_mask=(torch.arange(10) >= torch.tensor([[0], [4], [8]])).long())
        accept_length = stats.accept_length
        rounds.generated(system, rounds.prompts(1, 117), 14)  # across the step by which the part looked at grows
    finally:
        del engine.run
    assert checked > 30
    assert accept_length > 1.1


@pytest.mark.sweep("llama-chain llama-tree mixtral-tree")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama", "chain"), ("llama", "tree"), ("llama", "union"), ("mixtral", "tree"), ("deepseek_v3", "chain"),
        ("qwen3", "chain"),
    ],
)  # fmt: skip
def test_tokens_are_plain_decodings(name, schedule):
    system, stats = fast(name, schedule), fast(name, schedule).speculation.stats
    for batch in (1, 4):
        stats.reset()
        ids = texts(name)[:batch, :8]
        assert torch.equal(rounds.generated(system, ids), rounds.generated(rounds.target(name), ids))
        assert stats.accept_length > 1.1
    assert torch.equal(rounds.generated(system, rounds.prompts(4)), rounds.plain(name, 4))  # texts it was not taught


@pytest.mark.slow
def test_compiled_rounds_draft_the_same():
    runs = []
    for compile in (False, True):
        system = fast("llama", "tree", compile)
        runs.append((rounds.generated(system, texts("llama")[:3, :8]).tolist(), system.speculation.stats.trace))
    assert runs[0] == runs[1]


def test_a_prompt_of_one_token():
    for schedule in ("chain", "tree"):
        ids = torch.tensor([[5]])
        assert torch.equal(
            rounds.generated(fast("llama", schedule), ids, 12), rounds.generated(rounds.target("llama"), ids, 12)
        )


def test_a_conversation_goes_on_from_its_cache():
    """With what the draft has seen itself, after another conversation, and from a cache made elsewhere."""
    system, ids = fast("llama", "chain"), texts("llama")[:1, :8]

    def turn(ids, model=system, **more):
        system.speculation.stats.reset()
        more |= dict(attention_mask=torch.ones_like(ids), return_dict_in_generate=True, use_cache=True)
        answer = rounds.generated(model, ids, **more)
        return answer, system.speculation.stats.trace

    first = turn(ids)[0].sequences
    second = torch.cat([first, rounds.prompts(1, 9)], dim=1)
    want, trace = turn(second)
    for between in (None, rounds.prompts(1, 31)):
        cache = copy.deepcopy(turn(ids)[0].past_key_values)
        if between is not None:
            turn(between)
        got, again = turn(second, past_key_values=cache)
        assert torch.equal(got.sequences, want.sequences) and again == trace
    foreign = turn(ids, rounds.target("llama"))[0].past_key_values
    got, again = turn(second, past_key_values=foreign)
    assert torch.equal(got.sequences, want.sequences) and again == trace


def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """Leviathan et al. 2023, section 3.2: the chance is the sum of the lesser probabilities."""
    model, draft, rows = rounds.target("llama"), trained("llama"), 1000
    options = dict(block_size=2, draft_sample_method="probabilistic", compile=False, max_cache_len=40)
    system = speculate(model, "dflash", draft=draft, **options)
    ids = texts("llama")[:1, :12]
    with torch.no_grad():
        p = (model(ids).logits[0, -1] / 1.5).double().softmax(-1)
    q = torch.from_numpy(logits_after(draft, model, ids[0].tolist(), 2)[1] / 1.5).softmax(-1)
    chance = torch.minimum(p, q).sum().item()
    rounds.generated(system, ids, 2, do_sample=True, temperature=1.5, top_k=0, num_return_sequences=rows)
    accepted = sum(gained == 2 for gained in system.speculation.stats.trace[0])
    assert 0.1 < chance < 0.9
    assert abs(accepted - rows * chance) < 4 * (rows * chance * (1 - chance)) ** 0.5


# --- trees


def exhaustive(scores, tokens, count):
    """[(score, tokens)] of the `count` best paths, in float32 and from the front."""
    paths = [(np.float32(0), ())]
    for place in range(len(scores)):
        before = [found for found in paths if len(found[1]) == place]
        likeliest = list(zip(scores[place], tokens[place]))
        paths += [(np.float32(s + t), (*path, i)) for s, path in before for t, i in likeliest]
    return sorted(paths[1:], key=lambda found: -found[0])[:count]


@given(st.integers(1, 5), st.integers(2, 4), st.integers(2, 40), st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=60)
def test_trees_are_the_best_of_all_paths(places, topk, nodes, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.rand(2, places, topk, generator=generator) * 3
    if ties:
        scores = scores.round()  # and so with many equal ones, zeros too
    if seed % 5 == 0:
        scores[:, :, -1] = -torch.inf
    scores = scores.sort(dim=2, descending=True).values
    tokens = torch.stack([torch.randperm(90, generator=generator)[: places * topk] for _ in range(2)])
    tokens, root = tokens.view(2, places, topk), torch.tensor([94, 95])
    available = sum(topk**depth for depth in range(1, places + 1))
    if nodes > available + 1:
        with pytest.raises(ValueError, match=f"num_draft_tokens must be at most {available + 1}"):
            BlockTree(places, topk, nodes)
        return
    got = BlockTree(places, topk, nodes)(root, scores, tokens)
    assert [x.shape for x in got] == [(2, nodes)] * 3 and [x.dtype for x in got] == [torch.int64] * 2 + [torch.float32]
    for row in range(2):
        ids, parents, totals = (x[row].tolist() for x in got)
        paths, every = paths_of(ids, parents), exhaustive(scores[row].numpy(), tokens[row].tolist(), 1 << 20)
        assert (ids[0], parents[0], totals[0]) == (94 + row, -1, 0)
        assert all(parent < node for node, parent in enumerate(parents))  # parents first
        assert len(set(paths)) == nodes - 1  # siblings differ
        assert totals == sorted(totals, reverse=True)  # so that its first n nodes are the tree of n nodes
        assert [dict((path, s) for s, path in every)[path] for path in paths] == totals[1:]
        assert totals[1:] == [s for s, _ in every[: nodes - 1]]


def test_large_trees():
    """64 nodes over as many places as there are."""
    scores = torch.randn(1, 15, 16).log_softmax(-1).sort(dim=2, descending=True).values
    tokens, parents, totals = BlockTree(15, 16, 64)(torch.tensor([3]), scores, torch.arange(240).view(1, 15, 16))
    assert len(set(paths_of(tokens[0].tolist(), parents[0].tolist()))) == 63 and bool(totals.isfinite().all())
    assert BlockTree(63, 2, 64).ranks.shape[0] == 63


# --- on a GPU

MODES = {"graphs": dict(), "eager": dict(cuda_graphs=False, compile=False)}


@functools.cache
def gpu_target():
    return copy.deepcopy(rounds.target("llama")).to("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_and_tokens_are_the_cpus(schedule, mode):
    target, draft = gpu_target(), copy.deepcopy(trained("llama")).to("cuda")
    draft.embedding, draft.head_weight = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    system = speculate(target, "dflash", draft=draft, max_cache_len=200, **SCHEDULES[schedule], **MODES[mode])
    for batch in (1, 3):
        ids, traces = texts("llama")[:batch, :8], []
        for one in (system, fast("llama", schedule)):
            answer = rounds.generated(one, ids.to(one.device)).cpu()
            assert torch.equal(answer, rounds.generated(rounds.target("llama"), ids))
            traces.append(one.speculation.stats.trace)
        assert traces[0] == traces[1] or schedule == "union"  # the stores of a GPU and of a CPU learn at other times
