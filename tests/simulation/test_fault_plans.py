"""The fault campaign: whatever dies, every output is that of the whole model, and in the end nothing is left.

A seed that fails prints its plan. To look at one: `run_seed(SEED).trace`.
PETALS_ASYNC_SIM_SEEDS sets the number of seeds.
"""

import os
from collections import Counter

import pytest

from petals_async.testing.campaign import run_seed
from petals_async.testing.faults import FaultKind, FaultPlan, Moment, makes_sense

NUM_SEEDS = int(os.environ.get("PETALS_ASYNC_SIM_SEEDS", "300"))
SEEDS_A_TEST = 25


@pytest.fixture(autouse=True)
def in_virtual_time():
    """Each seed brings its own clock and order of tasks."""


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_every_seed_is_as_the_reference(first):
    outcomes = [run_seed(seed) for seed in range(first, min(first + SEEDS_A_TEST, NUM_SEEDS))]
    wrong = [str(outcome) for outcome in outcomes if outcome.problem]
    assert not wrong, "\n".join(wrong)
    assert sum(outcome.num_calls for outcome in outcomes) > 5 * len(outcomes)


def test_the_same_seed_gives_the_same_trace():
    for seed in (7, 11, 23, 42):
        first, second = run_seed(seed), run_seed(seed)
        assert first == second
        assert len(first.trace) > 10
    assert run_seed(7).trace != run_seed(8).trace


def test_the_campaign_is_not_idle():
    """Every kind of fault and every moment comes true, sessions recover, calls are cancelled."""
    outcomes = [run_seed(seed) for seed in range(60)]
    fired = Counter(part for outcome in outcomes for fault in outcome.fired for part in (fault.kind, fault.moment))
    assert {kind for kind in FaultKind if kind is not FaultKind.CONTINUE} | set(Moment) <= fired.keys()
    assert sum(outcome.num_recoveries for outcome in outcomes) > 60
    assert sum(outcome.num_cancelled for outcome in outcomes) > 60


def test_random_plans_make_sense():
    for seed in range(200):
        plan = FaultPlan.random(seed, ["a", "b", "c"], num_tokens=9, max_faults=7)
        assert 1 <= len(plan.faults) <= 7
        assert all(makes_sense(fault.moment, fault.kind) and fault.token < 9 for fault in plan.faults)
        assert FaultPlan.parse(str(plan)) == plan
