"""The two ends of an in-memory RunSession stream, with the semantics of the one over gRPC."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from petals_async.core.messages import ClientMessage, OpenSession, ServerMessage
from petals_async.core.reasons import ERROR_OF_REASON, error_from_reason
from petals_async.errors import (
    PetalsAsyncError,
    PositionError,
    RequestError,
    ServerOverloadedError,
    ServerUnavailableError,
)
from petals_async.testing.gate import Gate
from petals_async.testing.pipe import Pipe, PipeEnd

OUTBOX_MESSAGES = 16
"""Messages of one stream in one direction that are on the way at most, as over gRPC."""


class Tap(Protocol):
    """Sees each message at a server's end of a stream, and may hold it back, lose it or do worse."""

    async def receiving(self, end: MemoryServerStream, message: ClientMessage) -> Sequence[ClientMessage]:
        """Return what the server gets in a message's place."""

    async def sending(self, end: MemoryServerStream, message: ServerMessage) -> bool:
        """Say whether a message is sent."""

    def sent(self, end: MemoryServerStream, message: ServerMessage) -> None:
        """A message is on the way."""


class MemoryWire:
    """What both ends of one stream share: a pipe each way, and why it ended."""

    def __init__(self, client: str, address: str, latency_s: float, network: Gate) -> None:
        self.client = client
        self.address = address
        self.up: Pipe[ClientMessage] = Pipe(OUTBOX_MESSAGES, latency_s, network)
        self.down: Pipe[ServerMessage] = Pipe(OUTBOX_MESSAGES, latency_s, network)
        self.error: PetalsAsyncError = stream_over(address)

    def end(self, error: PetalsAsyncError | None) -> None:
        """End the stream from the server's side; the client sees what was sent before, and then why."""
        if error is not None and not self.down.is_over:
            self.error = over_the_wire(error, self.address)
        self.down.finish()
        self.up.drop()

    def leave(self) -> None:
        """End the stream from the client's side."""
        self.up.finish()
        self.down.drop()


class MemoryClientStream:
    """The client's end: an `abc.SessionStream`."""

    def __init__(self, wire: MemoryWire) -> None:
        self._wire = wire

    async def send(self, message: ClientMessage) -> None:
        """Write one message.

        Raises:
            PeerError: The stream is over; `receive` tells why.
        """
        await self._wire.up.send(message)
        if self._wire.up.is_over:
            raise stream_over(self._wire.address)

    async def receive(self) -> ServerMessage:
        """Return the next message.

        Raises:
            PetalsAsyncError: The stream is over, for the reason that the server or the network gave.
        """
        try:
            return await self._wire.down.receive()
        except PipeEnd:
            raise self._wire.error from None


class MemoryServerStream:
    """The server's end: an `abc.ServerStream`.

    Attributes:
        opening: The stream's first message, once it has come.
    """

    def __init__(self, wire: MemoryWire, process: Gate, tap: Tap | None) -> None:
        self._wire = wire
        self._process = process
        self._tap = tap
        self._again: deque[ClientMessage] = deque()  # at most one message, delivered twice
        self.opening: OpenSession | None = None

    @property
    def principal(self) -> str:
        """Nobody authenticates here."""
        return ""

    @property
    def client(self) -> str:
        """Name of the client at the other end."""
        return self._wire.client

    async def receive(self) -> ClientMessage | None:
        """Return the next message; None when the stream has ended, however it did."""
        while not self._again:
            try:
                message = await self._wire.up.receive()
            except PipeEnd:
                return None
            await self.passed()
            if isinstance(message, OpenSession) and self.opening is None:
                self.opening = message
            self._again.extend([message] if self._tap is None else await self._tap.receiving(self, message))
        return self._again.popleft()

    async def send(self, message: ServerMessage) -> None:
        """Queue one message; waits while the client is slow."""
        await self.passed()
        if self._tap is not None and not await self._tap.sending(self, message):
            return
        await self.passed()
        await self._wire.down.send(message)
        if self._tap is not None:
            self._tap.sent(self, message)

    async def passed(self) -> None:
        """Return when the process runs."""
        await self._process.passed()

    def send_nowait(self, message: ServerMessage) -> None:
        """Queue one message if there is room and the process runs; drop it otherwise."""
        if self._process.is_open:
            self._wire.down.send_nowait(message)


def stream_over(address: str) -> ServerUnavailableError:
    """Return the error for a stream that ended without a word."""
    return ServerUnavailableError("the stream is over", reason="STREAM_LOST", server=address)


def over_the_wire(error: PetalsAsyncError, address: str) -> PetalsAsyncError:
    """Return the error that a client gets for one that a server raised: made anew from its reason."""
    reason = error.reason
    if reason not in ERROR_OF_REASON:
        reason = "BAD_REQUEST" if isinstance(error, RequestError) else "STREAM_LOST"
    return error_from_reason(
        reason,
        error.message,
        server=address,
        position=error.position if isinstance(error, PositionError) else 0,
        next_step_id=error.next_step_id if isinstance(error, PositionError) else 1,
        retry_after_s=error.retry_after_s if isinstance(error, ServerOverloadedError) else 1.0,
    )
