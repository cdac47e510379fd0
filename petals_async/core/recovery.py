"""What a client does about an error: the one function that maps an error to an action. Nothing else retries.

Source: invariant I7 and the protocol's table of errors.
"""

from __future__ import annotations

from enum import Enum

from petals_async.errors import (
    ComputeError,
    PetalsAsyncError,
    PositionError,
    RemoteProtocolError,
    ServerDrainingError,
    ServerOverloadedError,
    ServerUnavailableError,
)


class Action(Enum):
    """What to do next."""

    RAISE = "raise"
    """To the caller as it is: the caller's fault, or nothing that another server could mend."""
    REPLAY = "replay"
    """On the same server, from the position that it stated."""
    MOVE = "move"
    """To another server; this one did nothing wrong and is not excluded for long."""
    EXCLUDE = "exclude"
    """To another server; this one is excluded for a while."""


def action_for(error: PetalsAsyncError, *, same_step_failures: int = 0) -> Action:
    """Return what to do about an error.

    Args:
        error: What happened.
        same_step_failures: How often this very step has already failed in computing, on other servers: an error
            that follows the request is the request's.
    """
    match error:
        case PositionError():
            return Action.REPLAY
        case ServerDrainingError() | ServerOverloadedError():
            return Action.MOVE
        case ComputeError():
            return Action.EXCLUDE if same_step_failures == 0 else Action.RAISE
        case ServerUnavailableError() | RemoteProtocolError():
            return Action.EXCLUDE
        case _:
            return Action.RAISE
