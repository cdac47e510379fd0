"""The registry in one process: behind the embedded server, and in the in-memory swarm."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from petals_async.core.lease import (
    HISTORY_EVENTS,
    MAX_SERVERS,
    LeaseTable,
    RegistryEvent,
    ServerPut,
    ServerRemoved,
    WatchCursor,
)
from petals_async.core.server_info import ServerInfo
from petals_async.errors import RegistryUnavailableError

MAX_WATCHES = 10_000
"""Watches open at once."""


class MemoryRegistry:
    """An `abc.Registry` in memory, on plain AnyIO. Leases run out by AnyIO's clock, inside `async with` only.

    A watch has no queue: it holds a cursor into the table's bounded history of changes, and one that fell
    behind that is given a fresh snapshot.

    Args:
        instance_id: Who this instance is; None for a random one.
        max_servers: Servers held at most.
        history_events: Changes kept for watches that are behind.
    """

    def __init__(
        self,
        *,
        instance_id: str | None = None,
        max_servers: int = MAX_SERVERS,
        history_events: int = HISTORY_EVENTS,
    ) -> None:
        self._table = LeaseTable(
            instance_id or secrets.token_hex(16), max_servers=max_servers, history_events=history_events
        )
        self._stack = AsyncExitStack()
        self._is_open = False
        self._num_watches = 0
        self._changed: anyio.Event | None = None
        self._next_expiry = math.inf
        self._earlier_expiry = anyio.Event()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._expire_leases)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._tell_watches()
        await self._stack.aclose()  # not told of the error, which would come out wrapped in a group

    @property
    def num_watches(self) -> int:
        """Watches open now; for tests and status."""
        return self._num_watches

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Put a server's record, or put it anew, for `ttl_s` seconds.

        Raises:
            RequestError: The record or the time to live is not sound; see `LeaseTable.grant`.
            RegistryUnavailableError: The registry is full, or not open.
        """
        table = await self._opened()
        before = table.revision
        now = anyio.current_time()
        table.grant(server, ttl_s, now)
        if now + ttl_s < self._next_expiry:
            self._earlier_expiry.set()
        if table.revision != before:
            self._tell_watches()

    async def renew(self, server_id: str) -> bool:
        """Extend a lease by its time to live; False if it is not known. Raises RegistryUnavailableError."""
        return (await self._opened()).renew(server_id, anyio.current_time())

    async def withdraw(self, server_id: str) -> None:
        """Remove a server's record; an unknown one is no error. Raises RegistryUnavailableError."""
        if (await self._opened()).revoke(server_id):
            self._tell_watches()

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all, by block and name. Raises RegistryUnavailableError."""
        return (await self._opened()).servers(model_fingerprint)

    @asynccontextmanager
    async def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AsyncIterator[MemoryWatch]:
        """Watch the servers of one model, or of all, from a cursor on if it is still known.

        Raises:
            RegistryUnavailableError: The registry is not open, or MAX_WATCHES are.
        """
        await self._opened()
        if self._num_watches >= MAX_WATCHES:
            raise RegistryUnavailableError(f"the registry has {MAX_WATCHES} watches open", reason="REGISTRY_FULL")
        self._num_watches += 1
        try:
            yield MemoryWatch(self, model_fingerprint, cursor)
        finally:
            self._num_watches -= 1

    async def _opened(self) -> LeaseTable:
        """Return the table, with a checkpoint: on every transport, every operation is one."""
        await anyio.lowlevel.checkpoint()
        return self._table_now()

    def _table_now(self) -> LeaseTable:
        if not self._is_open:
            raise RegistryUnavailableError("the in-memory registry is not open")
        return self._table

    async def _wait_for_change(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def _tell_watches(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _expire_leases(self) -> None:
        """Remove leases as they run out, for ever; woken early for one that runs out before the next known."""
        while True:
            if self._table.expire(anyio.current_time()):
                self._tell_watches()
            expiry = self._table.next_expiry()
            self._next_expiry = math.inf if expiry is None else expiry
            self._earlier_expiry = anyio.Event()
            with anyio.CancelScope(deadline=self._next_expiry):
                await self._earlier_expiry.wait()


class MemoryWatch:
    """One watch of a MemoryRegistry: a cursor, and the changes taken after it but not yet received."""

    def __init__(self, registry: MemoryRegistry, model_fingerprint: str | None, cursor: WatchCursor | None) -> None:
        self._registry = registry
        self._model_fingerprint = model_fingerprint
        self._cursor = cursor
        self._taken: deque[ServerPut | ServerRemoved] = deque()  # at most the table's history

    async def receive(self) -> RegistryEvent:
        """Return the next event: a snapshot first, unless the cursor was still known.

        Raises:
            RegistryUnavailableError: The registry was closed.
        """
        await anyio.lowlevel.checkpoint()
        while (event := self._next_event()) is None:
            await self._registry._wait_for_change()
        return event

    def _next_event(self) -> RegistryEvent | None:
        """Return the next event that is there already, and move the cursor; None if there is none."""
        table = self._registry._table_now()
        if not self._taken:
            events = None
            if self._cursor is not None:
                events = table.events_since(self._cursor, self._model_fingerprint)
            if events is None:
                self._cursor = table.cursor
                return table.snapshot(self._model_fingerprint)
            self._taken.extend(events)
            self._cursor = table.cursor
        return self._taken.popleft() if self._taken else None
