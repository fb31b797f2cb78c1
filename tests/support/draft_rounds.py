"""Targets with drafts of every algorithm, and what a draft drafts without a cache."""

import copy
import functools
from functools import partial
from unittest import mock

import models
import torch
from batch_requests import collect, running
from transformers import LlamaConfig

from spec_compile.compat import CACHE
from spec_compile.drafters.modules.eagle import Eagle3Head, EagleHead
from spec_compile.drafters.modules.layers import ONE_LAYER, LatentSizes, LayerKnobs
from spec_compile.drafters.modules.mtp import MtpHead, block_config
from spec_compile.drafters.trees.grow import grow
from spec_compile.kernels import ops
from spec_compile.passes.outputs import FINAL

TARGETS = ("llama", "qwen3", "mixtral", "deepseek_v3")
SCHEDULES = {
    "chain": dict(num_steps=3),
    "one": dict(num_steps=1),
    "tree": dict(num_steps=3, topk=3, num_draft_tokens=8),
    "cut": dict(num_steps=4, topk=2, num_draft_tokens=4),
    "static": dict(tree_choices="eagle1"),
    "union": dict(num_steps=3, topk=3, num_draft_tokens=12, ngram=True),
    "chain union": dict(num_steps=3, num_draft_tokens=8, ngram=dict(match_type="PROB")),
    "hot": dict(num_steps=3, topk=2, num_draft_tokens=8, token_map=[*range(90, 20, -1), 90]),
}
NEW = 24
TAPS = (1, 0, FINAL)
STEPS = 80
LATENT = LayerKnobs(latent=LatentSizes(24, 20, 16, 8, 12, scale=24**-0.5))


@functools.cache
def target(name):
    """A model whose layers change little: the token before nearly decides the next."""
    model = models.ADMITTED[name]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.1
            for parameter in layer.mlp.parameters():
                parameter *= 0.5
    return model


def differentiable(q, k, v, sinks, scale, window, softcap, layer, chosen=None):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)


@functools.cache
def head(kind, name):
    """A head that was taught for a moment to say what the target says on random text.

    kind: "eagle3_mla" is EAGLE-3 with multi-head latent attention.
    """
    model, layer = target(name), LATENT if kind == "eagle3_mla" else ONE_LAYER
    torch.manual_seed(1)
    config = LlamaConfig(**dict(models.GQA, head_dim=8 if kind == "eagle3_mla" else 16))
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if kind == "mtp":
        made = MtpHead(model.get_decoder(), block_config(model.config, sparse=False), embedding, output)
        for parameter in made.parameters():
            if parameter.dim() > 1 and parameter is not embedding and parameter is not output:
                torch.nn.init.normal_(parameter, std=0.1)
    else:
        make = EagleHead if kind == "eagle" else partial(Eagle3Head, taps=TAPS, feature_size=64)
        made = make(config, embedding, head_weight=output, layer=layer)

    def loss():
        ids = torch.randint(3, models.VOCAB, (16, 24))
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        states = [out.hidden_states[-1 if tap == FINAL else tap][:, :-1] for tap in made.taps]
        _, normed = made(ids[:, 1:], torch.arange(23).expand(16, -1), made.project(states))
        wanted = out.logits[:, 1:].argmax(-1)
        return torch.nn.functional.cross_entropy((normed @ output.T).flatten(0, 1), wanted.flatten())

    with mock.patch.object(ops, "attention", differentiable):
        return taught(made, (embedding, output), STEPS, loss)


def taught(draft, shared, steps, loss):
    """A draft whose parameters, but those that it shares, have learned for a moment."""
    own = [p for p in draft.parameters() if not any(p is each for each in shared)]
    optimizer = torch.optim.Adam(own, lr=5e-3)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    return draft.requires_grad_(False).eval()


@functools.cache
def fast(algorithm, name, schedule, compile=False):
    draft = draft_of(algorithm, name)
    options = SCHEDULES[schedule] | dict(draft=draft, compile=compile, check=schedule == "chain", max_cache_len=200)
    options["adaptive"] = False  # every round drafts, whatever that costs
    return models.speculate_captured(target(name), algorithm.removesuffix("_mla"), **options)


@functools.cache
def draft_model(name):
    return models.ADMITTED[name]()


def draft_of(algorithm, name):
    if algorithm == "draft_model":
        return draft_model(name)
    return head("eagle" if algorithm == "naive_eagle" else algorithm, name)


def prompts(batch, length=23):
    return torch.randint(3, models.VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch))


def generated(system, ids, new=NEW, **options):
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | options
    return system.generate(ids, max_new_tokens=new, **options)


def followed(system, ids, look, new=NEW, **options):
    """Generate; after each round that has proposed trees, `look` gets the session, each unfinished row and its text.
    Returns the answer and the number of looks."""
    engine, count = system.speculation.engine, 0
    run = engine.run

    def rounds_seen(call):
        nonlocal count
        session = engine.session(len(call.prompts))
        for gained in run(call):
            for row, length in enumerate(session.state.lengths.tolist()):
                if session.state.tree_count[row] > 1 and not session.state.finished[row]:
                    look(session, row, session.state.tokens[row, : length + 1].tolist())
                    count += 1
            yield gained

    engine.run = rounds_seen
    try:
        return generated(system, ids, new, **options), count
    finally:
        del engine.run


def tree_of(session, row, nodes=None, is_joined=False):
    """Tokens and parents of the first nodes of a row's tree (None: all). is_joined: of the tree that the draft has
    proposed to a union, in which the root is its own parent."""
    state, drafter = session.state, session.drafter
    pair = (drafter.drafts_tokens, drafter.drafts_above) if is_joined else (state.tree_tokens, state.tree_parents)
    return tuple(each[row, : int(state.tree_count[row]) if nodes is None else nodes].tolist() for each in pair)


def watched(system, ids, look, **options):
    """Generate; `look` gets the text of each unfinished row and the tokens and parents proposed after it."""
    return followed(system, ids, lambda session, row, text: look(text, *tree_of(session, row)), **options)[0]


def same_when_compiled(make, ids, new=NEW):
    """Assert that ``make(compile)`` answers and drafts the same if it compiles rounds; the answer."""
    runs = []
    for compile in (False, True):
        system = make(compile)
        system.speculation.stats.reset()
        runs.append((generated(system, ids, new).tolist(), system.speculation.stats.trace))
    assert runs[0] == runs[1]
    return torch.tensor(runs[0][0])


def goes_on_from_a_cache(system, model, ids):
    """Assert that a conversation has the same answer and the same drafts as without any cache: from the cache of what
    the draft has seen itself, after another conversation, and from a cache made elsewhere, by `model`."""
    stats = system.speculation.stats

    def turn(ids, system=system, **more):
        stats.reset()
        more |= dict(attention_mask=torch.ones_like(ids), return_dict_in_generate=True, use_cache=True)
        return generated(system, ids, **more), stats.trace

    second = torch.cat([turn(ids)[0].sequences, prompts(1, 9)], dim=1)
    want, trace = turn(second)
    for between in (None, prompts(1, 31), model):
        cache = turn(ids, model)[0][CACHE] if between is model else copy.deepcopy(turn(ids)[0][CACHE])
        if isinstance(between, torch.Tensor):
            turn(between)
        got, again = turn(second, **{CACHE: cache})
        assert torch.equal(got.sequences, want.sequences) and again == trace


def check_requests(system, count, slots):
    """Requests for `count` prompts, each made twice, get the answers of plain decoding. slots: rows of the manager."""
    with running(system, max_requests_per_batch=slots) as manager:
        for prompt in prompts(count).tolist() * 2:
            manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
        outputs = collect(manager, 2 * count)
    answers = {tuple(output.prompt_ids + output.generated_tokens) for output in outputs.values()}
    assert answers == {tuple(row) for row in plain("llama", count).tolist()}


@functools.cache
def plain(name, batch):
    return generated(target(name), prompts(batch))


def drafted(algorithm, draft, model, schedule, text):
    """What follows `text`, each node by running the draft over all that lies before it."""
    ids = torch.tensor([text])
    if algorithm == "draft_model":

        def output(path):
            logits = draft(torch.cat([ids, torch.tensor([path], dtype=torch.int64)], dim=1)).logits[0, -1]
            return logits[:1], logits
    else:
        states = model(ids, output_hidden_states=True).hidden_states
        tapped = [states[-1 if tap == FINAL else tap][:, :-1] for tap in draft.taps]

        def output(path):
            state, tokens = draft.project(tapped), ids[:, 1:]
            for token in [*path, None]:
                recycled, normed = draft(tokens, torch.arange(tokens.shape[1])[None], state)
                if token is not None:
                    tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
                    state = torch.cat([state, recycled[:, -1:]], dim=1)
            return recycled[0, -1], normed[0, -1] @ draft.head_weight.T

    return grown(schedule, ids, output, getattr(draft, "draft_to_target", None))


def grown(schedule, ids, output, draft_to_target=None):
    """Tokens and parents [1, N] of the tree after ids [1, T]. output: the tokens on the way from the root to a node ->
    its state [h], and the logits of what follows."""
    fed, is_chain, output = [], getattr(schedule, "topk", 0) == 1, functools.cache(output)

    def step(tokens, hidden, ancestors, depth, offset, wanted):
        del fed[offset if is_chain else 0 :]
        fed.extend(tokens[0].tolist())
        seen = (
            [range(len(fed))] if is_chain else [[j for j in range(len(fed)) if int(a) >> j & 1] for a in ancestors[0]]
        )
        states, logits = zip(*(output(tuple(fed[j] for j in path)) for path in seen))
        return torch.stack(states)[None], torch.stack(logits[-wanted:])[None]

    hidden, logits = output(())
    return grow(schedule, ids[:, -1], logits[None], hidden[None], step, draft_to_target)[:2]
