"""`WholeTreeBudget`: drafts that do not pay are made rarely, and those that pay always."""

import random
from types import SimpleNamespace

import pytest

from spec_compile.runtime.draft_budget import WholeTreeBudget
from spec_compile.runtime.draft_record import ALL, ALLOWED, NEVER, RARE, Group, TreeOutcome
from spec_compile.runtime.pipeline import InFlightRound, RoundPipeline
from spec_compile.runtime.session import StepKind

NODES = 16


def decode(policy, ratio, chance, tokens, seed=0):
    """Tokens a plain round. Trees cost `ratio` plain rounds, and parts of them in proportion.

    chance: that one more draft is accepted.
    """
    draw, time, length, trees = random.Random(seed), 0.0, 0, 0
    while length < tokens:
        nodes = policy.choose()
        gained = 0
        while gained < min(5, nodes - 1) and draw.random() < (chance(length) if callable(chance) else chance):
            gained += 1
        seconds = 1 + (ratio - 1) * (nodes - 1) / (NODES - 1)
        policy.learn(nodes, [TreeOutcome(nodes, ALL, list(range(1, gained + 1)))], seconds)
        time, length, trees = time + seconds, length + 1 + gained, trees + (nodes > 1)
    return length / time, trees


@pytest.mark.parametrize("ratio", [1.05, 1.3, 2.0, 4.3])
def test_drafts_that_are_never_accepted_lose_little(ratio):
    policy, tokens = WholeTreeBudget([NODES]), 128
    rate, _ = decode(policy, ratio, 0.0, tokens)
    lost = tokens * (1 / rate - 1)
    first = ratio - 1  # the first tree is made before anything is known
    assert lost <= ALLOWED + RARE * tokens + first
    assert decode(policy, ratio, 0.0, 2000)[0] > 1 - RARE - 0.005, "what was learned in one answer holds in the next"


@pytest.mark.parametrize("ratio", [1.05, 1.3, 2.0])
def test_drafts_that_pay_are_always_made(ratio):
    rates = [decode(WholeTreeBudget([NODES]), ratio, 0.9, 1000, seed) for seed in range(5)]
    for rate, trees in rates:
        assert trees >= 1000 / 6 and rate > 0.97 * (1 + 0.9 + 0.81 + 0.729 + 0.6561 + 0.59049) / ratio * 0.9


def test_a_text_that_alternates_is_faster_than_either():
    def chance(length):
        return 0.85 if length // 200 % 2 == 0 else 0.05

    rates = [decode(WholeTreeBudget([NODES]), 2.0, chance, 4000, seed)[0] for seed in range(5)]
    fixed = [decode(WholeTreeBudget([NODES], adaptive=False), 2.0, chance, 4000, seed)[0] for seed in range(5)]
    assert min(rates) > 1.15 and min(rates) > 1.2 * max(fixed)


@pytest.mark.parametrize(
    ("before", "after", "warnings"), [(0.8, 0.0, 1), (0.8, 0.02, 1), (0.8, 0.65, 0), (0.2, 0.0, 0)]
)
def test_a_lasting_fall_of_acceptance_is_told_once(caplog, before, after, warnings):
    for adaptive in (True, False):
        policy = WholeTreeBudget([NODES], adaptive)
        decode(policy, 1.2, before, 1000)
        assert not caplog.records
        for seed in range(3):
            decode(policy, 1.2, after, 4000, seed)
        assert len(caplog.records) == warnings and ("where" in caplog.text) == bool(warnings)
        caplog.clear()


def test_the_steps_before_a_round_that_drafts_count_as_its_cost():
    """A trial costs 1 + 3 plain rounds, where a round that follows another one costs 1."""
    plain, switching = WholeTreeBudget([NODES]), WholeTreeBudget([NODES])
    switching.costs.switch = 3.0
    trees = [decode(policy, 2.0, 0.0, 4000)[1] for policy in (plain, switching)]
    assert 3 < trees[0] / trees[1] < 5
    assert decode(switching, 2.0, 0.9, 1000)[1] > 1000 / 7, "drafts that pay are made without a pause"


def test_drafts_that_are_never_accepted_are_told_once(caplog):
    policy = WholeTreeBudget([NODES])
    for tokens in range(1, 2000):
        decode(policy, 1.2, 0.0, 1)
        assert bool(caplog.records) == (policy.record.drafted >= NEVER), tokens
    assert len(caplog.records) == 1 and f"first {NEVER} rounds" in caplog.text


@pytest.mark.parametrize("ratio", [2.0, 3.0])
def test_the_first_nodes_are_verified_if_that_is_best(ratio):
    """Half of the drafts are accepted: four nodes gain 0.88 of them, and 16 nodes 0.97."""
    for seed in range(5):
        rate, _ = decode(WholeTreeBudget([4, NODES]), ratio, 0.5, 3000, seed)
        assert rate > 0.95 * 1.875 / (1 + (ratio - 1) * 3 / 15) > 1.2 * 1.97 / ratio


def test_more_nodes_are_verified_again_when_they_pay():
    for seed in range(5):
        policy = WholeTreeBudget([4, NODES])
        decode(policy, 1.3, 0.4, 1000, seed)
        assert policy.best() == 4
        rate, _ = decode(policy, 1.3, 0.95, 3000, seed)
        assert policy.best() == NODES and rate > 0.95 * sum(0.95**depth for depth in range(6)) / 1.3


def test_few_nodes_do_not_tell_what_whole_trees_gain():
    """After a round over 4 nodes that has proposed 4, one over 16 has no more to accept."""
    policy = WholeTreeBudget([4, NODES], next_nodes=lambda nodes: nodes)
    policy.learn(NODES, [TreeOutcome(NODES, ALL, [1, 2, 3, 9, 10])], 2.0)
    policy.learn(4, [TreeOutcome(4, ALL, [1, 2, 3])], 1.2)
    assert policy.record.gain(NODES) == 5 and policy.record.gain(4) == 3
    policy.costs.switch = 0.5
    policy.learn(1, [TreeOutcome(4, ALL, [])], 1.0)
    policy.learn(4, [TreeOutcome(4, ALL, [1, 2, 3])], 1.2)
    assert policy._loss(NODES) == pytest.approx(2.0 - 1 + 0.5) and policy._loss(4) == pytest.approx(0.2)
    policy.learn(NODES, [TreeOutcome(4, ALL, [1, 2, 3])], 2.0)
    assert policy.record.gain(NODES) == 5 and policy._loss(NODES) == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "trials"), [(1, 8), (4, 2), (64, 1)])
def test_a_trial_of_many_rows_tells_as_much_as_many_of_one(rows, trials):
    policy, drafted = WholeTreeBudget([NODES]), 0
    policy.costs.measured.update({1: 1.0, NODES: 1.5})
    for _ in range(200):
        nodes = policy.choose()
        drafted += nodes > 1
        policy.learn(nodes, [TreeOutcome(NODES, ALL, [])] * rows, None)
    assert 2 <= drafted <= trials + RARE * 200 / 0.5


@pytest.mark.parametrize(("every", "least", "most"), [(2, 0, 0.15), (20, 0.75, 1)])
def test_drafts_that_prompts_interrupt_pay_for_each_switch(every, least, most):
    """A round that drafts costs 1.25 and gains 0.7 tokens, and one after a plain round costs 1 more. Prompts that come
    with every second round leave one of them between two plain ones, which loses 0.55."""
    policy, pending, drafted, time, tokens = WholeTreeBudget([2]), 1, 0, 0.0, 0.0
    policy.costs.measured.update({1: 1.0, 2: 1.25})
    policy.costs.switch = 1.0
    for number in range(400):
        rides = number % every == 0
        nodes = 1 if rides else policy.choose(pending=pending)
        gained = [1] if number % 10 < 7 else []
        time += policy.cost(nodes) + (nodes > pending) * 1.0
        tokens += 1 + (len(gained) if nodes > 1 else 0)
        policy.learn(nodes, [] if rides else [TreeOutcome(2, ALL, gained if nodes > 1 else [])], None)
        drafted, pending = drafted + (nodes > 1), nodes
    assert least <= drafted / 400 <= most and tokens / time > (0.96 if every == 2 else 1.2)


@pytest.mark.parametrize("ratio", [1.3, 2.5, 4.5])
def test_rounds_under_way_may_lose_as_well(ratio):
    """Two rounds are always under way, and nothing is accepted: together they stay within what may be lost."""
    policy, under_way, lost = WholeTreeBudget([NODES]), [], 0.0
    policy.costs.measured.update({1: 1.0, NODES: ratio})
    for _ in range(200):
        nodes = policy.choose(under_way=under_way)
        lost += policy.cost(nodes) - 1
        under_way.append(nodes)
        if len(under_way) == 2:
            policy.learn(under_way[0], [TreeOutcome(NODES, ALL, [])], None)
            del under_way[0]
    assert lost <= ALLOWED + RARE * 200


def test_records_are_shared_and_costs_are_not():
    small, large = WholeTreeBudget([NODES]), WholeTreeBudget([NODES])
    small.share(large)
    small.costs.measured.update({1: 1.0, NODES: 1.1})
    large.costs.measured.update({1: 1.0, NODES: 9.0})
    for _ in range(4):
        small.learn(NODES, [TreeOutcome(NODES, ALL, [1])], None)
    assert (small.choose(), large.choose()) == (NODES, 1)


def test_one_node_and_no_choice():
    assert WholeTreeBudget([1]).choose() == 1
    policy = WholeTreeBudget([NODES], adaptive=False)
    for _ in range(20):
        assert policy.choose() == NODES
        policy.learn(NODES, [TreeOutcome(NODES, ALL, [])], 1.0)
    policy = WholeTreeBudget([1])
    policy.learn(1, [TreeOutcome(1, ALL, [])], 1.0)
    assert policy.choose() == 1


def test_a_line_says_what_is_chosen():
    policy = WholeTreeBudget([NODES])
    assert not policy.describe()
    decode(policy, 2.0, 0.0, 200)
    made = "rounds over 1, 16 nodes have run"
    told = "16 nodes take 2.00 plain rounds, 0.00 drafts are accepted: one round in 100 drafts"
    assert policy.describe() == f"{told}; {made}"
    decode(policy, 1.5, 1.0, 900)
    assert policy.describe().endswith(f"every round drafts; {made}")
    assert not WholeTreeBudget([NODES], adaptive=False).describe()


def test_a_session_of_other_rows_does_not_try_again_what_never_paid():
    first = WholeTreeBudget([NODES])
    decode(first, 2.0, 0.0, 90)
    later = WholeTreeBudget([NODES], record=first.record, batch=8)
    assert later.choose() == 1
    rate, trees = decode(later, 5.0, 0.0, 400)
    assert trees <= 1 + RARE * 400 / 4 and rate > 0.98


def confident(policy, chance, rounds, seed=0):
    """Rounds of trees whose confidence is 0 or 5: the drafts of the one are wrong, of the other right with `chance`.
    Returns the sizes chosen for each."""
    draw, chosen = random.Random(seed), {0: [], 5: []}
    for _ in range(rounds):
        confidence = draw.choice([0, 5])
        nodes = policy.choose([Group(0, confidence)])
        gained = 0
        while confidence and gained < min(5, nodes - 1) and draw.random() < chance:
            gained += 1
        tree = TreeOutcome(nodes, Group(0, confidence), [*range(1, gained + 1)])
        policy.learn(nodes, [tree], {1: 1.0, 4: 1.5, NODES: 1.6}[nodes])
        chosen[confidence].append(nodes)
    return {confidence: nodes[rounds // 4 :] for confidence, nodes in chosen.items()}


def test_a_round_follows_the_confidence_in_its_trees():
    chosen = confident(WholeTreeBudget([4, NODES]), 0.95, 400)
    assert chosen[5].count(NODES) > 0.95 * len(chosen[5])
    assert chosen[0].count(1) > 0.8 * len(chosen[0])
    dear = WholeTreeBudget([4, NODES])
    dear.costs.switch = 2.0
    chosen = confident(dear, 0.95, 400)
    assert chosen[0].count(1) == 0 and chosen[0].count(4) > 30, "a plain round costs the switch"


def test_drafts_that_fail_with_an_adapter_are_made_without_it():
    """Four nodes are accepted whole without an adapter, and never with the adapter of number 3."""
    policy, drafted = WholeTreeBudget([NODES]), {0: 0, 3: 0}
    for number in range(400):
        group = Group((0, 3)[number // 20 % 2], 0)
        nodes = policy.choose([group])
        drafted[group.adapter] += nodes > 1
        gained = [1, 2, 3] if nodes > 1 and not group.adapter else []
        policy.learn(nodes, [TreeOutcome(NODES, group, gained)], 1.0 if nodes == 1 else 2.0)
    assert drafted[0] >= 195 and drafted[3] <= 30
    both = [Group(0, 0), Group(3, 0)]
    assert policy.record.gain(NODES, both) == pytest.approx(sum(policy.record.gain(NODES, [each]) for each in both) / 2)
    assert policy.choose(both[:1]) == policy.best(both) == NODES and policy.best(both + both[1:] * 6) == 1
    assert policy.record.gain(NODES, [Group(5)]) == policy.record.gain(NODES)  # one that nobody knows yet


def test_drafts_may_pay_once_texts_are_long(monkeypatch):
    """Rounds over 1 and 2 nodes were measured with 7 and 12 ms, and longer texts add 11 ms to both. Rounds with prompts
    or a proposal, and the first one, tell nothing."""
    policy = WholeTreeBudget([2])
    policy.costs.measured.update({1: 7.0, 2: 12.0})
    assert policy.cost(2) == pytest.approx(12 / 7)
    stats, plan = SimpleNamespace(seconds={"compile": 0}), SimpleNamespace(nodes=2, is_whole=True)
    pipeline = RoundPipeline(SimpleNamespace(stats=stats, algorithm=SimpleNamespace(plan=plan)))
    session, time = SimpleNamespace(policies={StepKind.ROUND: policy}), [0.0]
    monkeypatch.setattr(RoundPipeline, "_now", lambda _: time[0])

    def in_flight(seconds, is_alone):
        def read():
            time[0] += seconds
            return []

        pipeline._rounds.append(InFlightRound(session, StepKind.ROUND, 1, None, [], {}, True, is_alone, read, 0.0))

    in_flight(90.0, True)
    for number in range(40):
        in_flight(18.0 if number % 2 else 60.0, bool(number % 2))
        pipeline.collect()
    assert policy.costs.longer == pytest.approx(11.0) and policy.cost(2) == pytest.approx(23 / 18)
