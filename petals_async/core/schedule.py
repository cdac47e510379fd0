"""Which of the waiting steps a compute worker takes in its next turn.

Theory. A turn's time grows with its tokens, and every session in the turn waits for all of it. So single tokens go
first, all that fit, and longer steps fill what is left of a token budget: prompts before replays, those before what
nobody waits for. Steps that were passed over `PATIENCE` turns go before all others, the oldest first, so that each step
runs after a number of turns that depends only on how many came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

TURN_TOKENS = 512
"""Tokens of one turn (rows times tokens of each step); a step that is longer by itself has a turn of its own."""

PATIENCE = 4
"""Turns that a step may be passed over before it goes first."""


class StepClass(IntEnum):
    """What a step is for, the most urgent first."""

    DECODE = 0
    PREFILL = 1
    REPLAY = 2
    TRAINING = 3
    STANDBY = 4


@dataclass(slots=True)
class WaitingStep:
    """A step as the schedule sees it.

    Attributes:
        kind: What it is for.
        num_tokens: New tokens of all its rows.
        passed_over: Turns that went by without it.
    """

    kind: StepClass
    num_tokens: int
    passed_over: int = 0


def choose(waiting: Sequence[WaitingStep], *, turn_tokens: int = TURN_TOKENS) -> list[int]:
    """Choose the steps of one turn.

    Args:
        waiting: In the order of arrival.
        turn_tokens: Most tokens of a turn with more than one step.

    Returns:
        Indices, in the order in which they were chosen; not empty unless nothing waits.
    """
    order = sorted(
        range(len(waiting)),
        key=lambda index: (0,) if waiting[index].passed_over >= PATIENCE else (1, waiting[index].kind),
    )
    chosen: list[int] = []
    tokens = 0
    for index in order:
        if chosen and tokens + waiting[index].num_tokens > turn_tokens:
            if waiting[index].passed_over >= PATIENCE:
                break  # nothing overtakes it for ever
            continue
        chosen.append(index)
        tokens += waiting[index].num_tokens
    return chosen
