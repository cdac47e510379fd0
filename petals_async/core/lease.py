"""The registry's state: who serves what, each for as long as its lease lives; and what changed, in order.

Theory. The registry is a table of leases with a *revision*, a number that grows by one with each change a
watcher can see. The last changes are kept. A watcher holds a cursor (instance, revision) and asks for what
came after it: so it needs no queue of its own here, and one that fell behind the kept changes simply starts
from a snapshot again. A restarted registry has another `instance_id`, and no cursor of the old one means
anything in it.

Rules:

- A record lives for its time to live from the last grant or renewal; at that very moment it is over. It is
  taken out by `expire`, which the owner calls at `next_expiry`; until then it can't be renewed, only granted
  anew.
- Granting an equal record again is a renewal: no change, no event, so that watchers aren't woken for nothing.
- A server's id stands for one process, so it can't change its model: that would be a removal that the
  watchers of the old model never see.
- The first revision is 1, so that 0 can stand for "nothing seen".
- What a peer wrote into a record is bounded here, since the table and every snapshot hold it.

Source: etcd's leases, revisions and watches (https://etcd.io/docs/v3.5/learning/api/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from petals_async.core.server_info import ServerInfo
from petals_async.errors import RegistryUnavailableError, RequestError

MIN_TTL_S = 1.0
"""The shortest time to live, in seconds: servers renew three times in it."""

MAX_TTL_S = 300.0
"""The longest time to live, in seconds: a dead server is listed no longer than this."""

MAX_SERVERS = 10_000
"""Servers in one registry."""

HISTORY_EVENTS = 1024
"""The last changes that are kept for watchers which come back, or are slow."""

MAX_TEXT_CHARS = 1024
"""Characters of each text in a record."""

MAX_DIGEST_CHARS = 128
"""Characters of a block digest."""

MAX_BLOCKS = 1024
"""Blocks of one model, so also digests of one record."""

MAX_COUNT = 2**62
"""No count in a record is larger."""


@dataclass(frozen=True, slots=True)
class WatchCursor:
    """Where a watch stands: an instance of the registry, and its revision."""

    instance_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """All servers of the model watched: what was known before no longer counts."""

    cursor: WatchCursor
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True, slots=True)
class ServerPut:
    """A new server, or a new record of a known one."""

    cursor: WatchCursor
    server: ServerInfo


@dataclass(frozen=True, slots=True)
class ServerRemoved:
    """A server that withdrew, or whose lease ran out; perhaps one that the watcher never heard of."""

    cursor: WatchCursor
    server_id: str


RegistryEvent = RegistrySnapshot | ServerPut | ServerRemoved


@dataclass(frozen=True, slots=True)
class _Lease:
    server: ServerInfo
    ttl_s: float
    expires: float


class LeaseTable:
    """The state of one registry instance; see the rules at the head of the file.

    Args:
        instance_id: Who this instance is; another after each restart.
        max_servers: Servers held at most.
        history_events: Changes kept.
    """

    def __init__(
        self,
        instance_id: str,
        *,
        max_servers: int = MAX_SERVERS,
        history_events: int = HISTORY_EVENTS,
    ) -> None:
        self._instance_id = instance_id
        self._max_servers = max_servers
        self._history_events = history_events
        self._leases: dict[str, _Lease] = {}
        self._changes: dict[int, tuple[str, ServerPut | ServerRemoved]] = {}  # revision -> (model, event)
        self._revision = 1

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def cursor(self) -> WatchCursor:
        """Where a watcher stands that has seen everything."""
        return WatchCursor(self._instance_id, self._revision)

    @property
    def revision(self) -> int:
        """The number of the last change; 1 before the first."""
        return self._revision

    def grant(self, server: ServerInfo, ttl_s: float, now: float) -> None:
        """Put a server's record, or put it anew, for `ttl_s` seconds from `now`.

        Raises:
            RequestError: The time to live is outside MIN_TTL_S..MAX_TTL_S, the record is not sound
               , or the server was granted a lease for another model (WRONG_MODEL).
            RegistryUnavailableError: `max_servers` are held already (REGISTRY_FULL).
        """
        check_ttl(ttl_s)
        check_record(server)
        held = self._leases.get(server.server_id)
        self._check_place(server, held)
        self._leases[server.server_id] = _Lease(server, ttl_s, now + ttl_s)
        if held is None or held.server != server:
            self._keep(server.model_fingerprint, ServerPut(self._advance(), server))

    def renew(self, server_id: str, now: float) -> bool:
        """Let a lease live for its time to live from `now`; False if there is none, or it has run out."""
        held = self._leases.get(server_id)
        if held is None or now >= held.expires:
            return False
        self._leases[server_id] = _Lease(held.server, held.ttl_s, now + held.ttl_s)
        return True

    def revoke(self, server_id: str) -> bool:
        """Remove a server's record; False if there is none."""
        held = self._leases.pop(server_id, None)
        if held is None:
            return False
        self._keep(held.server.model_fingerprint, ServerRemoved(self._advance(), server_id))
        return True

    def expire(self, now: float) -> list[str]:
        """Remove the leases that have run out at `now`, and return their servers' ids, the oldest first."""
        over = [lease for lease in self._leases.values() if now >= lease.expires]
        ids = [lease.server.server_id for lease in sorted(over, key=_expiry_order)]
        for server_id in ids:
            self.revoke(server_id)
        return ids

    def next_expiry(self) -> float | None:
        """Return when the first lease runs out, or None if there is none."""
        return min((lease.expires for lease in self._leases.values()), default=None)

    def servers(self, model_fingerprint: str | None = None) -> list[ServerInfo]:
        """Return the servers of one model, or of all, by block, then by name and id."""
        found = (lease.server for lease in self._leases.values())
        return sorted((s for s in found if model_fingerprint in (None, s.model_fingerprint)), key=listing_order)

    def snapshot(self, model_fingerprint: str | None = None) -> RegistrySnapshot:
        """Return the servers of one model, or of all, and where a watcher stands that has seen them."""
        return RegistrySnapshot(self.cursor, tuple(self.servers(model_fingerprint)))

    def events_since(
        self, cursor: WatchCursor, model_fingerprint: str | None = None
    ) -> list[ServerPut | ServerRemoved] | None:
        """Return what changed after a cursor, oldest first.

        Args:
            cursor: Where the watcher stands.
            model_fingerprint: Only changes of this model; None for all.

        Returns:
            The changes; none if there were none for this model; None if the cursor is of another instance,
            not yet reached, or older than the changes kept: the watcher needs a snapshot.
        """
        if cursor.instance_id != self._instance_id or not 0 < cursor.revision <= self._revision:
            return None
        revisions = range(cursor.revision + 1, self._revision + 1)
        if len(revisions) > len(self._changes):
            return None
        changes = [self._changes[revision] for revision in revisions]
        return [event for model, event in changes if model_fingerprint in (None, model)]

    def _check_place(self, server: ServerInfo, held: _Lease | None) -> None:
        if held is None and len(self._leases) >= self._max_servers:
            raise RegistryUnavailableError(
                f"the registry is full: it holds {self._max_servers} servers", reason="REGISTRY_FULL"
            )
        if held is not None and held.server.model_fingerprint != server.model_fingerprint:
            raise RequestError(f"{server} already serves another model under this id", reason="WRONG_MODEL")

    def _advance(self) -> WatchCursor:
        """Count a change."""
        self._revision += 1
        return self.cursor

    def _keep(self, model_fingerprint: str, event: ServerPut | ServerRemoved) -> None:
        """Keep the latest change for watchers, and forget the oldest."""
        self._changes[event.cursor.revision] = (model_fingerprint, event)
        if len(self._changes) > self._history_events:
            del self._changes[next(iter(self._changes))]


def listing_order(server: ServerInfo) -> tuple[int, int, str, str]:
    """Sort key of listings: by block, then by name and id."""
    return (server.span.start, server.span.end, server.name, server.server_id)


def check_ttl(ttl_s: float) -> None:
    """Check a time to live.

    Raises:
        RequestError: It is outside MIN_TTL_S..MAX_TTL_S, or not a number.
    """
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RequestError(f"a lease lives {MIN_TTL_S:g} to {MAX_TTL_S:g} s, {ttl_s:g} s were asked for")


def check_record(server: ServerInfo) -> None:
    """Check what a server wrote into its record.

    Raises:
        RequestError: A text is empty or longer than MAX_TEXT_CHARS, the span leaves the model, there isn't
            one digest for each block (or none at all), or a number can't be.
    """
    _check_texts(server)
    if server.span.end > server.num_blocks or server.num_blocks > MAX_BLOCKS:
        raise _bad_record(server, f"span {server.span} of {server.num_blocks} blocks (at most {MAX_BLOCKS})")
    if len(server.block_digests) not in (0, len(server.span)):
        raise _bad_record(server, f"{len(server.block_digests)} digests for {len(server.span)} blocks")
    counts = (server.hidden_size, server.kv_capacity_tokens, server.kv_free_tokens)
    if not all(0 <= count <= MAX_COUNT for count in counts):
        raise _bad_record(server, "a size below 0 or far too large")
    if not 0 <= server.block_step_s < math.inf:
        raise _bad_record(server, f"{server.block_step_s} s for a block")


def _check_texts(server: ServerInfo) -> None:
    needed = (server.server_id, server.address, server.model_fingerprint)
    others = (server.name, server.version, server.model, server.dtype, server.numeric_fingerprint)
    if not all(needed):
        raise _bad_record(server, "server_id, address and model_fingerprint can't be empty")
    if max(map(len, (*needed, *others))) > MAX_TEXT_CHARS:
        raise _bad_record(server, f"a text of more than {MAX_TEXT_CHARS} characters")
    if any(len(digest) > MAX_DIGEST_CHARS for digest in server.block_digests):
        raise _bad_record(server, f"a digest of more than {MAX_DIGEST_CHARS} characters")


def _bad_record(server: ServerInfo, what: str) -> RequestError:
    return RequestError(f"the record of server {server.server_id[:MAX_TEXT_CHARS]!r} has {what}")


def _expiry_order(lease: _Lease) -> tuple[float, str]:
    return (lease.expires, lease.server.server_id)
