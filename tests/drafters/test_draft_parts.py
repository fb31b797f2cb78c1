"""Parts of rounds with drafts: every weight that a draft's part reads is an input of its graph, so that the part runs
compiled, serves a later process, and sees weights that are refreshed in place."""

import copy

import assistants
import draft_checkpoints as drafts
import draft_rounds as rounds
import pytest
import torch
from fake_children import doing  # noqa: F401, a fixture
from mtp_rounds import with_further

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head

CHAIN = dict(num_steps=3)
MODES = pytest.mark.parametrize("mode", [True, "background"])


def compiled(target, algorithm, draft, mode, **options):
    """A model whose parts are adopted, and give the target's own answers."""
    model = speculate(
        target, algorithm, draft=draft, compile=mode, check=False, adaptive=False, max_cache_len=128,
        **options,
    )  # fmt: skip
    assert_answers(model, target)
    runtime = model.speculation.engine.runtime
    if mode == "background":
        with model.speculation.engine.turns:
            runtime.cold_start.finish()
        assert_answers(model, target)
    source = runtime.parts
    assert not source.failures and not source.waiting and source.adopted
    return model


def assert_answers(model, target):
    ids = rounds.prompts(1)
    assert torch.equal(rounds.generated(model, ids, 8), rounds.generated(target, ids, 8))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", "int4", "int8"])
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "mtp"])
@MODES
def test_heads(doing, mode, algorithm, weights):  # noqa: F811
    compiled(rounds.target("llama"), algorithm, rounds.head(algorithm, "llama"), mode, draft_weights=weights, **CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize("own_output", [False, True], ids=["shared", "own"])
@MODES
def test_modules_that_draft_a_token_each(doing, mode, own_output):  # noqa: F811
    draft = with_further(rounds.head("mtp", "llama"), own_output)
    compiled(rounds.target("llama"), "mtp", draft, mode, draft_weights={"output": "int8"}, **CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", assistants.SIZES)
@MODES
def test_assistants(doing, mode, name, weights):  # noqa: F811
    """Those of E2B and E4B score the tokens of a few clusters."""
    compiled(assistants.target(name), "assistant", assistants.assistant(name), mode, draft_weights=weights, **CHAIN)


@pytest.mark.slow
@MODES
def test_a_draft_model(doing, mode):  # noqa: F811
    draft = rounds.draft_model("llama")
    compiled(rounds.target("llama"), "draft_model", draft, mode, draft_weights="int4", **CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize(
    "flavour", ["p_eagle", "dflash", "dflash_confident", "dflash2", "dspark", "dspark_rnn", "domino"]
)
@MODES
def test_blocks_and_parallel_drafts(doing, mode, flavour, weights, tmp_path):  # noqa: F811
    written = drafts.write(flavour, tmp_path)
    algorithm = "p_eagle" if flavour == "p_eagle" else "dflash"
    draft = load_head(tmp_path, written.target, algorithm)
    compiled(written.target, algorithm, draft, mode, draft_weights=weights)


@torch.no_grad()
def test_a_refresh_reaches_compiled_parts(doing):  # noqa: F811
    """The drafts are those of a model that is made with the new weights."""
    target, head = rounds.target("llama"), copy.deepcopy(rounds.head("eagle", "llama"))
    model = compiled(target, "eagle", head, True, draft_weights="int8", **CHAIN)
    head.head_weight.copy_(head.head_weight.flip(0))
    lengths = []
    for each in (model, None):
        model = each or speculate(target, "eagle", draft=head, draft_weights="int8", compile=False, check=False,
                                  adaptive=False, max_cache_len=128, **CHAIN)  # fmt: skip
        model.speculation.refresh()
        model.speculation.stats.reset()
        assert_answers(model, target)
        lengths.append(model.speculation.stats.accept_length)
    assert lengths[0] == lengths[1]
