"""One block server in a child process, started again whenever it dies."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import anyio
from anyio.abc import TaskStatus

from petals_async.errors import PetalsAsyncError
from petals_async.server.process import Ready, ServerProcess

FIRST_BACKOFF_S = 0.5
"""Pause before a child that died is started again; doubled each time, up to MAX_BACKOFF_S."""

MAX_BACKOFF_S = 10.0
"""The longest pause."""

HEALTHY_AFTER_S = 30.0
"""A child that lived this long begins with the first pause again."""

DRAIN_TIMEOUT_S = 8.0
"""How long a child that drains may take."""

AT_ONCE_TIMEOUT_S = 3.0
"""How long a child that was told to stop at once may take."""

LAST_CHANCE_S = 1.0
"""How long a child that took too long may take after another SIGTERM; then it is killed."""


class Supervisor:
    """Keeps one block server running until it is cancelled.

    Args:
        context: From `server.process.forkserver`.
        options: Keyword arguments of `BlockServer`; `name` is how the child is called in messages.
        on_ready: Is told each time that the child can be used, with its process id.
        on_line: Takes lines for a person: progress, deaths, failures.
    """

    def __init__(
        self,
        context: ForkServerContext,
        options: dict[str, Any],
        *,
        on_ready: Callable[[Ready, int], None],
        on_line: Callable[[str], None],
    ) -> None:
        self._context = context
        self._options = options
        self._on_ready = on_ready
        self._on_line = on_line
        self._name = str(options["name"])
        self._at_once = False
        self._draining: ServerProcess | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the child, and again when it has died, for ever. Cancelling it ends the child, by force if need be.

        Raises:
            PetalsAsyncError: The first start failed.
        """
        lived_s = await self._live(task_status.started)
        backoff_s = FIRST_BACKOFF_S
        while True:
            if lived_s >= HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                lived_s = await self._live()
            except PetalsAsyncError as error:
                lived_s = 0.0
                self._on_line(f"{self._name} can't be started again: {error}")

    def stop_at_once(self) -> None:
        """Let the child not wait for its clients: now if it is draining, and else when it is ended."""
        self._at_once = True
        if self._draining is not None:
            self._draining.signal(signal.SIGINT)

    async def _live(self, started: Callable[[], None] = lambda: None) -> float:
        """Run the child until it ends; return for how many seconds it could be used."""
        process = ServerProcess(self._context, self._options, lambda line: self._on_line(f"{self._name}: {line}"))
        ready_at = None
        try:
            ready = await process.start()
            ready_at = anyio.current_time()
            self._on_ready(ready, process.pid)
            started()
            code = await process.wait()
        finally:
            await self._end(process, serving=ready_at is not None)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._on_line(f"{self._name} {how}; it is started again")
        return anyio.current_time() - ready_at

    async def _end(self, process: ServerProcess, *, serving: bool) -> None:
        drains = serving and not self._at_once
        with anyio.CancelScope(shield=True):
            if process.exit_code is None:
                self._draining = process
                process.signal(signal.SIGTERM if drains else signal.SIGINT)
                with anyio.move_on_after(DRAIN_TIMEOUT_S if drains else AT_ONCE_TIMEOUT_S):
                    await process.wait()
            self._draining = None
            await process.stop(LAST_CHANCE_S)
