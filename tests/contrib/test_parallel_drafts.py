"""P-EAGLE and PARD, which draft all tokens of a chain in one forward: against the formulas, against a draft without any
cache, and whole rounds against transformers' own decoding."""

import copy
import functools
import re
from types import SimpleNamespace

import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_formulas as formulas
import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from torch import nn

from spec_compile.contrib.parallel import ParallelHeadOptions, ParallelHeads, ParallelOptions
from spec_compile.drafters.checkpoints.load import load_head

PARDS_MASK = 95
SCHEDULES = {
    "chain": dict(num_steps=4),
    "one": dict(num_steps=1),
    "cut": dict(num_steps=4, num_draft_tokens=3),
    "tree": dict(num_steps=4, topk=3, num_draft_tokens=12),
}
LENGTH, DRAFTS = 12, 5


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: name of a flavour of P-EAGLE -> what was written, and its head."""
    return drafts.loader(
        tmp_path_factory.mktemp("p_eagle"), lambda written: (load_head(written.folder, written.target, "p_eagle"),)
    )


# --- P-EAGLE

FORMS = {
    "p_eagle": dict(freqs=formulas.frequencies(1e6), further=("layers.1", "input_layernorm")),
    "p_eagle_speculators": dict(
        prefix="layers.0", freqs=formulas.frequencies(5e5), normed_residual=True, own=True
    ),
}  # fmt: skip


@torch.no_grad()
def our_logits(head, ids, features):
    """Logits [B, DRAFTS, Vd] below a prompt, through cache and passes."""
    drafter = ParallelHeads(head, ParallelHeadOptions(num_steps=DRAFTS)).drafter(len(ids), 64)
    given, zeros = [], torch.zeros_like(ids[:, 0])
    drafter.proposer.propose = lambda state, logits, first, draft_to_target: given.append(logits)
    state = SimpleNamespace(tokens=ids, capacity=LENGTH, prompt_lengths=zeros + LENGTH, lengths=zeros)
    drafter.prefill(state, ids, torch.arange(LENGTH).expand(len(ids), -1), features, 64)
    state.lengths = zeros + LENGTH - 1
    drafter.propose(state, 64)
    return given[0]


@pytest.mark.parametrize("name", FORMS)
def test_masks_are_their_formulas(load, name):
    """A mask reads its own embedding and state, the context and the masks before it."""
    written, head = load(name)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, drafts.V, (2, LENGTH), generator=generator)
    features = [torch.randn(2, LENGTH, drafts.H, generator=generator) for _ in head.taps]
    ours = our_logits(head, ids, features)
    t = {n: np.asarray(value, dtype=np.float64) for n, value in written.tensors.items()}
    embedding = written.target.get_input_embeddings().weight.detach().double().numpy()
    masks = np.split(t["mask_hidden"][0].repeat(DRAFTS - 1, axis=0), 3, axis=1)
    for row in range(2):
        joined = [np.concatenate([f[row, :-1].double().numpy(), mask]) for f, mask in zip(features, masks)]
        tokens = np.array([*ids[row, 1:].tolist(), *[drafts.P_MASK] * (DRAFTS - 1)])
        _, normed = formulas.eagle3(**FORMS[name])(
            t, embedding, tokens, np.arange(len(tokens)), formulas.project(t, joined)
        )
        right = normed[-DRAFTS:] @ t["lm_head.weight"].T
        assert dflash.difference([ours[row]], [right]) < 1e-5


def test_p_eagle_checkpoints_are_read_strictly(load, tmp_path):
    written, head = load("p_eagle")
    assert head.flavour == "P-EAGLE" and head.mask_token_id == drafts.P_MASK
    assert "drafts in parallel, masked by token 91" in head.report[1]

    def read(tensors=(), algorithm="p_eagle", **config):
        changed = {**written.tensors, **dict(tensors)}
        changed = {name: value for name, value in changed.items() if value is not None}
        drafts.save(tmp_path, {**written.config, **config}, changed)
        return load_head(tmp_path, written.target, algorithm)

    for tensor in ("layers.1.input_layernorm.weight", "fc.weight", "norm.weight"):
        with pytest.raises(ValueError, match=re.escape(tensor)):
            read({tensor: None})
    with pytest.raises(ValueError, match=r"mask_hidden is \[1, 1, 64\], expected \[1, 1, 192\]"):
        read({"mask_hidden": torch.zeros(1, 1, 64)})
    with pytest.raises(ValueError, match="has no mask_hidden"):
        read({"mask_hidden": None}, speculators_model_type="peagle")
    with pytest.raises(ValueError, match=r"mask_token_id or pard_token or ptd_token_id below 96, .* it has None"):
        read(ptd_token_id=None)
    with pytest.raises(ValueError, match="it has 96"):
        read(ptd_token_id=96)
    with pytest.raises(ValueError, match="its config has gating 'per-head', which is not known here"):
        read(gating="per-head")
    with pytest.raises(ValueError, match="holds a head for algo='p_eagle', not for algo='eagle3'"):
        read(algorithm="eagle3")


# --- PARD


@functools.cache
def target():
    """A model whose next token hangs on the last one, nearly alone."""
    model = models.ADMITTED["llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
    return model


@functools.cache
def pard():
    """The same model, which knows the first token that follows, with a mask."""
    draft = models.ADMITTED["llama"]()
    draft.load_state_dict(target().state_dict())
    draft.config.pard_token = PARDS_MASK
    return draft


@functools.cache
def fast(schedule, draft=pard, **options):
    options = SCHEDULES[schedule] | dict(draft=draft(), compile=False, max_cache_len=120) | options
    return models.speculate_captured(target(), "pard", adaptive=False, **options)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_a_draft_model_without_a_cache(schedule):
    system, options = fast(schedule), SCHEDULES[schedule]
    engine, steps = system.speculation.engine, options["num_steps"]
    run, nodes, checked = engine.run, engine.runtime.algorithm.plan.nodes, 0

    def watched(call):
        nonlocal checked
        session = engine.session(len(call.prompts))
        state = session.state
        for gained in run(call):
            for row in [row for row, done in enumerate(state.finished) if not done]:
                text = state.tokens[row, : int(state.lengths[row]) + 1].tolist()
                ids = torch.tensor([[*text, *[PARDS_MASK] * (steps - 1)]])
                logits = pard()(ids).logits[0, -steps:].double()
                tree = state.tree_tokens[row, :nodes].tolist(), state.tree_parents[row, :nodes].tolist()
                if "topk" in options:
                    right = [path for _, path in dflash.best_paths(logits.numpy(), options["topk"], nodes - 1)]
                    assert sorted(dflash.paths_of(*tree)) == sorted(right)
                else:
                    assert tree[0] == [text[-1], *logits.argmax(-1)[: nodes - 1].tolist()]
                checked += 1
            yield gained

    engine.run = watched
    try:
        with torch.no_grad():
            rounds.generated(system, rounds.prompts(1, 3), 12)  # a prompt shorter than what is fed again
            mask = (torch.arange(10) >= torch.tensor([[0], [4], [8]])).long()
            rounds.generated(system, rounds.prompts(3, 10), 12, attention_mask=mask)
    finally:
        del engine.run
    assert checked > 15


@pytest.mark.parametrize("schedule", ["chain", "tree"])
def test_tokens_are_plain_decodings(schedule):
    stats = fast(schedule).speculation.stats
    for batch in (1, 4):
        stats.reset()
        ids = rounds.prompts(batch, 9)
        assert torch.equal(rounds.generated(fast(schedule), ids), rounds.generated(target(), ids))
        assert stats.accept_length > 1.8  # the first draft is right


@pytest.mark.slow
def test_compiled_rounds_draft_the_same():
    runs = []
    for compile in (False, True):
        system = fast("tree", compile=compile)
        runs.append((rounds.generated(system, rounds.prompts(3, 9), 12).tolist(), system.speculation.stats.trace))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_compiled_rounds_of_a_head_serve_any_number_of_rows(load):
    written, _ = load("p_eagle")
    options = dict(num_steps=4, draft=written.folder, max_cache_len=120, compile=True)
    system = models.speculate_captured(copy.deepcopy(written.target), "p_eagle", **options)
    for rows in (1, 3, 2):
        ids = rounds.prompts(rows, 9)
        assert torch.equal(rounds.generated(system, ids), rounds.generated(written.target, ids))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", dflash.MODES)
@pytest.mark.parametrize("schedule", ["chain", "tree"])
@pytest.mark.parametrize("algo", ["pard", "p_eagle"])
def test_drafts_and_tokens_are_the_cpus(load, algo, schedule, mode):
    written, traces = load("p_eagle")[0], []
    model, draft = (target(), pard()) if algo == "pard" else (written.target, written.folder)
    ids = rounds.prompts(3, 9)
    for device, options in (("cuda", dflash.MODES[mode]), ("cpu", dict(compile=False))):
        there = draft if algo == "p_eagle" else copy.deepcopy(draft).to(device)
        options = SCHEDULES[schedule] | dict(draft=there, max_cache_len=120) | options
        system = models.speculate_captured(copy.deepcopy(model).to(device), algo, adaptive=False, **options)
        assert torch.equal(rounds.generated(system, ids.to(device)).cpu(), rounds.generated(model, ids))
        traces.append(system.speculation.stats.trace)
    assert traces[0] == traces[1]


@pytest.mark.sweep("p_eagle")
@pytest.mark.parametrize("name", ["p_eagle", "p_eagle_speculators"])
def test_heads_keep_the_answers(load, name):
    written, _ = load(name)
    ids = rounds.prompts(4, 9)
    plain = rounds.generated(written.target, ids, 8)
    for options in (SCHEDULES["chain"], SCHEDULES["tree"]):
        options = options | dict(draft=written.folder, compile=False, max_cache_len=64)
        system = models.speculate_captured(written.target, "p_eagle", **options)
        for batch in (1, 4):
            assert torch.equal(rounds.generated(system, ids[:batch], 8), plain[:batch])
    assert "of first drafts are the target's own tokens" in system.speculation.explain()


def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """Leviathan et al. 2023, section 3.2: the chance is the sum of the lesser probabilities."""

    def other():
        draft = copy.deepcopy(pard())
        with torch.no_grad():
            draft.lm_head.weight *= 0.7
        return draft

    system, rows, ids = fast("one", other, draft_sample_method="probabilistic"), 400, rounds.prompts(1, 12)
    with torch.no_grad():
        p, q = ((model(ids).logits[0, -1] / 1.5).double().softmax(-1) for model in (target(), other()))
    chance = torch.minimum(p, q).sum().item()
    rounds.generated(system, ids, 2, do_sample=True, temperature=1.5, top_k=0, num_return_sequences=rows)
    accepted = sum(gained == 2 for gained in system.speculation.stats.trace[0])
    assert 0.1 < chance < 0.9
    assert abs(accepted - rows * chance) < 4 * (rows * chance * (1 - chance)) ** 0.5


def test_drafts_without_masks_are_refused():
    for value in (None, 96, True):
        draft = models.ADMITTED["llama"]()
        draft.config.pard_token = value
        with pytest.raises(ValueError, match=r"must have a pard_token or ptd_token_id below 96, .*algo='draft_model'"):
            models.speculate_captured(target(), "pard", draft=draft, compile=False)
    with pytest.raises(ValueError, match="algo='pard' needs a smaller model"):
        models.speculate_captured(target(), "pard", compile=False)


def test_pard_is_read_from_a_folder(tmp_path):
    pard().save_pretrained(tmp_path)
    system = models.speculate_captured(target(), "pard", draft=str(tmp_path), compile=False, max_cache_len=64)
    told = system.speculation.explain()
    assert "7 tokens are drafted in one forward, masked by token 95" in told


def test_options_are_checked():
    for options, message in (
        (dict(num_steps=32), "num_steps must be from 1 to 31"),
        (dict(topk=17), "topk must be from 1 to 16"),
        (dict(num_draft_tokens=9), r"num_draft_tokens must be at most 8 = num_steps \+ 1"),
        (dict(draft_sample_method="probabilistic", topk=2), "topk: drafts that are drawn"),
        (dict(score_temperature=0.0), "score_temperature must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelOptions(**options)
    with pytest.raises(ValueError, match="num_draft_tokens must be at most 7"):
        ParallelOptions(num_steps=2, topk=2, num_draft_tokens=8).proposer(torch.device("cpu"))
    assert isinstance(ParallelOptions(topk=2, num_draft_tokens=30).proposer(torch.device("cpu")), nn.Module)
