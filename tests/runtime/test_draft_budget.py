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
from spec_compile.runtime.session import Session

SIZES = (1, 4, 16)
CPU = {1: 1.0, 4: 1.5, 16: 2.8}
"""Seconds a round on a processor that is soon compute-bound."""
STEEP = {1: 1.0, 4: 1.5, 16: 4.0}
"""The same, more so."""
FLAT = {1: 1.0, 4: 1.01, 16: 1.02}
"""Seconds a round where memory is the limit: nodes are almost free."""


class Budget(VaryingTreeBudget):
    """A `VaryingTreeBudget` of rows without adapters, by confidence."""

    def choose(self, counts, confidences):
        return super().choose([Group(0, each) for each in confidences], counts)

    def choose_ahead(self, confidences=()):
        return super().choose([Group(0, each) for each in confidences])

    def learn(self, nodes, counts, confidences, paths, seconds):
        groups = [Group(0, each) for each in confidences]
        super().learn(nodes, [*map(TreeOutcome, counts, groups, paths)], seconds)


def measured(costs, adaptive=True):
    policy = Budget(SIZES, adaptive)
    policy.costs.measured.update(costs)
    return policy


def drive(policy, costs, accepted, rounds, count=16, confidence=1):
    """Run rounds in which the chain 1, 2, .. `accepted` of the offered tree is right; returns the sizes chosen."""
    chosen = []
    for _ in range(rounds):
        nodes = policy.choose([count], [confidence])
        chosen.append(nodes)
        path = [node for node in range(1, accepted + 1) if node < nodes]
        policy.learn(nodes, [count], [confidence], [path], costs[nodes])
    return chosen


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1], [0]])
def test_without_drafts_nothing_but_the_root_is_verified(counts, adaptive):
    assert measured(FLAT, adaptive).choose(counts, [0] * len(counts)) == 1


@pytest.mark.parametrize("counts, size", [([2], 4), ([4], 4), ([5], 16), ([16], 16), ([1, 3], 4), ([1, 9, 2], 16)])
@pytest.mark.parametrize("costs", [{}, {1: 1.0}])
def test_unmeasured_sizes_and_fixed_ones_hold_the_whole_tree(counts, size, costs):
    confidences = [1] * len(counts)
    assert measured(costs).choose(counts, confidences) == size
    assert measured(CPU, adaptive=False).choose(counts, confidences) == size


def test_a_size_larger_than_the_smallest_that_fits_is_never_chosen():
    policy = measured(FLAT)
    drive(policy, FLAT, accepted=15, rounds=50)
    assert policy.choose([2], [1]) in (1, 4)
    assert policy.choose([4], [1]) in (1, 4)


def test_useless_drafts_are_given_up():
    """And looked at again now and then, but rarely."""
    chosen = drive(measured(CPU), CPU, accepted=0, rounds=2000)
    assert chosen[0] > 1 and chosen[50:150].count(1) >= 80
    assert 0 < sum(n > 1 for n in chosen[100:]) < 0.2 * 1900


def test_the_size_follows_what_is_accepted():
    wanted = {0: 1, 2: 4, 3: 4, 15: 16}
    found = {accepted: mode(drive(measured(CPU), CPU, accepted, 100)[50:]) for accepted in wanted}
    assert found == wanted


# STEEP: a size 4 that is always accepted whole earns 4 / 1.5 = 2.7 tokens a second, more than the prior promises of 16
# (8.5 / 4), though 16 would earn 16 / 4.
@pytest.mark.parametrize("costs", [CPU, STEEP])
def test_larger_sizes_return_when_they_pay_again(costs):
    policy = measured(costs)
    assert mode(drive(policy, costs, accepted=0, rounds=100)[50:]) == 1
    chosen = drive(policy, costs, accepted=15, rounds=400)
    assert chosen.index(16) < 300
    assert chosen[-1] == 16


def test_what_is_learnt_is_kept_apart_by_confidence():
    policy = measured(CPU)
    for _ in range(60):
        drive(policy, CPU, accepted=0, rounds=1, confidence=1)
        drive(policy, CPU, accepted=15, rounds=1, confidence=8)
    assert policy.choose([16], [1]) == 1
    assert policy.choose([16], [8]) == 16
    assert policy.choose([16, 16, 16], [1, 8, 8]) == 16


def test_a_size_that_got_slower_is_left():
    policy = measured(FLAT)
    assert drive(policy, FLAT, accepted=2, rounds=60)[-1] in (4, 16)
    slow = {1: 1.0, 4: 1.0, 16: 50.0}
    assert drive(policy, slow, accepted=2, rounds=200)[-1] == 4


def test_rows_without_a_draft_neither_gain_nor_teach():
    policy = measured(CPU)
    policy.learn(4, [1, 1], [0, 0], [[], []], CPU[4])
    assert policy.choose([1, 16], [0, 1]) == measured(CPU).choose([1, 16], [0, 1])


def test_ahead_of_its_trees_the_size_follows_the_newest_known_ones():
    """A text that repeats itself for 60 tokens after each 60 new ones; trees are known one round late."""
    policy, rates = measured(CPU), {}
    for system in ("adaptive", 1, 16):
        length, seconds, bucket = 0, 0.0, NO_TREE
        while length < 3000:
            nodes = policy.choose_ahead([bucket]) if system == "adaptive" else system
            repeats = length // 60 % 2
            path = [node for node in range(1, 8) if node < nodes] if repeats else []
            if system == "adaptive":
                policy.learn(nodes, [16 if repeats else 1], [bucket], [path], None)
            length, seconds = length + 1 + len(path), seconds + CPU[nodes]
            bucket = 8 if repeats else NO_TREE
        rates[system] = length / seconds
    assert rates["adaptive"] > 1.3 * max(rates[1], rates[16])


@pytest.mark.parametrize("rows, costs", [(1, CPU), (16, STEEP), (64, {1: 1.0, 4: 1.6, 16: 4.0})])
def test_trying_costs_little_however_many_rows_there_are(rows, costs):
    """Where drafts never help, a plain round for each row would be best."""
    policy, seconds = measured(costs), 0.0
    for _ in range(1000):
        nodes = policy.choose([16] * rows, [1] * rows)
        policy.learn(nodes, [16] * rows, [1] * rows, [[]] * rows, None)
        seconds += costs[nodes]
    assert costs[1] * 1000 < seconds < 1.15 * costs[1] * 1000


@pytest.mark.parametrize("rows, accepted, best", [(1, 7, 16), (16, 0, 1), (64, 0, 1), (64, 6, 4), (64, 15, 16)])
def test_sizes_that_have_not_run_are_tried_where_they_may_pay(rows, accepted, best):
    """Rounds of an 8B model on a GPU, whose costs are known once they are built; without a warm-up the largest is the
    first. Drafts of each third row are accepted."""
    policy, costs, chosen = Budget(SIZES, batch=rows), {n: 4 + 0.015 * n * rows for n in SIZES}, []
    for _ in range(200):
        nodes = policy.choose_ahead()
        policy.costs.measured[nodes] = costs[nodes]
        path = [node for node in range(1, accepted + 1) if node < nodes]
        paths = [[] if row % 3 else path for row in range(rows)]
        policy.learn(nodes, [16] * rows, [1] * rows, paths, None)
        chosen.append(nodes)
    assert chosen[0] == 16 and mode(chosen) == best
    assert chosen.count(best) > 150
    assert rows > 1 or set(policy.costs.measured) == {16}  # nothing is compiled that could not pay


# With hindsight -------------------------------------------------------------------------------------------------------


class Foretold:
    """Stands for `Hindsight`: of each tree, the accepted path of all its nodes, known before the next round."""

    def __init__(self):
        self.known = []

    def look(self):
        known, self.known = self.known, []
        return known


def spend(policy, costs, trees, count=16):
    """Rounds over `trees`, each (confidence, tokens that the text follows the chain 1, 2, ..).

    Returns seconds and tokens.
    """
    seconds, tokens = 0.0, 0
    for confidence, accepted in trees:
        nodes = policy.choose([count], [confidence])
        gained = min(accepted, nodes - 1)
        policy.learn(nodes, [count], [confidence], [list(range(1, gained + 1))], costs[nodes])
        policy.hindsight.known.append((confidence, list(range(1, accepted + 1))))
        seconds, tokens = seconds + costs[nodes], tokens + 1 + gained
    return seconds, tokens


def foreseeing(costs):
    policy = Budget(SIZES, hindsight=Foretold())
    policy.costs.measured.update(costs)
    return policy


@pytest.mark.parametrize("costs", [CPU, STEEP, FLAT])
def test_with_hindsight_failing_drafts_cost_one_round(costs):
    confidences = [1 + number % 12 for number in range(128)]  # a new confidence is no reason to try again
    seconds, _ = spend(foreseeing(costs), costs, [(confidence, 0) for confidence in confidences])
    assert seconds <= 127 * costs[1] + costs[16]


@pytest.mark.parametrize("costs", [CPU, STEEP])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3, 0.6])
def test_with_hindsight_no_text_is_slower_than_plain(costs, share):
    """Drafts of which only so many have a right first node, at random: a token costs at most 2 % more than plain."""
    draw = random.Random(0)
    trees = [(draw.choice((1, 1, 1, 2, 3)), draw.choice((1, 1, 2, 5)) if draw.random() < share else 0)
             for _ in range(4000)]  # fmt: skip
    seconds, tokens = spend(foreseeing(costs), costs, trees)
    assert seconds <= 1.02 * tokens * costs[1]


def test_with_hindsight_plain_rounds_show_that_drafts_would_pay():
    policy = foreseeing(STEEP)
    spend(policy, STEEP, [(1, 0)] * 50)
    assert policy.choose([16], [1]) == 1
    spend(policy, STEEP, [(1, 15)] * 12)
    assert policy.choose([16], [1]) == 16
    assert policy.choose([16], [7]) == 16  # of which nothing is known


def test_fewer_nodes_are_never_expected_to_cost_more():
    """A size may have been measured while the machine was busy."""
    for busy in (1, 4):
        policy = foreseeing({**CPU, busy: 50.0})
        policy.hindsight.known.append((1, []))
        assert policy.choose([16], [1]) == 1
    policy = foreseeing({**CPU, 4: 50.0})
    policy.hindsight.known.append((1, list(range(1, 16))))
    assert policy.choose([16], [1]) == 16


def test_costs_are_measured_over_tokens_that_differ():
    """Equal tokens go to the same experts of a mixture, so that 64 of them would cost what one does."""
    model = models.ADMITTED["mixtral"]()
    session = speculate(model, compile=False).speculation.engine.session(2)
    trees = []
    for _ in range(2):
        session._seconds(lambda: trees.append(session.state.tree_tokens.clone()), ())
        session.state.root()
    assert torch.equal(*trees) and trees[0].unique().numel() > models.VOCAB / 2


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


def test_a_round_lasts_as_long_as_the_hosts_work():
    known = costs({1: 1.0, 16: 4.0})
    known.learn_host(2.0)
    assert [known.expected(nodes) for nodes in (1, 4, 16)] == [2.0, 2.0, 4.0]


def test_a_duration_moves_by_its_weight_and_most_of_it_moves_the_others():
    known = costs({1: 1.0, 16: 4.0})
    known.learn(1, 1.5)
    assert known.measured[1] == pytest.approx(1 + LEARN * 0.5) and 4 < known.measured[16] < 4 * known.measured[1]
    known.learn(16, 1000.0)
    assert known.measured[16] < 4 * (1 + LEARN) ** 2
    known.learn(8, 3.0)
    assert known.measured[8] == 3.0


def test_the_switch_is_a_running_mean():
    known = RoundCosts()
    known.learn_switch(1.0)
    known.learn_switch(100.0)
    assert known.switch == pytest.approx(1 + LEARN)
