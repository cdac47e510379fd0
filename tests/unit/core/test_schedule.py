"""The choice of a turn's steps: within the budget, single tokens first, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petals_async.core.schedule import PATIENCE, StepClass, WaitingStep, choose

steps = st.builds(
    WaitingStep,
    st.sampled_from(StepClass),
    st.integers(1, 700),
    st.integers(0, 2 * PATIENCE),
)


def test_nothing_waits() -> None:
    assert choose([]) == []


@given(st.lists(steps, min_size=1), st.integers(1, 600))
def test_a_turn_has_one_step_or_keeps_the_budget(waiting: list[WaitingStep], budget: int) -> None:
    chosen = choose(waiting, turn_tokens=budget)
    assert chosen
    assert len(set(chosen)) == len(chosen)
    assert len(chosen) == 1 or sum(waiting[index].num_tokens for index in chosen) <= budget


@given(st.lists(steps, min_size=1))
def test_single_tokens_go_before_whatever_is_not_overdue(waiting: list[WaitingStep]) -> None:
    for step in waiting:
        step.passed_over = 0
        step.num_tokens = 1 if step.kind is StepClass.DECODE else step.num_tokens
    decoding = [index for index, step in enumerate(waiting) if step.kind is StepClass.DECODE]
    assert choose(waiting)[: len(decoding)] == decoding


def test_an_overdue_prompt_goes_before_single_tokens() -> None:
    waiting = [WaitingStep(StepClass.DECODE, 1), WaitingStep(StepClass.PREFILL, 512, PATIENCE)]
    assert choose(waiting, turn_tokens=512) == [1]


@given(st.lists(st.builds(WaitingStep, st.sampled_from(StepClass), st.integers(1, 700)), min_size=1, max_size=12))
def test_nobody_starves_beside_sessions_that_decode_for_ever(first: list[WaitingStep]) -> None:
    """However many single tokens come anew each turn, what waited at the start has run after a bounded number."""
    waiting = list(first)
    left = list(first)
    for _turn in range(PATIENCE + len(first)):
        waiting += [WaitingStep(StepClass.DECODE, 1) for _ in range(8)]
        taken = choose(waiting, turn_tokens=16)
        gone = [waiting[index] for index in taken]
        left = [step for step in left if not any(step is other for other in gone)]
        waiting = [step for step in waiting if not any(step is other for other in gone)]
        for step in waiting:
            step.passed_over += 1
    assert left == []
