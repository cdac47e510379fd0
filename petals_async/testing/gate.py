"""A gate in the way of a process or a network path: open, or everything waits before it."""

from __future__ import annotations

import anyio


class Gate:
    """Open at first. What waits before a closed gate goes on when it opens."""

    def __init__(self) -> None:
        self._opened: anyio.Event | None = None

    @property
    def is_open(self) -> bool:
        """Whether one can pass."""
        return self._opened is None

    def close(self) -> None:
        """Let everything wait."""
        if self._opened is None:
            self._opened = anyio.Event()

    def open(self) -> None:
        """Let everything pass."""
        if self._opened is not None:
            self._opened.set()
            self._opened = None

    async def passed(self) -> None:
        """Return when the gate is open; at once, without a checkpoint, if it is."""
        while self._opened is not None:
            await self._opened.wait()
