"""Runs an AnyIO function on trio's mock clock: time jumps ahead whenever all tasks wait. Needs trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from petals_async.errors import ConfigurationError

T = TypeVar("T")


@contextmanager
def fixed_task_order(seed: int) -> Iterator[None]:
    """Let trio draw the order in which tasks that are ready take their turns from a seed.

    Raises:
        ConfigurationError: trio is not installed.
    """
    try:
        import trio._core._run as scheduler
    except ImportError as error:
        raise ConfigurationError("virtual time needs trio: pip install trio") from error
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    # As pytest-trio does it for Hypothesis.
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]


def run_in_virtual_time(function: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """Run a function to its end, and return its result; the same seed gives the same run.

    Args:
        function: What to run; nothing in it may wait on a thread.
        *args: Its arguments.
        seed: Of the tasks' order.

    Raises:
        ConfigurationError: trio is not installed.
    """
    with fixed_task_order(seed):
        import trio
        from trio.testing import MockClock

        return trio.run(function, *args, clock=MockClock(autojump_threshold=0))
