"""The argument ``speculation`` of a request: no drafts, or fewer, and the same answer."""

import draft_rounds as rounds
import pytest
import torch
from batch_requests import collect, running

from spec_compile.runtime.preparation import read_limit

SYSTEMS = {"a tree": ("eagle3", "tree"), "a chain": ("draft_model", "chain"), "a union": ("eagle3", "union")}


@pytest.mark.parametrize("name", SYSTEMS)
def test_drafts_are_as_few_as_asked_for(name):
    algorithm, schedule = SYSTEMS[name]
    system, ids = rounds.fast(algorithm, "llama", schedule), rounds.prompts(2)
    stats, plain = system.speculation.stats, rounds.plain("llama", 2)
    depths = []
    for speculation in (None, {"num_draft_tokens": 2}, False, {}):
        stats.reset()
        assert torch.equal(rounds.generated(system, ids, speculation=speculation), plain)
        depths.append(len(stats.offered))
        assert speculation is not False or ({*stats.nodes}, stats.rounds) == ({1}, rounds.NEW)
    assert depths[0] > depths[1] == 1 > depths[2] == 0 and depths[3] == depths[0]


def test_each_request_has_its_own_limit():
    """The draft is the target itself, so that each round gains as many drafts as it verifies."""
    system = rounds.fast("draft_model", "llama", "chain")
    most = system.speculation.engine.runtime.algorithm.plan.nodes
    limits = {"all": None, "two": {"num_draft_tokens": 2}, "none": False, "most": {"num_draft_tokens": most}}
    with running(system, max_requests_per_batch=4) as manager:
        for request_id, limit in limits.items():
            manager.add_request([3, 4, 5, 6], request_id, max_new_tokens=24, eos_token_id=-1, speculation=limit)
        outputs = collect(manager, len(limits))
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 1
    drafted = {name: max(output.speculation.per_step_drafted) for name, output in outputs.items()}
    assert drafted == {"all": most - 1, "two": 1, "none": 0, "most": most - 1}
    assert outputs["none"].speculation.steps == 24 and outputs["two"].speculation.steps < 24


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (True, TypeError, "expected None, False or a dictionary with num_draft_tokens, got True"),
        (8, TypeError, "got 8"),
        ({"num_draft_token": 8}, TypeError, "unknown setting 'num_draft_token'. Did you mean 'num_draft_tokens'"),
        ({"num_draft_tokens": 0}, ValueError, "must be from 1 to 5"),
        ({"num_draft_tokens": 6}, ValueError, r"must be from 1 to 5 .*speculate\(\) built the most"),
        ({"num_draft_tokens": 2.0}, TypeError, "must be an int"),
    ],
)
def test_bad_limits_are_refused_by_name(value, error, says):
    with pytest.raises(error, match=f"^speculation.*{says}"):
        read_limit(value, 5)
    system = rounds.fast("draft_model", "llama", "chain")
    with pytest.raises(error, match=r"^speculation"):
        rounds.generated(system, rounds.prompts(1), speculation={"num_draft_tokens": 65} if error is ValueError else 1)
