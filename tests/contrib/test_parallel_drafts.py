"""P-EAGLE and PARD, which draft all tokens of a chain in one forward: against the formulas, against a draft without any
cache, and whole rounds against transformers' own decoding."""

import copy
import functools
from types import SimpleNamespace

import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_formulas as formulas
import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from bigrams import PARDS_MASK, pard, target

from spec_compile.contrib.parallel import ParallelHeadOptions, ParallelHeads, ParallelOptions
from spec_compile.drafters.checkpoints.load import load_head

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


def test_what_was_loaded_is_told(load):
    _, head = load("p_eagle")
    assert head.flavour == "P-EAGLE" and head.mask_token_id == drafts.P_MASK
    assert "drafts in parallel, masked by token 91" in head.report[1]


# --- PARD


@functools.cache
def fast(schedule, **options):
    options = SCHEDULES[schedule] | dict(draft=pard(), compile=False, max_cache_len=120) | options
    return models.speculate_captured(target(), "pard", adaptive=False, **options)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@torch.no_grad()
def test_drafts_are_those_of_a_draft_model_without_a_cache(schedule):
    system, options = fast(schedule), SCHEDULES[schedule]
    nodes, steps = system.speculation.engine.runtime.algorithm.plan.nodes, options["num_steps"]

    def look(session, row, text):
        logits = pard()(torch.tensor([[*text, *[PARDS_MASK] * (steps - 1)]])).logits[0, -steps:].double()
        tokens, parents = rounds.tree_of(session, row, nodes)
        if "topk" in options:
            right = [path for _, path in dflash.best_paths(logits.numpy(), options["topk"], nodes - 1)]
            assert sorted(dflash.paths_of(tokens, parents)) == sorted(right)
        else:
            assert tokens == [text[-1], *logits.argmax(-1)[: nodes - 1].tolist()]

    mask = (torch.arange(10) >= torch.tensor([[0], [4], [8]])).long()
    checked = 0
    for ids, more in ((rounds.prompts(1, 3), {}), (rounds.prompts(3, 10), dict(attention_mask=mask))):
        # The first prompt is shorter than what is fed again.
        answer, looks = rounds.followed(system, ids, look, 12, **more)
        assert torch.equal(answer, rounds.generated(target(), ids, 12, **more))
        checked += looks
    assert checked > 15 and system.speculation.stats.accept_length > 1.8  # the first draft is right


@pytest.mark.slow
def test_compiled_rounds_draft_the_same():
    rounds.same_when_compiled(lambda compile: fast("tree", compile=compile), rounds.prompts(3, 9), 12)


@pytest.mark.slow
def test_compiled_rounds_of_a_head_serve_any_number_of_rows(load):
    written, _ = load("p_eagle")
    options = dict(num_steps=4, draft=written.folder, max_cache_len=120, compile=True)
    system = models.speculate_captured(copy.deepcopy(written.target), "p_eagle", **options)
    for rows in (1, 3, 2):
        ids = rounds.prompts(rows, 9)
        assert torch.equal(rounds.generated(system, ids), rounds.generated(written.target, ids))


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
    has_several_readings = name == "p_eagle"
    assert ("of first drafts are the target's own" in system.speculation.explain()) == has_several_readings


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_steps=32), "num_steps must be from 1 to 31"),
        (dict(topk=17), "topk must be from 1 to 16"),
        (dict(num_draft_tokens=9), r"num_draft_tokens must be at most 8 = num_steps \+ 1"),
        (dict(draft_sample_method="probabilistic", topk=2), "topk: drafts that are drawn"),
        (dict(score_temperature=0.0), "score_temperature must be positive"),
        (dict(num_steps=2, topk=2, num_draft_tokens=8), "num_draft_tokens must be at most 7"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelOptions(**options).proposer()
