"""PeerHealth against a naive model that keeps every event and reads the rules off the list."""

from hypothesis import given
from hypothesis import strategies as st

from petals_async.core.health import BASE_EXCLUSION_S, MAX_EXCLUSION_S, PeerHealth

MAX_PEERS = 3
events = st.lists(
    st.tuples(
        st.floats(0, 40),
        st.sampled_from("abcd"),
        st.sampled_from(["failure", "failure", "success", "readmit"]),
        st.sampled_from([None, 0.01, 0.5]),
    ),
    max_size=40,
)


class Naive:
    """All events; a peer's state is worked out from those since it was last forgotten."""

    def __init__(self):
        self.log = []

    def remembered(self):
        order = []
        for _, peer, kind, _ in self.log:
            if kind == "readmit" and peer not in order:
                continue
            order = [other for other in order if other != peer] + [peer]
            order = order[-MAX_PEERS:]
        return order

    def add(self, event):
        before = set(self.remembered())
        self.log.append(event)
        forgotten = before - set(self.remembered())
        if forgotten:
            self.log = [old for old in self.log if old[1] not in forgotten]

    def until(self, peer):
        failures, until = 0, -1.0
        for now, who, kind, _ in self.log:
            if who != peer:
                continue
            if kind != "failure":
                failures, until = 0, -1.0
            elif now >= until:
                until = now + min(MAX_EXCLUSION_S, BASE_EXCLUSION_S * 2**failures)
                failures += 1
        return until


@given(events)
def test_exclusions_agree_with_the_model(steps):
    health, naive, now = PeerHealth(max_peers=MAX_PEERS), Naive(), 0.0
    for wait, peer, kind, rtt_s in steps:
        now += wait
        if kind == "failure":
            health.record_failure(peer, now)
        elif kind == "success":
            health.record_success(peer, now, rtt_s)
        else:
            health.readmit(peer)
        naive.add((now, peer, kind, rtt_s))
        expected = {p: naive.until(p) for p in naive.remembered() if now < naive.until(p)}
        assert {p: exclusion.until for p, exclusion in health.excluded(now).items()} == expected
        assert health.next_readmission(now) == min(expected.values(), default=None)
        assert len(health) <= MAX_PEERS


@given(st.lists(st.floats(0, 10), min_size=1))
def test_a_smoothed_round_trip_stays_between_the_least_and_the_largest(rtts):
    health = PeerHealth()
    for now, rtt_s in enumerate(rtts):
        health.record_success("a", float(now), rtt_s)
    assert min(rtts) * (1 - 1e-9) - 1e-300 <= health.rtt_s("a") <= max(rtts) * (1 + 1e-9) + 1e-300
