"""`VaryingTreeBudget` and `RoundCosts`: how many nodes are verified follows what has paid."""

import random
from statistics import mode
from types import SimpleNamespace

import models
import pytest
import torch

from spec_compile import speculate
from spec_compile.runtime.draft_budget import KNEES, LEARN, RoundCosts, VaryingTreeBudget
from spec_compile.runtime.draft_record import NO_TREE, Group, TreeOutcome
from spec_compile.runtime.session import Session, StepKind

SIZES = (1, 4, 16)
CPU = {1: 1.0, 4: 1.5, 16: 2.8}
"""Seconds a round on a processor that is soon compute-bound."""
STEEP = {1: 1.0, 4: 1.5, 16: 4.0}
"""The same, more so."""
FLAT = {1: 1.0, 4: 1.01, 16: 1.02}
"""Seconds a round where memory is the limit: nodes are almost free."""


def measured(costs, adaptive=True, **options):
    policy = VaryingTreeBudget(SIZES, adaptive, **options)
    policy.costs.measured.update(costs)
    return policy


def rows(*confidences):
    """A group for each row, without adapters."""
    return [Group(0, confidence) for confidence in confidences]


def chain(length):
    return [*range(1, length + 1)]


def drive(policy, costs, trees):
    """Rounds over trees of 16 nodes, each (confidence, tokens that the text follows the chain 1, 2, ..). Returns the
    nodes that each round verified, and the drafts that it gained."""
    rounds = []
    for confidence, followed in trees:
        nodes = policy.choose(rows(confidence), [16])
        gained = min(followed, nodes - 1)
        policy.learn(nodes, [TreeOutcome(16, Group(0, confidence), chain(gained))], costs[nodes])
        if policy.hindsight is not None:
            policy.hindsight.known.append((confidence, chain(followed)))
        rounds.append((nodes, gained))
    return rounds


def sizes(policy, costs, followed, count):
    """The nodes of rounds over trees alike."""
    return [nodes for nodes, _ in drive(policy, costs, [(1, followed)] * count)]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1], [0]])
def test_without_drafts_nothing_but_the_root_is_verified(counts, adaptive):
    assert measured(FLAT, adaptive).choose(rows(*[0] * len(counts)), counts) == 1


@pytest.mark.parametrize("counts, size", [([2], 4), ([4], 4), ([5], 16), ([16], 16), ([1, 3], 4), ([1, 9, 2], 16)])
@pytest.mark.parametrize("costs", [{}, {1: 1.0}])
def test_unmeasured_sizes_and_fixed_ones_hold_the_whole_tree(counts, size, costs):
    groups = rows(*[1] * len(counts))
    assert measured(costs).choose(groups, counts) == size
    assert measured(CPU, adaptive=False).choose(groups, counts) == size


def test_a_size_larger_than_the_smallest_that_fits_is_never_chosen():
    policy = measured(FLAT)
    sizes(policy, FLAT, 15, 50)
    assert {policy.choose(rows(1), [count]) for count in (2, 4)} <= {1, 4}


def test_the_size_follows_what_is_accepted():
    wanted = {0: 1, 2: 4, 3: 4, 15: 16}
    assert {followed: mode(sizes(measured(CPU), CPU, followed, 100)[50:]) for followed in wanted} == wanted


# STEEP: a size 4 that is always accepted whole earns 4 / 1.5 = 2.7 tokens a second, more than the prior promises of 16
# (8.5 / 4), though 16 would earn 16 / 4.
@pytest.mark.parametrize("costs", [CPU, STEEP])
def test_larger_sizes_return_when_they_pay_again(costs):
    policy = measured(costs)
    assert mode(sizes(policy, costs, 0, 100)[50:]) == 1
    chosen = sizes(policy, costs, 15, 400)
    assert chosen.index(16) < 300 and chosen[-1] == 16


def test_what_is_learnt_is_kept_apart_by_confidence():
    policy = measured(CPU)
    drive(policy, CPU, [(1, 0), (8, 15)] * 60)
    assert policy.choose(rows(1), [16]) == 1
    assert policy.choose(rows(8), [16]) == 16
    assert policy.choose(rows(1, 8, 8), [16] * 3) == 16


def test_a_size_that_got_slower_is_left():
    policy = measured(FLAT)
    assert sizes(policy, FLAT, 2, 60)[-1] in (4, 16)
    assert sizes(policy, {1: 1.0, 4: 1.0, 16: 50.0}, 2, 200)[-1] == 4


def test_rows_without_a_draft_neither_gain_nor_teach():
    policy = measured(CPU)
    policy.learn(4, [TreeOutcome(1, Group(0, 0), [])] * 2, CPU[4])
    assert policy.choose(rows(0, 1), [1, 16]) == measured(CPU).choose(rows(0, 1), [1, 16])


def test_ahead_of_its_trees_the_size_follows_the_newest_known_ones():
    """A text that repeats itself for 60 tokens after each 60 new ones; trees are known one round late."""
    policy, rates = measured(CPU), {}
    for system in ("adaptive", 1, 16):
        length, seconds, newest = 0, 0.0, NO_TREE
        while length < 3000:
            nodes = policy.choose(rows(newest)) if system == "adaptive" else system
            repeats = length // 60 % 2
            path = chain(min(7, nodes - 1)) if repeats else []
            if system == "adaptive":
                policy.learn(nodes, [TreeOutcome(16 if repeats else 1, Group(0, newest), path)], None)
            length, seconds = length + 1 + len(path), seconds + CPU[nodes]
            newest = 8 if repeats else NO_TREE
        rates[system] = length / seconds
    assert rates["adaptive"] > 1.3 * max(rates[1], rates[16])


@pytest.mark.parametrize("batch, costs", [(1, CPU), (16, STEEP), (64, {1: 1.0, 4: 1.6, 16: 4.0})])
def test_trying_costs_little_however_many_rows_there_are(batch, costs):
    """Where drafts never help, a plain round for each row would be best."""
    policy, seconds, groups = measured(costs), 0.0, rows(*[1] * batch)
    for _ in range(1000):
        nodes = policy.choose(groups, [16] * batch)
        policy.learn(nodes, [TreeOutcome(16, group, []) for group in groups], None)
        seconds += costs[nodes]
    assert costs[1] * 1000 < seconds < 1.15 * costs[1] * 1000


@pytest.mark.parametrize("batch, accepted, best", [(1, 7, 16), (16, 0, 1), (64, 0, 1), (64, 6, 4), (64, 15, 16)])
def test_sizes_that_have_not_run_are_tried_where_they_may_pay(batch, accepted, best):
    """Rounds of an 8B model on a GPU, whose costs are known once they are built; without a warm-up the largest is the
    first. Drafts of each third row are accepted."""
    policy, chosen = VaryingTreeBudget(SIZES, batch=batch), []
    for _ in range(200):
        nodes = policy.choose()
        policy.costs.measured[nodes] = 4 + 0.015 * nodes * batch
        paths = [[] if row % 3 else chain(min(accepted, nodes - 1)) for row in range(batch)]
        policy.learn(nodes, [TreeOutcome(16, Group(0, 1), path) for path in paths], None)
        chosen.append(nodes)
    assert chosen[0] == 16 and mode(chosen) == best
    assert chosen.count(best) > 150
    assert batch > 1 or set(policy.costs.measured) == {16}  # nothing is compiled that could not pay


# With hindsight -------------------------------------------------------------------------------------------------------


class Foretold:
    """Stands for `Hindsight`: of each tree, the accepted path of all its nodes, known before the next round."""

    def __init__(self):
        self.known = []

    def look(self):
        known, self.known = self.known, []
        return known


def foreseeing(costs):
    return measured(costs, hindsight=Foretold())


@pytest.mark.parametrize("costs", [CPU, STEEP, FLAT])
def test_with_hindsight_failing_drafts_cost_one_round(costs):
    trees = [(1 + number % 12, 0) for number in range(128)]  # a new confidence is no reason to try again
    assert sum(costs[nodes] for nodes, _ in drive(foreseeing(costs), costs, trees)) <= 127 * costs[1] + costs[4]


def test_with_hindsight_few_nodes_are_tried_until_a_tree_is_known():
    policy, whole = foreseeing(FLAT), measured(FLAT, False, hindsight=Foretold())
    other = foreseeing(FLAT)
    other.share(policy)
    assert [each.choose(rows(1), [16]) for each in (policy, policy, other, whole)] == [4, 4, 4, 16]
    policy.hindsight.known.append((1, chain(15)))
    assert policy.choose(rows(1), [16]) == other.choose(rows(1), [16]) == 16


@pytest.mark.parametrize("costs", [CPU, STEEP])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3, 0.6])
def test_with_hindsight_no_text_is_slower_than_plain(costs, share):
    """Drafts of which only so many have a right first node, at random: a token costs at most 2 % more than plain."""
    draw = random.Random(0)
    trees = [(draw.choice((1, 1, 1, 2, 3)), draw.choice((1, 1, 2, 5)) if draw.random() < share else 0)
             for _ in range(4000)]  # fmt: skip
    rounds = drive(foreseeing(costs), costs, trees)
    seconds, tokens = sum(costs[nodes] for nodes, _ in rounds), sum(1 + gained for _, gained in rounds)
    assert seconds <= 1.02 * tokens * costs[1]


def test_with_hindsight_plain_rounds_show_that_drafts_would_pay():
    policy = foreseeing(STEEP)
    sizes(policy, STEEP, 0, 50)
    assert policy.choose(rows(1), [16]) == 1
    sizes(policy, STEEP, 15, 12)
    assert policy.choose(rows(1), [16]) == 16
    assert policy.choose(rows(7), [16]) == 16  # of which nothing is known


@pytest.mark.parametrize("busy, followed, size", [(1, 0, 1), (4, 0, 1), (4, 15, 16)])
def test_fewer_nodes_are_never_expected_to_cost_more(busy, followed, size):
    """A size may have been measured while the machine was busy."""
    policy = foreseeing({**CPU, busy: 50.0})
    policy.hindsight.known.append((1, chain(followed)))
    assert policy.choose(rows(1), [16]) == size


def test_costs_are_measured_over_tokens_that_differ():
    """Equal tokens go to the same experts of a mixture, so that 64 of them would cost what one does."""
    model = models.ADMITTED["mixtral"]()
    session = speculate(model, compile=False).speculation.engine.session(2)
    trees = []
    for _ in range(2):
        session._seconds(lambda: trees.append(session.state.tree_tokens.clone()), ())
        session.state.root()
    assert torch.equal(*trees) and trees[0].unique().numel() > models.VOCAB / 2


@pytest.mark.parametrize("kinds", [(StepKind.ROUND,), (StepKind.ROUND, StepKind.LOOK)])
def test_warmup_measures_rounds_that_run_without_being_compiled(kinds):
    """A first call would go by the knee of other weights. A call itself does not wait for measurements."""
    speculation = models.speculate_captured(models.ADMITTED["llama"](), compile=False).speculation
    session = speculation.engine.session(2)
    known = lambda: {kind: {*policy.costs.measured} for kind, policy in session.policies.items()}  # noqa: E731
    session.make([(StepKind.ROUND, 1)])
    assert not any(known().values())
    before = [buffer.clone() for buffer in session.state.small_buffers()]
    speculation.warmup(2, do_sample=len(kinds) > 1)
    assert known() == {kind: {*SIZES} if kind in kinds else set() for kind in session.policies}
    assert all(map(torch.equal, before, session.state.small_buffers()))


@pytest.mark.parametrize(
    ("on_gpu", "has_experts", "batch", "few"),
    [(True, False, 1, []), (True, True, 1, [4]), (True, False, 8, []), (True, False, 16, [4]), (False, False, 1, [4])],
)
def test_a_quarter_of_a_tree_is_verified_if_nodes_cost_time(on_gpu, has_experts, batch, few):
    options, plan = SimpleNamespace(compile=False), SimpleNamespace(nodes=16)
    runtime = SimpleNamespace(
        on_gpu=on_gpu, has_experts=has_experts, options=options, cold_start=None, algorithm=SimpleNamespace(plan=plan)
    )
    steps = SimpleNamespace(runtime=runtime, batch=batch)
    assert Session._few_nodes(steps) == few


@pytest.mark.parametrize(("name", "has_experts"), [("mixtral", True), ("llama", False)])
def test_a_model_with_experts_is_known_by_its_graph(name, has_experts):
    runtime = models.speculate_captured(models.ADMITTED[name](), "ngram", compile=False).speculation.engine.runtime
    assert runtime.has_experts == has_experts


# --- roundcosts


KNEE = KNEES["cuda"]


def costs(measured, batch=1):
    known = RoundCosts(batch)
    known.measured.update(measured)
    return known


@pytest.mark.parametrize(
    ("batch", "measured", "nodes", "seconds"),
    [
        (1, {1: 1.0, 16: 2.5}, 4, 1.3),
        (8, {1: 1.0, 4: 2.0, 16: 8.0}, 8, 4.0),
        (1, {16: 2.0}, 4, 2.0 * (KNEE + 4) / (KNEE + 16)),
        (4, {4: 2.0, 8: 3.0}, 16, 3.0 * (KNEE + 64) / (KNEE + 32)),
        (4, {4: 2.0, 8: 3.0}, 1, 2.0 * (KNEE + 4) / (KNEE + 16)),
        (1, {1: 1.0, 16: 2.5}, 16, 2.5),
    ],
)
def test_sizes_that_have_not_run(batch, measured, nodes, seconds):
    assert costs(measured, batch).expected(nodes) == pytest.approx(seconds)


def test_a_duration_moves_by_its_weight_and_most_of_it_moves_the_others():
    known = costs({1: 1.0, 16: 4.0})
    known.learn(1, 1.5)
    assert known.measured[1] == pytest.approx(1 + LEARN * 0.5) and 4 < known.measured[16] < 4 * known.measured[1]
    known.learn(16, 1000.0)
    assert known.measured[16] < 4 * (1 + LEARN) ** 2
    known.learn(8, 3.0)
    assert known.measured[8] == 3.0
