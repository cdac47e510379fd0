"""An in-memory network of block servers: an `abc.Connector` for clients, an address for each server.

It behaves as the transport over gRPC does, in whatever time AnyIO's clock shows: an error of our tree that
`run_session` raises reaches the client as the same class and reason; a clean end or a death is STREAM_LOST; an
address where nobody listens is CONNECT_FAILED; a client that leaves its stream ends the server's `receive`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from petals_async.abc import BlockService
from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.errors import PetalsAsyncError, ServerUnavailableError, leaf_of
from petals_async.testing.gate import Gate
from petals_async.testing.memory_stream import (
    MemoryClientStream,
    MemoryServerStream,
    MemoryWire,
    Tap,
    over_the_wire,
)

T = TypeVar("T")

DEFAULT_LATENCY_S = 0.001
"""Seconds that a message is on the way."""

UNARY_TIMEOUT_S = 5.0
"""Time limit of the short calls, as over gRPC."""


class MemoryListener:
    """A server's address: its service, and the streams that are open.

    Args:
        service: What is served; None refuses every call as NOT_SERVING.
        tasks: Where streams are served; ends with the process.
        process: Closed while the process is stopped.
        network: Closed while the network swallows what is sent to the server and by it.
        tap: Sees the messages.
    """

    def __init__(
        self, service: BlockService | None, tasks: TaskGroup, process: Gate, network: Gate, tap: Tap | None = None
    ) -> None:
        self.service = service
        self.process = process
        self.network = network
        self._tasks = tasks
        self._tap = tap
        self._wires: dict[MemoryWire, None] = {}

    @property
    def num_streams(self) -> int:
        """Streams that are served now."""
        return len(self._wires)

    def accept(self, wire: MemoryWire) -> None:
        """Begin to serve a stream."""
        self._wires[wire] = None
        self._tasks.start_soon(self._serve, wire)

    async def _serve(self, wire: MemoryWire) -> None:
        error: PetalsAsyncError | None = None
        try:
            if self.service is None:
                raise ServerUnavailableError("the server is loading its weights", reason="NOT_SERVING")
            await self.service.run_session(MemoryServerStream(wire, self.process, self._tap))
        except* PetalsAsyncError as group:
            leaf = leaf_of(group)
            error = leaf if isinstance(leaf, PetalsAsyncError) else None
        finally:
            self._wires.pop(wire, None)
        wire.end(error)

    def die(self) -> None:
        """End all streams, as the death of a process does."""
        for wire in list(self._wires):
            wire.end(None)


class MemoryNetwork:
    """Addresses and who listens there.

    Args:
        latency_s: Seconds that a message is on the way, in each direction.
    """

    def __init__(self, latency_s: float = DEFAULT_LATENCY_S) -> None:
        self.latency_s = latency_s
        self._listeners: dict[str, MemoryListener] = {}
        self.num_client_streams = 0

    def listen(self, address: str, listener: MemoryListener) -> None:
        """Put a server at an address."""
        self._listeners[address] = listener

    def unlisten(self, address: str, listener: MemoryListener) -> None:
        """Take a server away from its address, if it is still the one there, and end its streams."""
        if self._listeners.get(address) is listener:
            del self._listeners[address]
        listener.die()

    def at(self, address: str) -> MemoryListener | None:
        """Return who listens at an address."""
        return self._listeners.get(address)

    def connector(self, client: str = "client") -> MemoryConnector:
        """Return a client's connector; the name is for faults and traces."""
        return MemoryConnector(self, client)


class MemoryConnector:
    """Makes in-memory connections: an `abc.Connector`."""

    def __init__(self, network: MemoryNetwork, client: str) -> None:
        self._network = network
        self._client = client

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[MemoryBlockChannel]:
        """Open a connection, without waiting for the peer; leaving the context closes it."""
        yield MemoryBlockChannel(self._network, self._client, address)


class MemoryBlockChannel:
    """A connection to one address: an `abc.BlockChannel`."""

    def __init__(self, network: MemoryNetwork, client: str, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._address

    @asynccontextmanager
    async def open_stream(self) -> AsyncIterator[MemoryClientStream]:
        """Open one RunSession stream; leaving the context ends it."""
        network = self._network
        listener = network.at(self._address)
        gate = Gate() if listener is None else listener.network
        wire = MemoryWire(self._client, self._address, network.latency_s, gate)
        if listener is None:
            wire.end(self._refused())
        else:
            listener.accept(wire)
        network.num_client_streams += 1
        try:
            yield MemoryClientStream(wire)
        finally:
            network.num_client_streams -= 1
            wire.leave()

    async def get_server_info(self) -> ServerInfo:
        """Ask the server what it is. Raises PeerError."""
        with self._time_limit():
            service = await self._reach()
            return await self._answer(service.get_server_info())
        raise self._too_slow()

    async def close_session(self, session_id: bytes) -> None:
        """Free a session by its id. Raises PeerError."""
        with self._time_limit():
            service = await self._reach()
            await service.close_session(session_id)
            return await self._answer(None)
        raise self._too_slow()

    async def list_sessions(self) -> Sequence[SessionInfo]:
        """Return all sessions held there. Raises PeerError."""
        with self._time_limit():
            service = await self._reach()
            return await self._answer(service.list_sessions())
        raise self._too_slow()

    def _time_limit(self) -> anyio.CancelScope:
        return anyio.move_on_after(UNARY_TIMEOUT_S)

    async def _reach(self) -> BlockService:
        """Travel to the server, as far as it can be reached."""
        await anyio.sleep(self._network.latency_s)
        listener = self._network.at(self._address)
        if listener is None:
            raise self._refused()
        await listener.network.passed()
        await listener.process.passed()
        if self._network.at(self._address) is not listener:
            raise self._refused()
        if listener.service is None:
            error = ServerUnavailableError("the server is loading its weights", reason="NOT_SERVING")
            raise over_the_wire(error, self._address)
        return listener.service

    async def _answer(self, answer: T) -> T:
        await anyio.sleep(self._network.latency_s)
        return answer

    def _refused(self) -> ServerUnavailableError:
        return ServerUnavailableError("connection refused", reason="CONNECT_FAILED", server=self._address)

    def _too_slow(self) -> ServerUnavailableError:
        return ServerUnavailableError(f"no answer within {UNARY_TIMEOUT_S:g} s", server=self._address)
