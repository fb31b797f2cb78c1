"""DFlash: blocks against their formulas, every published format, trees against all paths, and whole rounds against
plain decoding and against a draft without any cache."""

import copy
import dataclasses
import functools
import itertools
import json
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
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_compile import speculate
from spec_compile.drafters.checkpoints import load_head
from spec_compile.drafters.dflash import DFlash, DFlashOptions
from spec_compile.drafters.dflash_block import Context, DFlashDraft
from spec_compile.drafters.dflash_checkpoints import load_dflash
from spec_compile.drafters.dflash_tree import BlockTree
from spec_compile.drafters.draft_block import LayerKnobs
from spec_compile.drafters.self_check import states
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


MEANINGS = {
    "dflash": Meaning(),
    "dflash_bin": Meaning(),
    "dflash_bias": Meaning(),
    "dflash_sliding": Meaning(windows=(7, None), causal=(True, False)),
    "dflash_bidirectional": Meaning(windows=(7, None)),
    "dflash_causal": Meaning(causal=(True, True)),
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


def block_logits(t, embedding, output, features, root, size, meaning, mask=MASK, theta=20000.0, first=0):
    """Logits [size, Vd] of a block behind p tokens with states [p, h]: every sum and every product by itself."""
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
        q = formulas.linear(t, f"{name}.q_proj", normed).reshape(size, -1, 2 * len(freqs))
        q = formulas.rms(q, t[f"{name}.q_norm.weight"])
        own_k, own_v = heads_of(t, name, normed, positions, freqs)
        k, v = np.concatenate([past_k, own_k]), np.concatenate([past_v, own_v])
        attended = np.zeros(q.shape)
        for j, h in itertools.product(range(size), range(q.shape[1])):
            seen = [s for s in range(p + size) if s < p or s <= p + j or not meaning.causal[i]]
            seen = [s for s in seen if window is None or abs(p + j - s) < window]
            turned, group = formulas.rotate(q[j, h], p + j, freqs), h // (q.shape[1] // k.shape[1])
            weights = np.exp([turned @ k[s, group] * (2 * len(freqs)) ** -0.5 for s in seen])
            attended[j, h] = weights @ v[seen, group] / weights.sum()
        x = x + formulas.linear(t, f"{name}.o_proj", attended.reshape(size, -1))
        x = x + formulas.mlp(t, f"layers.{i}.mlp", formulas.rms(x, t[f"layers.{i}.post_attention_layernorm.weight"]))
    logits = formulas.rms(x, t["norm.weight"]) @ np.asarray(output, dtype=np.float64).T * meaning.multiplier
    return logits if meaning.softcap is None else meaning.softcap * np.tanh(logits / meaning.softcap)


# --- blocks


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: name of a flavour -> what was written, its draft, and what `our_logits` makes of it."""
    place = tmp_path_factory.mktemp("dflash")

    @functools.cache
    def load(name):
        written = drafts.write(name, place / name)
        draft = load_dflash(written.folder, written.target)
        return written, draft, our_logits(draft)

    return load


CONTEXTS = (0, 1, 13)  # tokens of context of each row


def example(taps):
    generator = torch.Generator().manual_seed(3)
    features = [torch.randn(len(CONTEXTS), max(CONTEXTS), H, generator=generator) for _ in taps]
    return features, torch.tensor([5, MASK, 40])


@torch.no_grad()
def our_logits(draft, size=BLOCK):
    """Logits [B, size, Vd] of a block behind each context, and the trees proposed: through cache and passes."""
    drafter = DFlash(draft, DFlashOptions(block_size=size)).drafter(len(CONTEXTS), 64)
    logits, trees = [], []
    drafter.block.register_forward_hook(lambda module, arguments, out: logits.append(out[0]))
    features, root = example(draft.taps)
    for first, last in ((0, 9), (9, max(CONTEXTS))):  # in two chunks; beyond a row's context it is never seen
        chunk = [feature[:, first:last] for feature in features]
        drafter.prefill(SimpleNamespace(lengths=torch.full_like(root, first)), None, None, chunk, 64)
    propose = lambda *tree: trees.append(tree)  # noqa: E731
    drafter.propose(SimpleNamespace(lengths=torch.tensor(CONTEXTS), tree_tokens=root[:, None], propose=propose), 64)
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


@pytest.mark.parametrize("name", drafts.DFLASH)
def test_blocks_are_their_formulas(load, name):
    written, draft, (logits, (tokens, parents, count, _)) = load(name)
    meaning, right = MEANINGS[name], right_logits(written)
    assert (draft.taps, draft.sample_from_anchor, draft.causal) == (meaning.taps, meaning.anchor, meaning.causal)
    assert (draft.block_size, draft.mask_token_id) == (BLOCK, MASK)
    assert difference(logits, right) < 1e-5
    ids = drafts.hot_ids().numpy() if name.endswith("kept") else np.arange(drafts.V)
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
    **{
        name: ("dflash_bias", dict(tensors={name: uneven}))
        for name in (
            "fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.input_layernorm.weight",
            "layers.0.post_attention_layernorm.weight", "layers.0.self_attn.q_norm.weight", "layers.1.mlp.up_proj.weight",
            *(f"layers.{i}.self_attn.{part}" for i in (0, 1) for part in ("k_norm.weight", "k_proj.bias", "v_proj.weight")),
            "layers.0.self_attn.q_proj.bias", "layers.0.self_attn.o_proj.bias",
        )
    },
}  # fmt: skip


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


# --- whole rounds

SCHEDULES = {
    "chain": dict(),
    "short": dict(block_size=3),
    "cut": dict(num_draft_tokens=3),
    "tree": dict(topk=3, num_draft_tokens=9),
}
LAYERS = LayerKnobs(2, qk_norm=True, windows=(8, None))
MEANING = Meaning(taps=(0, 1), windows=(8, None), causal=(True, False))


@functools.cache
def texts(name):
    """[32, 33]: what the target makes of three tokens."""
    starts = torch.randint(3, models.VOCAB, (32, 3), generator=torch.Generator().manual_seed(1))
    return rounds.generated(rounds.target(name), starts, 30)


@functools.cache
def trained(name, steps=250):
    """A draft that was taught to go on with those texts."""
    model, text = rounds.target(name), texts(name)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft = DFlashDraft(config, *shared, MEANING.taps, 5, MASK, LAYERS, causal=MEANING.causal)
    with torch.no_grad():
        features, _ = states(model, draft.taps, text)
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
    options = SCHEDULES[schedule]
    return speculate(rounds.target(name), "dflash", draft=trained(name), compile=compile, max_cache_len=200, **options)


@torch.no_grad()
def logits_after(draft, model, text, size):
    """Logits [size, V] of the block behind a text by the formulas, without any cache."""
    features, _ = states(model, draft.taps, torch.tensor([text]))
    t = {n.replace("blocks.", "layers."): value for n, value in draft.state_dict().items()}
    shared = draft.embedding.detach(), draft.head_weight.detach()
    return block_logits(t, *shared, [f[0, :-1] for f in features], text[-1], size, MEANING, theta=10000.0)


def best_paths(logits, topk, count):
    """[(score, tokens)] of the best paths over the likeliest tokens of each place, by trying all."""
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    likeliest = [list(zip(*(x.tolist() for x in row.topk(topk)))) for row in logprobs]
    paths = [(0.0, ())]
    for place in likeliest:
        paths += [(s + t, (*path, i)) for s, path in paths if len(path) == len(paths[-1][1]) for t, i in place]
    return sorted(paths[1:], reverse=True)[:count]


def paths_of(tokens, parents):
    """The tokens on the way to each node below the root."""
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_a_draft_without_a_cache(schedule):
    system, options = fast("llama", schedule), SCHEDULES[schedule]
    engine, stats, draft, model = system.speculation._engine, system.speculation.stats, trained("llama"), fast("llama", schedule)
    run, checked = engine.run, 0
    nodes, size = engine.options.num_draft_tokens, options.get("block_size", 5)

    def watched(request):
        nonlocal checked
        state = engine.session(len(request.prompts)).state
        for gained in run(request):
            for row, length in enumerate(state.lengths.tolist()):
                if not state.finished[row]:
                    text = state.tokens[row, : length + 1].tolist()
                    logits = logits_after(draft, rounds.target("llama"), text, size)[1:]
                    tree = state.tree_tokens[row, :nodes].tolist(), state.tree_parents[row, :nodes].tolist()
                    if "topk" in options:
                        right = [path for _, path in best_paths(logits, options["topk"], nodes - 1)]
                        assert tree[0][0] == text[-1] and sorted(paths_of(*tree)) == sorted(right)
                    else:
                        assert tree[0] == [text[-1], *logits.argmax(-1)[: nodes - 1].tolist()]
                        assert tree[1] == list(range(-1, nodes - 1))
                    checked += 1
            yield gained

    engine.run = watched
    try:
        stats.reset()
        ids = texts("llama")[:3, :10]
        rounds.generated(system, ids[:1])
        rounds.generated(system, ids, attention_mask=(torch.arange(10) >= torch.tensor([[0], [4], [8]])).long())
    finally:
        del engine.run
    assert checked > 20
    assert stats.accept_length > 1.3


@pytest.mark.parametrize("name", rounds.TARGETS)
@pytest.mark.parametrize("schedule", ["chain", "tree"])
def test_tokens_are_plain_decodings(name, schedule):
    system, stats = fast(name, schedule), fast(name, schedule).speculation.stats
    for batch in (1, 4):
        stats.reset()
        ids = texts(name)[:batch, :8]
        assert torch.equal(rounds.generated(system, ids), rounds.generated(rounds.target(name), ids))
        assert stats.accept_length > 1.3
    assert torch.equal(rounds.generated(system, rounds.prompts(4)), rounds.plain(name, 4))  # texts it was not taught


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
        answer = rounds.generated(model, ids, return_dict_in_generate=True, use_cache=True, **more)
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


def test_a_prompt_given_as_embeddings():
    """The draft knows nothing of such a prompt; the answer is the same."""
    model, ids = rounds.target("llama"), texts("llama")[:2, :8]
    embeds = model.get_input_embeddings()(ids).detach()
    for schedule in ("chain", "tree"):
        answers = [
            system.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            for system in (fast("llama", schedule), model)
        ]
        assert torch.equal(*answers)


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
    for place, row in enumerate(scores):
        paths += [
            (np.float32(s + t), (*path, i)) for s, path in paths if len(path) == place for t, i in zip(row, tokens[place])
        ]
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
