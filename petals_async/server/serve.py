"""One block server as the whole job of a process: until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import anyio

from petals_async.scopes import open_tasks
from petals_async.server.block_server import BlockServer


async def serve(server: BlockServer, on_ready: Callable[[BlockServer], None]) -> None:
    """Run a block server until SIGTERM, which drains it, or SIGINT or a second SIGTERM, which stop it at once.

    Before the server is ready there is nothing to drain, and SIGTERM stops it at once as well.

    Args:
        server: The server, not yet started.
        on_ready: Called once, when it can be used.

    Raises:
        PetalsAsyncError: It can't be started.
    """
    async with open_tasks() as tasks:
        ready, draining = anyio.Event(), anyio.Event()
        await tasks.start(_obey_signals, tasks.cancel_scope, ready, draining)
        async with server:
            ready.set()
            on_ready(server)
            await draining.wait()
            await server.drain()
        tasks.cancel_scope.cancel()


async def _obey_signals(
    scope: anyio.CancelScope,
    ready: anyio.Event,
    draining: anyio.Event,
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGINT or draining.is_set() or not ready.is_set():
                scope.cancel()
                return
            draining.set()
