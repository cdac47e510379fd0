"""Peer health, as one client sees it: who is left out of plans for a while, and how far away each peer is.

Theory. A peer that failed is excluded for BASE_EXCLUSION_S, and for twice as long at each further failure, up
to MAX_EXCLUSION_S. So a dead peer costs one attempt now and then, and a restarted one is used again soon.

Rules:

- The caller decides what a failure is: a lost or silent peer is one, a bad request or a full queue is none.
- A failure of a peer that is excluded already changes nothing: a server that takes sixteen sessions down with
  it has failed once.
- A success ends the exclusion and forgets the failures: a peer that answers is there.
- At most MAX_PEERS are remembered; the one least recently heard of is forgotten first, and stands as unknown.
- Time is passed in as `now`, in seconds of any clock that doesn't run backwards.

Source for the smoothing: RFC 6298, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from petals_async.errors import RequestError

BASE_EXCLUSION_S = 1.0
"""How long a peer is excluded after its first failure, in seconds."""

MAX_EXCLUSION_S = 30.0
"""No exclusion is longer, in seconds."""

MAX_PEERS = 4096
"""This many peers are remembered."""

RTT_SMOOTHING = 1 / 8
"""Weight of a new round trip in the smoothed one."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why a peer is left out, and until when: `now < until`."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Peer:
    failures: int = 0
    until: float = -math.inf
    reason: str = ""
    rtt_s: float | None = None

    @property
    def exclusion_s(self) -> float:
        """How long the next exclusion will be, in seconds."""
        return min(MAX_EXCLUSION_S, BASE_EXCLUSION_S * 2.0 ** min(self.failures, 32))


class PeerHealth:
    """What a client knows of its peers' health; see the rules at the head of the file.

    Args:
        max_peers: How many peers are remembered.
    """

    def __init__(self, *, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._peers: dict[str, _Peer] = {}  # the least recently heard of first

    def __len__(self) -> int:
        return len(self._peers)

    def record_failure(self, server_id: str, now: float, reason: str = "") -> Exclusion:
        """Exclude a peer that failed.

        Args:
            server_id: Who.
            now: The time, in seconds.
            reason: Why, for people and error messages.

        Returns:
            The exclusion that holds now; the older one if the peer was excluded already.
        """
        peer = self._peers.get(server_id, _Peer())
        if now >= peer.until:
            until = now + peer.exclusion_s
            peer = replace(peer, failures=peer.failures + 1, until=until, reason=reason)
        self._put(server_id, peer)
        return Exclusion(peer.until, peer.reason)

    def record_success(self, server_id: str, now: float, rtt_s: float | None = None) -> None:
        """Readmit a peer that answered, and forget its failures.

        Args:
            server_id: Who.
            now: The time, in seconds.
            rtt_s: The round trip without the computing, in seconds; None when it wasn't measured.

        Raises:
            RequestError: The round trip is negative or not a number.
        """
        if rtt_s is not None and not 0 <= rtt_s < math.inf:
            raise RequestError(f"a round trip is a number of seconds from 0 on, got {rtt_s}")
        before = self.rtt_s(server_id)
        self._put(server_id, _Peer(rtt_s=_smoothed(before, rtt_s)))

    def readmit(self, server_id: str) -> None:
        """End a peer's exclusion and forget its failures, not its round trip; an unknown one is no error."""
        if server_id in self._peers:
            self._put(server_id, _Peer(rtt_s=self._peers[server_id].rtt_s))

    def excluded(self, now: float) -> dict[str, Exclusion]:
        """Return who is excluded at `now`, until when, and why."""
        return {
            server_id: Exclusion(peer.until, peer.reason) for server_id, peer in self._peers.items() if now < peer.until
        }

    def next_readmission(self, now: float) -> float | None:
        """Return when the first exclusion ends that holds at `now`, or None if nobody is excluded."""
        return min((peer.until for peer in self._peers.values() if now < peer.until), default=None)

    def rtt_s(self, server_id: str) -> float | None:
        """Return a peer's smoothed round trip in seconds, or None if none was measured."""
        peer = self._peers.get(server_id)
        return None if peer is None else peer.rtt_s

    def _put(self, server_id: str, peer: _Peer) -> None:
        """Keep a peer as the most recently heard of."""
        self._peers.pop(server_id, None)
        self._peers[server_id] = peer
        while len(self._peers) > self._max_peers:
            del self._peers[next(iter(self._peers))]


def _smoothed(before: float | None, rtt_s: float | None) -> float | None:
    if before is None or rtt_s is None:
        return before if rtt_s is None else rtt_s
    return before + RTT_SMOOTHING * (rtt_s - before)
