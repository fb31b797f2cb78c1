"""Draft models and heads in whole rounds: the answer is plain decoding's, and what is drafted is what a draft without
any cache would have drafted after the same text."""

import itertools
import math

import dflash_drafts as dflash
import models
import pytest
import torch
from draft_rounds import (
    SCHEDULES,
    TARGETS,
    draft_of,
    drafted,
    fast,
    followed,
    generated,
    goes_on_from_a_cache,
    head,
    plain,
    prompts,
    same_when_compiled,
    target,
    tree_of,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from spec_compile import speculate
from spec_compile.compat import CACHE
from spec_compile.drafters.trees.merge import KEPT, Drafts
from spec_compile.runtime.draft_budget import WholeTreeBudget

ALGORITHMS = {
    "eagle": SCHEDULES,
    "eagle3": SCHEDULES,
    "eagle3_mla": ("chain", "tree", "union"),
    "draft_model": ("chain", "one", "tree", "cut", "union", "chain union"),
    "mtp": ("one", "tree", "union", "chain union"),
}


@pytest.mark.sweep("eagle3-tree eagle3_mla-tree draft_model-chain")
@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [(name, schedule) for name, schedules in ALGORITHMS.items() for schedule in schedules],
)
def test_drafts_are_those_of_a_draft_without_a_cache(algorithm, schedule):
    system = fast(algorithm, "llama", schedule)
    system.speculation.stats.reset()
    assert checked_trees(system, algorithm, schedule) > 20
    assert system.speculation.stats.accept_length > 1.03


@pytest.mark.sweep("eagle3-tree")
@pytest.mark.parametrize(
    ("algorithm", "schedule"), [("eagle3", "tree"), ("draft_model", "chain"), ("mtp", "tree"), ("eagle", "union")]
)
def test_drafts_are_the_same_after_rounds_without_any(monkeypatch, algorithm, schedule):
    """Of 10 rounds some draft, and verify all drafts or few of them. Those after the others know all tokens, also those
    of a prompt that was put off. A drafter that is late by two, or by 128, tokens catches up at once."""
    system = fast(algorithm, "llama", schedule)
    nodes = system.speculation.engine.runtime.algorithm.plan.nodes
    few = max(2, nodes // 4)
    pattern = [nodes, 1, 1, nodes, few, nodes, few, few, 1, few, 1, 1, 1]
    for first, late in ((0, 2), (1, 2), (1, 128)):
        monkeypatch.setattr("spec_compile.runtime.pipeline.MOST_LATE", late)
        numbers = itertools.count(first)
        monkeypatch.setattr(
            WholeTreeBudget, "choose", lambda *_, numbers=numbers: pattern[next(numbers) % len(pattern)]
        )
        assert checked_trees(system, algorithm, schedule) >= 4


@torch.no_grad()
def test_a_draft_that_was_silent_at_the_end_knows_an_answer_that_goes_on(monkeypatch):
    """The draft is the target itself, so that all its drafts are accepted if it has seen every token."""
    options = dict(draft=target("llama"), compile=False, check=False, max_cache_len=200, num_steps=3)
    system, cache = models.speculate_captured(target("llama"), "draft_model", **options), DynamicCache()
    sizes = itertools.chain([4], itertools.repeat(1))
    monkeypatch.setattr(WholeTreeBudget, "choose", lambda policy, *known: next(sizes))
    text = generated(system, prompts(2), 20, **{CACHE: cache})
    assert system.speculation.engine.session(2).late
    sizes = itertools.repeat(4)
    generated(system, text, 16, attention_mask=torch.ones_like(text), **{CACHE: cache})
    assert system.speculation.stats.trace[:-1] == [[4, 4]] * 3


@pytest.mark.sweep(3)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("algorithm", "schedule"), [("eagle3", "tree"), ("eagle3", "union"), ("mtp", "chain")])
@torch.no_grad()
def test_a_draft_without_finite_numbers_changes_no_answer(algorithm, schedule, value):
    model = target("llama")
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    own = [parameter for parameter in head(algorithm, "llama").parameters() if parameter.data_ptr() not in shared]
    kept = [parameter.data for parameter in own]
    try:
        for parameter in own:
            parameter.data = torch.full_like(parameter, value)
        options = dict(draft=head(algorithm, "llama"), compile=False, check=False, max_cache_len=200)
        system = speculate(model, algorithm, adaptive=False, **SCHEDULES[schedule], **options)
        for batch in (1, 3):
            assert torch.equal(generated(system, prompts(batch), 40), generated(model, prompts(batch), 40))
        system.generate(prompts(1), max_new_tokens=40, do_sample=True, eos_token_id=None, pad_token_id=0)
    finally:
        for parameter, data in zip(own, kept):
            parameter.data = data
    assert system.speculation.stats.accept_length < 1.1 or "union" in schedule


@torch.no_grad()
def checked_trees(system, algorithm, schedule):
    """Generate, and compare the trees that each round proposes with those of a draft without a cache; their number."""
    grower, is_joined = system.speculation.engine.runtime.algorithm, "union" in schedule
    grower = grower.head if is_joined else grower
    draft = draft_of(algorithm, "llama") if algorithm == "draft_model" else grower.head

    def look(session, row, text):
        tokens, parents = (
            each[0].tolist() for each in drafted(algorithm, draft, target("llama"), grower.schedule, text)
        )
        parents = [max(parent, 0) for parent in parents] if is_joined else parents
        nodes = len(tokens) if is_joined else int(session.state.tree_count[row])
        assert tree_of(session, row, nodes, is_joined) == (tokens[:nodes], parents[:nodes])

    mask = (torch.arange(23) >= torch.tensor([[0], [5], [21]])).long()
    return followed(system, prompts(1), look)[1] + followed(system, prompts(3), look, attention_mask=mask)[1]


PAIRS = [*itertools.product(("eagle", "eagle3", "eagle3_mla", "mtp", "draft_model"), ("chain", "tree"))]
PAIRS += [("naive_eagle", "one"), ("eagle3", "union"), ("mtp", "union"), ("draft_model", "chain union")]


@pytest.mark.sweep(
    "eagle-tree-llama eagle3-union-llama eagle3-tree-mixtral eagle3_mla-tree-llama mtp-chain-llama "
    "naive_eagle-one-llama"
)
@pytest.mark.parametrize(
    ("algorithm", "schedule", "name"),
    [(*pair, name) for name, pair in itertools.product(TARGETS, PAIRS)],
)
def test_tokens_are_plain_decodings(algorithm, schedule, name):
    for batch in (1, 4):
        assert torch.equal(generated(fast(algorithm, name, schedule), prompts(batch)), plain(name, batch))


def made(algorithm, schedule, compile=False):
    """The target "llama" with a draft of any kind."""
    how = schedule, compile
    return dflash.fast("llama", *how) if algorithm == "dflash" else fast(algorithm, "llama", *how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [
        ("eagle", "tree"), ("eagle3", "chain"), ("eagle3", "union"), ("eagle3_mla", "tree"),
        ("draft_model", "chain union"), ("draft_model", "one"), ("dflash", "tree"),
    ],
)  # fmt: skip
def test_compiled_rounds_draft_the_same(algorithm, schedule):
    same_when_compiled(lambda compile: made(algorithm, schedule, compile), prompts(3))


@pytest.mark.sweep("mixtral")
@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_that_is_the_target_accepts_everything(name):
    options = dict(draft=target(name), adaptive=False, compile=False, check=False, max_cache_len=200, num_steps=4)
    system = models.speculate_captured(target(name), "draft_model", **options)
    for batch in (1, 4):
        system.speculation.stats.reset()
        generated(system, prompts(batch), 5 * 6)
        assert system.speculation.stats.acceptance_by_depth == [1.0] * 4
        assert system.speculation.stats.accept_length == 5


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "draft_model", "dflash"])
def test_a_prompt_of_one_token(algorithm):
    for schedule in ("chain", "tree", *(["union"] if algorithm == "eagle3" else [])):
        system, ids = made(algorithm, schedule), torch.tensor([[5]])
        assert torch.equal(generated(system, ids, 12), generated(target("llama"), ids, 12))


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "draft_model", "dflash"])
def test_a_conversation_goes_on_from_its_cache(algorithm):
    goes_on_from_a_cache(made(algorithm, "chain"), target("llama"), prompts(1))


PROMISES = {
    "processors": dict(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=5, eos_token_id=[7, 8]),
    "eos": dict(eos_token_id=list(range(40, 60))),
    "scores": dict(output_scores=True, output_logits=True, return_dict_in_generate=True),
    "prefixes": dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(3 + len(ids) % 5, 70))),
    "criteria": dict(stopping_criteria=[lambda ids, scores: ids[:, -1] % 11 == 3]),
    "padding": dict(attention_mask=(torch.arange(23) >= torch.tensor([[0], [5], [21]])).long()),
    "stateful": dict(logits_processor=[lambda ids, scores: scores.roll(ids.shape[1] % 3, dims=1)]),
}
KEEPERS = [*itertools.product([("eagle", "chain"), ("eagle3", "tree"), ("draft_model", "tree")], PROMISES)]
KEEPERS += itertools.product([("eagle3", "union")], ("eos", "padding"))


@pytest.mark.parametrize(("algorithm", "schedule", "promise"), [(*pair, promise) for pair, promise in KEEPERS])
def test_generate_keeps_its_promises(algorithm, schedule, promise):
    options, ids = PROMISES[promise], prompts(3)
    got, want = (generated(model, ids, **options) for model in (fast(algorithm, "llama", schedule), target("llama")))
    if not isinstance(want, torch.Tensor):
        for name in ("scores", "logits"):
            torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]), rtol=1e-4, atol=1e-4)
        got, want = got.sequences, want.sequences
    assert torch.equal(got, want)


@pytest.mark.parametrize(("algorithm", "schedule"), [("eagle", "tree"), ("draft_model", "chain"), ("eagle3", "union")])
def test_sampled_tokens_do_not_depend_on_the_draft(algorithm, schedule):
    answers = []
    for system in (fast(algorithm, "llama", schedule), speculate(target("llama"), compile=False, max_cache_len=200)):
        torch.manual_seed(3)
        answers.append(generated(system, prompts(3), do_sample=True, temperature=0.8, top_p=0.9))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("algorithm", "options", "names"),
    [
        ("draft_model", dict(), "draft"),
        ("draft_model", dict(draft=3), "draft"),
        ("draft_model", dict(draft="llama", num_steps=0), "num_steps"),
        ("draft_model", dict(draft="llama", num_steps=2, num_draft_tokens=9), "num_draft_tokens"),
        ("draft_model", dict(draft="llama", topk=2, draft_sample_method="probabilistic"), "topk"),
        ("draft_model", dict(draft="llama", draft_sample_method="random"), "draft_sample_method"),
        ("draft_model", dict(draft="llama", token_map=[1, 2]), "token_map"),
        ("draft_model", dict(draft="llama", num_step=3), "num_steps"),
        ("draft_model", dict(draft="other vocabulary"), "vocabulary"),
        ("draft_model", dict(draft="in training"), "draft.*training"),
        ("eagle", dict(), "draft"),
        ("eagle", dict(draft="/no/such/folder"), "draft"),
        ("eagle", dict(draft="head", score_temperature=0.0), "score_temperature"),
        ("eagle", dict(draft="head", tree_choices=[[0, 0]]), "tree_choices"),
        ("eagle", dict(draft="head", token_map=[96]), "token_map"),
        ("mtp", dict(), "draft|multi-token"),
    ],
)
def test_bad_options_are_named(algorithm, options, names):
    model = models.ADMITTED["llama"]()
    drafts = {
        "llama": models.ADMITTED["llama"],
        "other vocabulary": lambda: LlamaForCausalLM(LlamaConfig(**models.GQA | dict(vocab_size=50))).eval(),
        "in training": lambda: models.ADMITTED["opt"]().train(),
        "head": lambda: head("eagle", "llama"),
    }
    if options.get("draft") in drafts:
        options = options | dict(draft=drafts[options["draft"]]())
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=names):
        speculate(model, algorithm, compile=False, **options)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_only_ngrams_have_a_store_and_take_a_reference():
    system = fast("eagle", "llama", "chain")
    with pytest.raises(AttributeError, match=r"algo='eagle' keeps no n-grams; only .*algo='ngram'"):
        _ = system.speculation.ngram
    with pytest.raises(ValueError, match="reference"):
        generated(system, prompts(1), reference=[1, 2, 3])


def test_a_union_has_a_store_and_takes_references():
    system, answer = fast("eagle3", "llama", "union"), plain("llama", 1)
    speculation = system.speculation
    speculation.ngram.reset()
    speculation.stats.reset()
    assert torch.equal(generated(system, prompts(1), reference=answer[0], share_text=False), answer)
    assert speculation.stats.accept_length > 6 > SCHEDULES["union"]["num_steps"]  # longer paths than the head has
    assert speculation.stats.seconds["draft"] > 0 and len(speculation.ngram) == 0
    generated(system, prompts(2))
    assert len(speculation.ngram) > 0 and speculation.ngram.stats()["streams"] == 0
    assert "joined with n-grams: a round verifies the 12 likeliest nodes" in speculation.explain()


def test_a_union_learns_what_came_of_its_drafts():
    """Of every draft whose parent the text has, verified or not, and of no other."""
    system = fast("eagle3", "llama", "union")
    engine, counts = system.speculation.engine, system.speculation.engine.runtime.algorithm.counts
    run, checked, before = engine.run, 0, counts.clone()

    def expected(drafts, texts):
        """The counts after a round. texts: what each row has gained."""
        added, head_nodes = torch.zeros_like(counts), engine.runtime.algorithm.head.plan.nodes
        for row, text in enumerate(texts):
            paths = {0: (), head_nodes: ()}
            for node in range(drafts.tokens.shape[1]):
                begin = 0 if node < head_nodes else head_nodes
                above, cell = begin + int(drafts.above[row, node]), int(drafts.cells[row, node])
                if node not in paths:
                    paths[node] = (*paths[above], int(drafts.tokens[row, node]))
                if cell >= 0 and paths[above] == tuple(text[: len(paths[above])]) and len(paths[node]) <= len(text):
                    hit = paths[node] == tuple(text[: len(paths[node])])
                    added[:, cell] += torch.tensor([float(hit), float(drafts.priors[row, node])])
        return torch.where(added[1] > 0, KEPT * before + added, before)

    def watched(call):
        nonlocal checked, before
        session, drafts = engine.session(len(call.prompts)), None
        for gained in run(call):
            if drafts is not None:
                torch.testing.assert_close(counts, expected(drafts, gained))
                checked += 1
            drafts, before = Drafts(*(column.clone() for column in session.drafter.drafts)), counts.clone()
            yield gained

    engine.run = watched
    try:
        generated(system, prompts(1))
        generated(system, prompts(3))
    finally:
        del engine.run
    assert checked > 8 and 0.2 < float(counts[0].sum() / counts[1].sum()) < 5


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model"])
def test_embeddings_in_place_of_a_prompt(algorithm):
    embeds = target("llama").get_input_embeddings()(prompts(2))
    got, want = (generated(m, None, inputs_embeds=embeds) for m in (fast(algorithm, "llama", "chain"), target("llama")))
    assert torch.equal(got, want)
