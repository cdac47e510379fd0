"""The one function that maps an error to an action, against the protocol's table."""

import pytest

from petals_async import errors
from petals_async.core.reasons import ERROR_OF_REASON, error_from_reason
from petals_async.core.recovery import Action, action_for

TABLE = {
    "ServerUnavailableError": Action.EXCLUDE,
    "ServerDrainingError": Action.MOVE,
    "ServerOverloadedError": Action.MOVE,
    "SessionLostError": Action.REPLAY,
    "OffsetGapError": Action.REPLAY,
    "ComputeError": Action.EXCLUDE,
    "RemoteProtocolError": Action.EXCLUDE,
    "RequestError": Action.RAISE,
    "LengthExceededError": Action.RAISE,
    "AuthError": Action.RAISE,
    "NoRouteError": Action.RAISE,
    "RegistryUnavailableError": Action.RAISE,
    "CheckpointError": Action.RAISE,
    "UnsupportedModelError": Action.RAISE,
    "ConfigurationError": Action.RAISE,
    "ClosedError": Action.RAISE,
}
ABSTRACT = {"PetalsAsyncError", "PeerError", "PositionError"}


def kinds():
    found = [errors.PetalsAsyncError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return {kind.__name__: kind for kind in found if kind.__module__ == errors.__name__}


def test_every_error_has_its_action():
    assert set(kinds()) == set(TABLE) | ABSTRACT
    for name, action in TABLE.items():
        assert action_for(kinds()[name]("it happened")) is action, name


def test_an_error_in_computing_that_follows_the_step_is_raised():
    assert action_for(errors.ComputeError("NaN"), same_step_failures=1) is Action.RAISE
    assert action_for(errors.ServerUnavailableError("gone"), same_step_failures=9) is Action.EXCLUDE


def test_bad_requests_are_never_retried_and_exclude_nobody():
    for reason, kind in ERROR_OF_REASON.items():
        if issubclass(kind, errors.RequestError | errors.AuthError):
            assert action_for(error_from_reason(reason, "no")) is Action.RAISE


@pytest.mark.parametrize(
    "name",
    sorted(
        set(TABLE)
        - {
            "NoRouteError",
            "RegistryUnavailableError",
            "CheckpointError",
            "UnsupportedModelError",
            "ConfigurationError",
            "ClosedError",
        }
    ),
)
def test_what_may_travel_comes_back_from_its_own_reason(name):
    kind = kinds()[name]
    assert ERROR_OF_REASON[kind.default_reason] is kind


def test_a_reason_of_a_newer_peer_excludes_it():
    error = error_from_reason("WEATHER", "it rains", server="s")
    assert type(error) is errors.RemoteProtocolError
    assert (error.reason, error.server, action_for(error)) == ("WEATHER", "s", Action.EXCLUDE)


def test_what_the_server_stated_is_kept():
    gap = error_from_reason("OFFSET_GAP", "a hole", server="s", position=7, next_step_id=3, retry_after_s=9.0)
    assert (gap.position, gap.next_step_id, gap.server) == (7, 3, "s")
    full = error_from_reason("QUEUE_FULL", "wait", server="s", position=7, retry_after_s=9.0)
    assert (full.retry_after_s, full.server) == (9.0, "s")
