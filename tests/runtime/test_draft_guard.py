"""A draft that raises is left out with one warning, and the answer goes on."""

import draft_rounds as rounds
import pytest
import torch

from spec_compile.drafters.draft_model import ModelDrafter
from spec_compile.drafters.heads import HeadDrafter
from spec_compile.drafters.ngram import NgramDrafter
from spec_compile.drafters.recycle import RecycleDrafter
from spec_compile.runtime.round import DraftGuard

DRAFTS = {
    "eagle3": ("tree", HeadDrafter),
    "draft_model": ("chain", ModelDrafter),
    "ngram": ("plain", NgramDrafter),
    "recycle": ("plain", RecycleDrafter),
}


def failing(monkeypatch, cls, part, after):
    """Let a part of a drafter fail when it has run so often."""
    run, times = getattr(cls, part), []

    def fail(self, *arguments):
        times.append(1)
        if len(times) > after:
            raise RuntimeError("no such token")
        return run(self, *arguments)

    monkeypatch.setattr(cls, part, fail)
    return times


def system_of(name):
    schedule, cls = DRAFTS[name]
    if schedule == "plain":
        options = dict(compile=False, check=False, recycle=8 * (name == "recycle"))
        return rounds.models.speculate_captured(rounds.target("llama"), "ngram", **options), cls
    rounds.fast.cache_clear()  # a draft that has failed stays out
    return rounds.fast(name, "llama", schedule), cls


@pytest.fixture(autouse=True)
def forget_systems():
    yield
    rounds.fast.cache_clear()


@pytest.mark.parametrize("part", ["start", "prefill", "observe", "propose"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_answer_goes_on(monkeypatch, caplog, name, part):
    system, cls = system_of(name)
    times = failing(monkeypatch, cls, part, after=0 if part in ("start", "prefill") else 2)
    ids, plain = rounds.prompts(2), rounds.plain("llama", 2)
    for _ in range(2):
        assert torch.equal(rounds.generated(system, ids), plain)
    ran = len(times)
    assert caplog.text.count("the draft has failed (RuntimeError: no such token)") == 1
    system.speculation.stats.reset()
    assert torch.equal(rounds.generated(system, ids), plain)
    assert len(times) == ran and {*system.speculation.stats.nodes} == {1}, "it is not asked again"


@pytest.mark.parametrize("name", DRAFTS)
def test_requests_go_on(monkeypatch, caplog, name):
    system, cls = system_of(name)
    failing(monkeypatch, cls, "propose", after=4)
    rounds.check_requests(system, 2, 2)
    assert caplog.text.count("the draft has failed") == 1


def test_ranks_are_told():
    def fail():
        raise ValueError("of one rank only")

    with pytest.raises(ValueError, match="of one rank only"):
        DraftGuard(raises=True)(fail)
