"""Parts of rounds with drafts: every weight that a draft's part reads is an input of its graph, so that the part runs
compiled, serves a later process, and sees weights that are refreshed in place."""

import copy
import itertools

import assistants
import changed_drafts as changed
import draft_rounds as rounds
import pytest
import torch
from fake_children import doing  # noqa: F401, a fixture

from spec_compile import speculate

HEADS = "eagle", "eagle3", "mtp"
FILES = "p_eagle", "dflash", "dflash_confident", "dflash2", "dspark", "dspark_rnn", "domino"
CASES = [
    *itertools.product(HEADS, ("fp8", "int4", "int8")),
    *itertools.product(("modules", "modules with own outputs"), [{"output": "int8"}]),
    *itertools.product(assistants.SIZES, (None, "int8")),  # E2B's and E4B's score the tokens of a few clusters
    ("draft_model", "int4"),
    *itertools.product(FILES, (None, "fp8")),
]


def compiled(target, algorithm, draft, mode, weights=None, **options):
    """A model whose parts are adopted, and give the target's own answers."""
    model = speculate(
        target, algorithm, draft=draft, compile=mode, check=False, adaptive=False, max_cache_len=128,
        draft_weights=weights, **options,
    )  # fmt: skip
    assert_answers(model, target)
    runtime = model.speculation.engine.runtime
    if mode == "background":
        with model.speculation.engine.turns:
            runtime.cold_start.finish(runtime.say)
        assert_answers(model, target)
    source = runtime.parts
    assert not source.failures and not source.waiting and source.adopted
    return model


def assert_answers(model, target):
    ids = rounds.prompts(1)
    assert torch.equal(rounds.generated(model, ids, 8), rounds.generated(target, ids, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), CASES, ids=str)
@pytest.mark.parametrize("mode", [True, "background"])
def test_every_kind_of_draft(doing, mode, name, weights, tmp_path):  # noqa: F811
    options = {} if name in FILES else dict(num_steps=3)
    target, algorithm, draft = changed.named(tmp_path, name)
    compiled(target, algorithm, draft, mode, weights, **options)


@torch.no_grad()
def test_a_refresh_reaches_compiled_parts(doing):  # noqa: F811
    """The drafts are those of a model that is made with the new weights."""
    target, head = rounds.target("llama"), copy.deepcopy(rounds.head("eagle", "llama"))
    model = compiled(target, "eagle", head, True, "int8", num_steps=3)
    head.head_weight.copy_(head.head_weight.flip(0))
    lengths = []
    for each in (model, None):
        model = each or speculate(target, "eagle", draft=head, draft_weights="int8", compile=False, check=False,
                                  adaptive=False, max_cache_len=128, num_steps=3)  # fmt: skip
        model.speculation.refresh()
        model.speculation.stats.reset()
        assert_answers(model, target)
        lengths.append(model.speculation.stats.accept_length)
    assert lengths[0] == lengths[1]
