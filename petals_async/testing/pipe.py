"""One direction of an in-memory stream: ordered, bounded, and as slow as a network."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from petals_async.testing.gate import Gate

T = TypeVar("T")


class PipeEnd(Exception):  # noqa: N818 - an end, not an error
    """Nothing more will come."""


class Pipe(Generic[T]):
    """Carries messages from any number of writers to one reader.

    A message arrives `latency_s` after it was sent. What was sent before the end still arrives before it: bytes on
    the wire outlive the process that wrote them.

    Args:
        capacity: Messages on the way at most; then writers wait.
        latency_s: Seconds on the way.
        network: Closed while the network swallows everything.
    """

    def __init__(self, capacity: int, latency_s: float, network: Gate) -> None:
        self._capacity = capacity
        self._latency_s = latency_s
        self._network = network
        self._messages: deque[tuple[float, T]] = deque()
        self._ends_at = math.inf
        self._changed = anyio.Event()

    @property
    def is_full(self) -> bool:
        """Whether a writer would have to wait."""
        return len(self._messages) >= self._capacity

    @property
    def is_over(self) -> bool:
        """Whether the end was written."""
        return self._ends_at < math.inf

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def send(self, message: T) -> None:
        """Write a message, waiting while the pipe is full; after the end it is dropped."""
        await anyio.lowlevel.checkpoint()
        while self.is_full and not self.is_over:
            await self._changed.wait()
        self.send_nowait(message)

    def send_nowait(self, message: T) -> bool:
        """Write a message if there is room; say whether there was."""
        if self.is_full or self.is_over:
            return False
        self._messages.append((anyio.current_time() + self._latency_s, message))
        self._wake()
        return True

    def finish(self) -> None:
        """Write the end, behind what was sent."""
        if not self.is_over:
            self._ends_at = anyio.current_time() + self._latency_s
            self._wake()

    def drop(self) -> None:
        """Forget what is on the way, and write the end: the reader has gone."""
        self._messages.clear()
        self.finish()

    async def receive(self) -> T:
        """Return the next message when it has arrived.

        Raises:
            PipeEnd: There is none, and none will come.
        """
        await anyio.lowlevel.checkpoint()
        while True:
            due = self._messages[0][0] if self._messages else self._ends_at
            if anyio.current_time() < due or not self._network.is_open:
                await self._wait_until(due)
                continue
            if not self._messages:
                raise PipeEnd
            _, message = self._messages.popleft()
            self._wake()
            return message

    async def _wait_until(self, due: float) -> None:
        """Return at a time, or earlier if something has changed; never before the network lets through."""
        if not self._network.is_open:
            await self._network.passed()
            return
        changed = self._changed
        with anyio.CancelScope(deadline=due):
            await changed.wait()
