"""Stopping a command: SIGINT and SIGTERM, from the first moment on."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskStatus

from petals_async.scopes import open_tasks


async def until_stopped(work: Callable[[], Awaitable[None]]) -> signal.Signals | None:
    """Do something, and cancel it at SIGINT or SIGTERM; it closes what it opened, and a second signal ends that too.

    Returns:
        The signal that stopped it, or None when it was done before.
    """
    stopped_by: list[signal.Signals] = []

    async def listen(*, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                stopped_by.append(number)
                tasks.cancel_scope.cancel()
                return

    async with open_tasks() as tasks:
        await tasks.start(listen)
        await work()
        tasks.cancel_scope.cancel()
    return stopped_by[0] if stopped_by else None
