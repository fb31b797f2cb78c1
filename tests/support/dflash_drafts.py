"""DFlash drafts: their formulas, tiny trained drafts, and the best paths through their blocks."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import draft_checkpoints as drafts
import draft_formulas as formulas
import draft_rounds as rounds
import models
import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.dflash import DFlash, DFlashOptions
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.shared_draft import tapped_states
from spec_compile.kernels import ops

BLOCK, MASK, H = drafts.BLOCK, drafts.MASK, drafts.H


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
        name, positions = f"layers.{i}.self_attn", range(p, p + size)
        normed = formulas.rms(x, t[f"layers.{i}.input_layernorm.weight"])
        normed, behind = convolved(t, f"layers.{i}.attention_conv", normed)
        q = formulas.linear(t, f"{name}.q_proj", normed).reshape(size, -1, 2 * len(freqs))
        q = formulas.rms(q, t[f"{name}.q_norm.weight"])
        own_k, own_v = heads_of(t, name, normed, positions, freqs)
        k, v = np.concatenate([past_k, own_k]), np.concatenate([past_v, own_v])
        q = np.array([[formulas.rotate(head, p + j, freqs) for head in row] for j, row in enumerate(q)])
        seen = [[slot for slot in range(p + size) if sees(meaning, i, place, slot, p)] for place in positions]
        attended = formulas.attend(q, k, v, q.shape[2] ** -0.5, chosen=seen)
        x = x + behind(formulas.linear(t, f"{name}.o_proj", attended))
        normed = formulas.rms(x, t[f"layers.{i}.post_attention_layernorm.weight"])
        normed, behind = convolved(t, f"layers.{i}.mlp_conv", normed)
        x = x + behind(formulas.mlp(t, f"layers.{i}.mlp", normed))
    return formulas.rms(x, t["norm.weight"])


def sees(meaning, layer, place, slot, p):
    """Whether a place of a block behind p tokens sees a slot in a layer."""
    window, ends = meaning.windows[layer], meaning.ends  # ends: first and last tokens of the context
    return (
        (slot <= place or not meaning.causal[layer])
        and (window is None or abs(place - slot) < window)
        and (ends is None or slot < ends[0] or slot >= p - ends[1])
    )


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


def loader(folder):
    """A function: name of a flavour -> what was written, its draft, and what `our_logits` makes of it."""

    def read(written):
        draft = load_head(written.folder, written.target, "dflash")
        return draft, our_logits(draft)

    return drafts.loader(folder, read)


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


def difference(ours, right):
    return max(float(np.abs(a.numpy() - b).max() / np.abs(b).max()) for a, b in zip(ours, right))


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
    config = LlamaConfig(**models.GQA16, rms_norm_eps=1e-5)
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft = DFlashDraft(config, *shared, MEANING.taps, 5, MASK, LAYERS, causal=MEANING.causal)
    with torch.no_grad():
        features, _ = tapped_states(model, draft.taps, text)

    def loss():
        p = int(torch.randint(1, text.shape[1] - 5, ()))
        ids = torch.cat([text[:, p : p + 1], torch.full_like(text[:, :4], MASK)], dim=1)
        with mock.patch.object(ops, "attention", behind(draft, [f[:, :p] for f in features])):
            (logits,) = draft(ids, torch.arange(p, p + 5).expand(len(ids), -1))
        return F.cross_entropy(logits[:, 1:].flatten(0, 1), text[:, p + 1 : p + 5].flatten())

    return rounds.taught(draft, shared, steps, loss)


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
    return models.speculate_captured(rounds.target(name), "dflash", draft=trained(name), adaptive=False, **options)


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


MODES = {"graphs": dict(), "eager": dict(cuda_graphs=False, compile=False)}
