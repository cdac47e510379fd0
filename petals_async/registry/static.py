"""A swarm without a registry: the block servers' addresses are known, and each is asked what it is."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from petals_async.abc import BlockChannel, Connector
from petals_async.core.lease import (
    RegistryEvent,
    RegistrySnapshot,
    ServerPut,
    ServerRemoved,
    WatchCursor,
    listing_order,
)
from petals_async.core.server_info import ServerInfo
from petals_async.errors import (
    AuthError,
    ConfigurationError,
    PeerError,
    RegistryUnavailableError,
    RequestError,
)

MAX_ADDRESSES = 1024
"""Block servers that can be named."""

ASK_TIMEOUT_S = 2.0
"""How long one server may take to say what it is, in seconds."""

MAX_CONCURRENT_ASKS = 16
"""Servers that are asked at the same time."""

POLL_INTERVAL_S = 1.0
"""Pause between two rounds of questions of a watch, in seconds."""


class StaticRegistry:
    """An `abc.Registry` over the fixed addresses of block servers; used inside `async with`.

    A server that doesn't answer is not listed. Announcing, renewing and withdrawing are accepted and do
    nothing. The address in a record is the one given here, which is known to be reachable from here.

    Args:
        addresses: HOST:PORT of each block server.
        connector: How to reach them.
        poll_interval_s: Pause between two rounds of questions of a watch, in seconds.

    Raises:
        ConfigurationError: No addresses, or more than MAX_ADDRESSES.
    """

    def __init__(
        self, addresses: Sequence[str], connector: Connector, *, poll_interval_s: float = POLL_INTERVAL_S
    ) -> None:
        if not 0 < len(addresses) <= MAX_ADDRESSES:
            raise ConfigurationError(f"a static registry needs 1 to {MAX_ADDRESSES} addresses, got {len(addresses)}")
        self._addresses = tuple(dict.fromkeys(addresses))
        self._connector = connector
        self._poll_interval_s = poll_interval_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between two questions, except by a watch."""

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Accept a record and do nothing: servers are asked instead."""
        await anyio.lowlevel.checkpoint()

    async def renew(self, server_id: str) -> bool:
        """Accept a renewal and do nothing."""
        await anyio.lowlevel.checkpoint()
        return True

    async def withdraw(self, server_id: str) -> None:
        """Accept a withdrawal and do nothing."""
        await anyio.lowlevel.checkpoint()

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Ask all servers, and return those of one model, or all, by block and name.

        Raises:
            RegistryUnavailableError: Not one server answered; the addresses are named.
        """
        async with self._channels() as channels:
            return await ask_servers(channels, model_fingerprint)

    @asynccontextmanager
    async def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AsyncIterator[StaticWatch]:
        """Watch the servers of one model, or of all, by asking them again and again; always from a snapshot.

        Raises:
            RegistryUnavailableError: Not one server answered; the addresses are named.
        """
        async with self._channels() as channels:
            first = await ask_servers(channels, model_fingerprint)
            yield StaticWatch(channels, model_fingerprint, first, self._poll_interval_s)

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[list[BlockChannel]]:
        async with AsyncExitStack() as stack:
            connections = [self._connector.connect(address) for address in self._addresses]
            yield [await stack.enter_async_context(connection) for connection in connections]


class StaticWatch:
    """One watch of a StaticRegistry: what is known, and what changed in the last round but wasn't received yet."""

    def __init__(
        self,
        channels: Sequence[BlockChannel],
        model_fingerprint: str | None,
        first: Sequence[ServerInfo],
        poll_interval_s: float,
    ) -> None:
        self._channels = channels
        self._model_fingerprint = model_fingerprint
        self._poll_interval_s = poll_interval_s
        self._known = _by_id(first)
        self._cursor = WatchCursor(secrets.token_hex(16), 1)
        self._pending: deque[RegistryEvent] = deque([RegistrySnapshot(self._cursor, tuple(first))])

    async def receive(self) -> RegistryEvent:
        """Return the next event.

        Raises:
            RegistryUnavailableError: Not one server answered; the addresses are named.
        """
        await anyio.lowlevel.checkpoint()
        while not self._pending:
            await anyio.sleep(self._poll_interval_s)
            self._take_in(_by_id(await ask_servers(self._channels, self._model_fingerprint)))
        return self._pending.popleft()

    def _take_in(self, found: dict[str, ServerInfo]) -> None:
        """Queue what is different now: at most two events for each address."""
        for server_id in self._known.keys() - found.keys():
            self._pending.append(ServerRemoved(self._next_cursor(), server_id))
        for server_id, server in found.items():
            if self._known.get(server_id) != server:
                self._pending.append(ServerPut(self._next_cursor(), server))
        self._known = found

    def _next_cursor(self) -> WatchCursor:
        self._cursor = WatchCursor(self._cursor.instance_id, self._cursor.revision + 1)
        return self._cursor


async def ask_servers(channels: Sequence[BlockChannel], model_fingerprint: str | None) -> list[ServerInfo]:
    """Ask servers what they are, and return those of one model, or all that answer, by block and name.

    Raises:
        RegistryUnavailableError: Not one server answered; the addresses are named, and what happened to each.
    """
    found: dict[str, ServerInfo] = {}
    failures: dict[str, str] = {}
    limiter = anyio.CapacityLimiter(MAX_CONCURRENT_ASKS)
    async with anyio.create_task_group() as tasks:
        for channel in channels:
            tasks.start_soon(_ask, channel, limiter, found, failures)
    if not found:
        raise RegistryUnavailableError(f"no block server answers; tried {_listed(failures)}")
    servers = _by_id(found.values()).values()
    wanted = (s for s in servers if model_fingerprint in (None, s.model_fingerprint))
    return sorted(wanted, key=listing_order)


async def _ask(
    channel: BlockChannel,
    limiter: anyio.CapacityLimiter,
    found: dict[str, ServerInfo],
    failures: dict[str, str],
) -> None:
    async with limiter:
        try:
            with anyio.fail_after(ASK_TIMEOUT_S):
                server = await channel.get_server_info()
            found[channel.address] = replace(server, address=channel.address)
        except TimeoutError:
            failures[channel.address] = f"no answer within {ASK_TIMEOUT_S:g} s"
        except (PeerError, RequestError, AuthError) as error:
            failures[channel.address] = error.message


def _by_id(servers: Iterable[ServerInfo]) -> dict[str, ServerInfo]:
    return {server.server_id: server for server in servers}


def _listed(failures: Mapping[str, str]) -> str:
    return ", ".join(f"{address} ({failures[address]})" for address in sorted(failures))
