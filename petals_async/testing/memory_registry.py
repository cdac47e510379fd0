"""The registry of the in-memory swarm, as its users see it: it can go away and come back, empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from petals_async.abc import Registry, RegistryWatch
from petals_async.core.lease import WatchCursor
from petals_async.core.server_info import ServerInfo
from petals_async.errors import RegistryUnavailableError
from petals_async.registry.memory import MemoryRegistry
from petals_async.testing.gate import Gate


class RestartableRegistry:
    """One `MemoryRegistry` after the other, behind one `abc.Registry`."""

    def __init__(self) -> None:
        self._inner: MemoryRegistry | None = None
        self._ended = anyio.Event()
        self._lives = 0

    def start(self, tasks: TaskGroup) -> None:
        """Begin the next life: nobody is known, and old cursors mean nothing."""
        if self._inner is None:
            self._lives += 1
            self._ended = anyio.Event()
            self._inner = MemoryRegistry(instance_id=f"memory-{self._lives}")
            tasks.start_soon(self._live, self._inner, self._ended)

    async def _live(self, inner: MemoryRegistry, ended: anyio.Event) -> None:
        async with inner:
            await ended.wait()

    def stop(self) -> None:
        """Go away: every call fails, and every watch ends."""
        self._inner = None
        self._ended.set()

    def _reached(self) -> MemoryRegistry:
        if self._inner is None:
            raise RegistryUnavailableError("the in-memory registry is away")
        return self._inner

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Put a server's record."""
        await self._reached().announce(server, ttl_s=ttl_s)

    async def renew(self, server_id: str) -> bool:
        """Extend a lease; False if it is not known."""
        return await self._reached().renew(server_id)

    async def withdraw(self, server_id: str) -> None:
        """Remove a server's record."""
        await self._reached().withdraw(server_id)

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all."""
        return await self._reached().list_servers(model_fingerprint)

    @asynccontextmanager
    async def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AsyncIterator[RegistryWatch]:
        """Watch the servers of one model."""
        async with self._reached().watch(model_fingerprint, cursor=cursor) as events:
            yield events


class GatedRegistry:
    """A registry as a process sees it that may be stopped: calls wait while it is.

    Args:
        registry: The registry.
        process: Closed while the process is stopped.
    """

    def __init__(self, registry: Registry, process: Gate) -> None:
        self._registry = registry
        self._process = process

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Put a server's record."""
        await self._process.passed()
        await self._registry.announce(server, ttl_s=ttl_s)

    async def renew(self, server_id: str) -> bool:
        """Extend a lease; False if it is not known."""
        await self._process.passed()
        return await self._registry.renew(server_id)

    async def withdraw(self, server_id: str) -> None:
        """Remove a server's record."""
        await self._process.passed()
        await self._registry.withdraw(server_id)

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all."""
        await self._process.passed()
        return await self._registry.list_servers(model_fingerprint)

    def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AbstractAsyncContextManager[RegistryWatch]:
        """Watch the servers of one model."""
        return self._registry.watch(model_fingerprint, cursor=cursor)
