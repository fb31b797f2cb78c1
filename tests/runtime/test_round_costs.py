"""`RoundCosts`: durations of sizes that have run, and those expected of others."""

import pytest

from spec_compile.runtime.draft_budget import KNEES, LEARN, RoundCosts

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
