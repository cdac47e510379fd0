"""Exclusions and round trips of peers."""

import pytest

from petals_async.core.health import MAX_EXCLUSION_S, Exclusion, PeerHealth
from petals_async.errors import RequestError


def test_exclusions_double_up_to_a_bound():
    health, now, lengths = PeerHealth(), 100.0, []
    for _ in range(8):
        until = health.record_failure("a", now, "SILENT").until
        lengths.append(until - now)
        now = until
    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_EXCLUSION_S, MAX_EXCLUSION_S, MAX_EXCLUSION_S]


def test_failures_during_an_exclusion_are_the_same_failure():
    health = PeerHealth()
    first = health.record_failure("a", 0.0, "SILENT")
    assert health.record_failure("a", 0.5, "STREAM_LOST") == first == Exclusion(1.0, "SILENT")
    assert health.record_failure("a", 1.0, "STREAM_LOST") == Exclusion(3.0, "STREAM_LOST")


def test_an_exclusion_is_over_at_its_end():
    health = PeerHealth()
    health.record_failure("a", 0.0, "SILENT")
    assert health.excluded(0.99) == {"a": Exclusion(1.0, "SILENT")}
    assert health.excluded(1.0) == {}
    assert (health.next_readmission(0.99), health.next_readmission(1.0)) == (1.0, None)


def test_a_success_readmits_and_starts_the_backoff_again():
    health = PeerHealth()
    health.record_failure("a", 0.0)
    health.record_failure("a", 1.0)
    health.record_success("a", 1.5)
    assert health.excluded(1.5) == {}
    assert health.record_failure("a", 2.0).until == 3.0


def test_readmit_keeps_the_round_trip():
    health = PeerHealth()
    health.record_success("a", 0.0, 0.02)
    health.record_failure("a", 1.0)
    health.readmit("a")
    health.readmit("unknown")
    assert (health.excluded(1.0), health.rtt_s("a"), len(health)) == ({}, 0.02, 1)


def test_round_trips_are_smoothed():
    health = PeerHealth()
    assert health.rtt_s("a") is None
    health.record_success("a", 0.0, 0.080)
    health.record_success("a", 1.0)
    health.record_success("a", 2.0, 0.160)
    assert health.rtt_s("a") == pytest.approx(0.090)


@pytest.mark.parametrize("rtt_s", [-0.1, float("nan"), float("inf")])
def test_a_round_trip_that_cannot_be_is_refused(rtt_s):
    with pytest.raises(RequestError, match="round trip"):
        PeerHealth().record_success("a", 0.0, rtt_s)


def test_the_least_recently_heard_of_is_forgotten():
    health = PeerHealth(max_peers=2)
    health.record_failure("a", 0.0)
    health.record_failure("b", 0.0)
    health.record_failure("a", 0.5)
    health.record_failure("c", 0.5)
    assert sorted(health.excluded(0.5)) == ["a", "c"]
