"""Conformance checks of RunSession: does a block server keep the rules of the wire contract?

Every check is `async def check_xxx(target)`; `CHECKS` lists them all, each named after what it shows, with the
rule's number in its docstring. They speak raw messages of `core/messages.py` over `abc.SessionStream`, so that
they run against any server to which there is a connector; they are plain AnyIO. Expectations come from a small
model of the rules (`Model`): the tokens that should be held, and the only step id that should run next.

What a check needs beyond the wire (evicting a session, stopping the computing) is a hook of `Target`. A target
that doesn't offer it makes the check raise `NotOfferedError`, which a test shows as skipped.
"""

from petals_async.testing.conformance import (
    compute_checks,
    input_checks,
    life_checks,
    memory_checks,
    server_checks,
    step_checks,
)
from petals_async.testing.conformance.target import (
    CHECKS,
    ConformanceError,
    NotOfferedError,
    Target,
    make_states,
)
from petals_async.testing.conformance.wire import handle_of

FAMILIES = (server_checks, step_checks, life_checks, memory_checks, compute_checks, input_checks)
"""The modules with the checks, each of which adds its own to `CHECKS`."""

__all__ = ["CHECKS", "FAMILIES", "ConformanceError", "NotOfferedError", "Target", "handle_of", "make_states"]
