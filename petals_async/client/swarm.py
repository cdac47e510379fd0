"""The client's picture of the swarm: who serves what, who is excluded, and the connections to them.

The registry's watch keeps the picture fresh, but nothing on the data path waits for it: when the registry is
away, the last picture stays. A restarted registry starts empty; servers that it doesn't know yet are kept for
`FORGET_AFTER_S`, in which they announce themselves again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup

from petals_async.abc import BlockChannel, Connector, Registry
from petals_async.core.health import PeerHealth
from petals_async.core.lease import RegistryEvent, RegistrySnapshot, ServerPut, ServerRemoved, WatchCursor
from petals_async.core.route import Candidate, Leg, plan_route
from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.span import Span
from petals_async.errors import NoRouteError, PeerError, RegistryUnavailableError, RequestError
from petals_async.scopes import open_tasks

log = logging.getLogger(__name__)

REGISTRY_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to watch the registry again; the last one repeats."""

FORGET_AFTER_S = 15.0
"""A server that a restarted registry doesn't know is kept this long."""

PING_TIMEOUT_S = 1.0
"""How long a ping may take; one that is lost excludes nobody."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a session needs of each of its servers."""

    batch_size: int
    max_tokens: int
    chunk_tokens: int = 1

    def met_by(self, server: ServerInfo) -> bool:
        """Whether a server's limits allow it."""
        limits = server.limits
        return (
            self.batch_size <= limits.max_batch_size
            and self.max_tokens <= limits.max_session_tokens
            and self.chunk_tokens <= limits.max_step_tokens
        )


class Swarm:
    """Servers of one model. Make one with `open_swarm`.

    Args:
        registry: Who serves what.
        connector: Makes connections.
        model_fingerprint: Only servers of this model count.
        dtype: Only servers that compute in this dtype count; None to settle it by what is there.
    """

    def __init__(self, registry: Registry, connector: Connector, model_fingerprint: str, dtype: str | None) -> None:
        self._registry = registry
        self._connector = connector
        self._model_fingerprint = model_fingerprint
        self._servers: dict[str, ServerInfo] = {}
        self._stale: dict[str, float] = {}
        self._channels: dict[str, BlockChannel] = {}
        self._closing = AsyncExitStack()
        self._changed = anyio.Event()
        self._cursor: WatchCursor | None = None
        self._tasks: TaskGroup | None = None
        self.dtype = dtype
        self.health = PeerHealth()

    # -- the picture

    async def watch(self) -> None:
        """Follow the registry for ever; its absence is waited out."""
        failures = 0
        while True:
            try:
                async with self._registry.watch(self._model_fingerprint, cursor=self._cursor) as events:
                    while True:
                        event = await events.receive()
                        failures = 0
                        self.apply(event)
            except RegistryUnavailableError as error:
                log.debug("the registry is away: %s", error)
                await anyio.sleep(REGISTRY_RETRY_S[min(failures, len(REGISTRY_RETRY_S) - 1)])
                failures += 1

    def apply(self, event: RegistryEvent) -> None:
        """Take one event of the registry into the picture."""
        match event:
            case RegistrySnapshot(cursor, servers):
                self._apply_snapshot(cursor, servers)
            case ServerPut(cursor, server):
                self._put(server)
            case ServerRemoved(cursor, server_id):
                self._servers.pop(server_id, None)
                self._stale.pop(server_id, None)
        self._cursor = cursor
        self._wake()

    def _apply_snapshot(self, cursor: WatchCursor, servers: tuple[ServerInfo, ...]) -> None:
        known = {server.server_id for server in servers}
        restarted = self._cursor is not None and self._cursor.instance_id != cursor.instance_id
        for server_id in [server_id for server_id in self._servers if server_id not in known]:
            if restarted:
                self._stale.setdefault(server_id, anyio.current_time() + FORGET_AFTER_S)
            else:
                del self._servers[server_id]
        for server in servers:
            self._put(server)

    def _put(self, server: ServerInfo) -> None:
        new = server.server_id not in self._servers
        self._servers[server.server_id] = server
        self._stale.pop(server.server_id, None)
        if new and self._tasks is not None and server.state is ServerState.SERVING:
            self._tasks.start_soon(self._ping, server)

    async def _ping(self, server: ServerInfo) -> None:
        """Measure a server's round-trip time."""
        started_at = anyio.current_time()
        with anyio.move_on_after(PING_TIMEOUT_S):
            try:
                channel = await self.channel(server.address)
                info = await channel.get_server_info()
            except (PeerError, RequestError):
                return
            if info.server_id == server.server_id:
                now = anyio.current_time()
                self.health.record_success(server.server_id, now, now - started_at)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when the picture has changed, or after a time."""
        with anyio.move_on_after(max(timeout_s, 0.0)):
            await self._changed.wait()

    def servers(self) -> list[ServerInfo]:
        """Return the servers in the picture, of any dtype."""
        now = anyio.current_time()
        for server_id in [server_id for server_id, until in self._stale.items() if until <= now]:
            self._stale.pop(server_id)
            self._servers.pop(server_id, None)
        return list(self._servers.values())

    async def settle_dtype(self, timeout_s: float) -> str:
        """Return the dtype that this client uses: the one given, or the swarm's.

        Raises:
            NoRouteError: No server of this model came within the time.
            RequestError: Several dtypes are served, and none was chosen (BAD_DTYPE).
        """
        deadline = anyio.current_time() + timeout_s
        while self.dtype is None:
            served = sorted({server.dtype for server in self.servers()})
            if len(served) > 1:
                raise RequestError(
                    f"the swarm computes in {' and '.join(served)}; choose one with dtype=", reason="BAD_DTYPE"
                )
            if served:
                self.dtype = served[0]
                break
            remaining_s = deadline - anyio.current_time()
            if remaining_s <= 0:
                raise NoRouteError(f"no server of this model was announced within {timeout_s:g} s")
            await self.wait_for_change(remaining_s)
        return self.dtype

    # -- routes

    def plan(
        self,
        span: Span,
        needs: Needs,
        *,
        avoid: Mapping[str, float] | None = None,
        lost_digests: Mapping[int, str] | None = None,
    ) -> tuple[Leg, ...]:
        """Return the cheapest route over a span now.

        Args:
            span: The blocks to cover.
            needs: How large the session is.
            avoid: Server ids and the times until which they aren't asked.
            lost_digests: For each block the digest that a replacement must have.

        Raises:
            NoRouteError: Some blocks have no server now; the message names them.
        """
        now = anyio.current_time()
        excluded = set(self.health.excluded(now))
        excluded |= {server_id for server_id, until in (avoid or {}).items() if until > now}
        candidates = [
            Candidate(server, rtt_s=self.health.rtt_s(server.server_id))
            for server in self.servers()
            if server.dtype == self.dtype and needs.met_by(server)
        ]
        kv_tokens = needs.batch_size * needs.max_tokens
        return plan_route(span, candidates, kv_tokens=kv_tokens, excluded=excluded, lost_digests=lost_digests)

    def next_readmission_s(self) -> float | None:
        """Seconds until an excluded server may be asked again; None when none is excluded."""
        now = anyio.current_time()
        until = self.health.next_readmission(now)
        return None if until is None else max(0.0, until - now)

    # -- connections

    async def channel(self, address: str) -> BlockChannel:
        """Return the connection to an address, opened at first use and kept until the swarm is closed."""
        if address not in self._channels:
            self._channels[address] = await self._closing.enter_async_context(self._connector.connect(address))
        return self._channels[address]

    def mark_draining(self, server: ServerInfo) -> None:
        """Note that a server has told us that it is leaving, before the registry does."""
        if server.server_id in self._servers:
            self._servers[server.server_id] = replace(server, state=ServerState.DRAINING)


@asynccontextmanager
async def open_swarm(
    registry: Registry, connector: Connector, *, model_fingerprint: str, dtype: str | None
) -> AsyncIterator[Swarm]:
    """Follow the registry for as long as the context is open; connections are closed at its end."""
    swarm = Swarm(registry, connector, model_fingerprint, dtype)
    async with swarm._closing, open_tasks() as tasks:
        swarm._tasks = tasks
        tasks.start_soon(swarm.watch)
        try:
            yield swarm
        finally:
            swarm._tasks = None
            tasks.cancel_scope.cancel()
