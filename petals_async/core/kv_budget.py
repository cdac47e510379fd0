"""Who may hold KV memory on a server, within a budget in bytes.

Theory. KV is only a cache, so it may be dropped under pressure; the client replays. What may not happen is
that a session whose step is being computed loses its memory, or that two sessions that don't fit together
evict each other for ever without a token coming out. Rules (protocol, rule 8):

- A pinned session (one with an unanswered step) is never evicted.
- Orphans (sessions whose stream is gone) go first, the longest idle first.
- Others go only when their protection has run out: `MIN_PROTECTION_S` after their last step, or
  `REPLAY_PROTECTION_FACTOR` times what their last replay cost, whichever is longer.
- What is larger than the whole budget is refused for good; what doesn't fit now is told when to try again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

MIN_PROTECTION_S = 1.0
"""A session keeps its memory at least this long after its last step."""

REPLAY_PROTECTION_FACTOR = 4.0
"""A session that has replayed keeps its memory for this many times the replay's computing time."""


@dataclass(slots=True)
class _Holding:
    num_bytes: int
    last_used: float
    protected_until: float
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The memory is granted, after these sessions are evicted."""

    evicted: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class NotNow:
    """The memory isn't there now; it may be in this many seconds."""

    retry_after_s: float


class KvBudget:
    """The holdings of all sessions, in bytes.

    Args:
        capacity_bytes: The budget.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._holdings: dict[Hashable, _Holding] = {}
        self._pins: Counter[Hashable] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes held by all sessions."""
        return sum(holding.num_bytes for holding in self._holdings.values())

    @property
    def free_bytes(self) -> int:
        """Bytes not held by anyone."""
        return self.capacity_bytes - self.used_bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._holdings

    def bytes_of(self, key: Hashable) -> int:
        """Bytes that a session holds; 0 if it was evicted."""
        holding = self._holdings.get(key)
        return holding.num_bytes if holding else 0

    def admit(self, key: Hashable, num_bytes: int, now: float) -> Admitted | NotNow:
        """Grant memory to a session that holds none, evicting others where the rules allow."""
        missing = num_bytes - self.free_bytes
        victims: list[Hashable] = []
        for candidate in self._evictable(now):
            if missing <= 0:
                break
            victims.append(candidate)
            missing -= self._holdings[candidate].num_bytes
        if missing > 0:
            return NotNow(self._retry_after(now))
        for victim in victims:
            del self._holdings[victim]
        self._holdings[key] = _Holding(num_bytes, now, now + MIN_PROTECTION_S)
        return Admitted(tuple(victims))

    def _evictable(self, now: float) -> list[Hashable]:
        loose = [(key, h) for key, h in self._holdings.items() if not self.pinned(key)]
        free = [(key, h) for key, h in loose if h.orphaned or h.protected_until <= now]
        return [key for key, h in sorted(free, key=lambda item: (not item[1].orphaned, item[1].last_used))]

    def _retry_after(self, now: float) -> float:
        waits = [h.protected_until - now for key, h in self._holdings.items() if not self.pinned(key)]
        return max(min(waits, default=MIN_PROTECTION_S), 0.05)

    def pinned(self, key: Hashable) -> bool:
        """Whether a session has an unanswered step."""
        return self._pins[key] > 0

    def pin(self, key: Hashable) -> None:
        """Note that a step of this session was accepted."""
        self._pins[key] += 1

    def unpin(self, key: Hashable, now: float, *, replay_cost_s: float = 0.0) -> None:
        """Note that a step is answered; `replay_cost_s` is what its session's replay has cost so far."""
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]
        holding = self._holdings.get(key)
        if holding is not None:
            holding.last_used = now
            holding.protected_until = now + max(MIN_PROTECTION_S, REPLAY_PROTECTION_FACTOR * replay_cost_s)

    def set_orphaned(self, key: Hashable, orphaned: bool) -> None:
        """Note whether a session's stream is gone."""
        if key in self._holdings:
            self._holdings[key].orphaned = orphaned

    def free(self, key: Hashable) -> None:
        """Take a session's memory back; nothing if it holds none."""
        self._holdings.pop(key, None)
