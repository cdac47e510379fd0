"""Runs an AnyIO function on trio's mock clock: time jumps ahead whenever all tasks wait. Needs trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from petals_async.errors import ConfigurationError

T = TypeVar("T")


def run_in_virtual_time(function: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """Run a function to its end, and return its result.

    The order in which tasks that are ready take their turns is drawn from the seed, so that the same seed gives the
    same run, and another seed another interleaving.

    Args:
        function: What to run; nothing in it may wait on a thread.
        *args: Its arguments.
        seed: Of the tasks' order.

    Raises:
        ConfigurationError: trio is not installed.
    """
    try:
        import trio
        import trio._core._run as scheduler
        from trio.testing import MockClock
    except ImportError as error:
        raise ConfigurationError("virtual time needs trio: pip install trio") from error
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    # Hypothesis sets it as well, by way of pytest-trio.
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    try:
        return trio.run(function, *args, clock=MockClock(autojump_threshold=0))
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
