"""Block servers as child processes, started from one preloaded fork server.

Importing torch and transformers takes seconds; a fork of a process that has them takes a tenth of one. The fork
server itself runs no torch operation and no gRPC, so that its forks are safe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any

import anyio

from petals_async.engine.thread import worker_thread
from petals_async.errors import ClosedError, PetalsAsyncError
from petals_async.loop import run
from petals_async.scopes import open_tasks

ORPHAN_GRACE_S = 5
"""How long a child may take to end by itself when its parent is gone, in whole seconds; then SIGALRM ends it."""

PRELOADED = (
    "torch",
    "transformers",
    "petals_async.models.span",
    "petals_async.models.numerics",
    "petals_async.engine.backend",
    "petals_async.server.block_server",
)
"""What every child needs; a model's own module is added to it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a child says when it can be used."""

    server_id: str
    address: str
    span: str


@dataclass(frozen=True, slots=True)
class Failed:
    """What a child says before it gives up."""

    message: str


def forkserver(model_type: str | None = None) -> ForkServerContext:
    """Return the context whose children start preloaded.

    Args:
        model_type: The architecture, as in config.json; its module is preloaded as well.
    """
    context = multiprocessing.get_context("forkserver")
    modules = [*PRELOADED]
    if model_type:
        modules.append(f"transformers.models.{model_type}.modeling_{model_type}")
    context.set_forkserver_preload(modules)
    return context


async def preload(context: ForkServerContext) -> None:
    """Start the fork server, and return when it has imported what its children need; the event loop runs on.

    Without this, the first child's start holds up the event loop for those seconds. The fork server doesn't hear
    Ctrl-C, which the terminal sends to it as well: it would print a traceback. To be called on the main thread.
    Cancelling leaves at once.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    first = context.Process(target=_nothing)
    async with worker_thread("petals-async preload") as thread:
        await thread.call(first.start)
        await thread.call(first.join)


def _nothing() -> None:
    """Be a child that ends at once."""


class ServerProcess:
    """One block server in a child process.

    Args:
        context: From `forkserver`.
        options: Keyword arguments of `BlockServer`.
        on_progress: Takes lines for a person while the child starts.
    """

    def __init__(
        self, context: ForkServerContext, options: dict[str, Any], on_progress: Callable[[str], None] | None = None
    ) -> None:
        self._context = context
        self._options = options
        self._report = on_progress or (lambda _line: None)
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    async def start(self) -> Ready:
        """Start the child, and return when it can be used.

        Raises:
            PetalsAsyncError: It gave up; the message is its own.
        """
        self._pipe, theirs = self._context.Pipe(duplex=False)
        self._process = self._context.Process(target=_child, args=(self._options, theirs), daemon=False)
        self._process.start()
        theirs.close()
        try:
            return await self._await_ready(self._pipe)
        except EOFError:
            await self.wait()
            raise PetalsAsyncError(
                f"a block server ended with exit code {self.exit_code} before it was ready"
            ) from None

    async def _await_ready(self, pipe: Connection) -> Ready:
        while True:
            await anyio.wait_readable(pipe)
            match pipe.recv():
                case Ready() as ready:
                    return ready
                case Failed(message):
                    raise PetalsAsyncError(message)
                case line:
                    self._report(str(line))

    @property
    def pid(self) -> int:
        """The child's process id."""
        if self._process is None or self._process.pid is None:
            raise ClosedError("the process was not started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self._process.exitcode if self._process is not None else None

    def signal(self, number: signal.Signals) -> None:
        """Send the child a signal, if it still runs."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    async def wait(self) -> int:
        """Return the child's exit code, when it has ended."""
        if self._process is None:
            raise ClosedError("the process was not started")
        while self._process.exitcode is None:
            await anyio.wait_readable(self._process.sentinel)
            self._process.join(0.1)
        return self._process.exitcode

    async def stop(self, timeout_s: float) -> None:
        """Ask the child to drain; end it by force after a time."""
        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            self.signal(signal.SIGTERM)
            with anyio.move_on_after(timeout_s):
                await self.wait()
            self.signal(signal.SIGKILL)
            await self.wait()
            if self._pipe is not None:
                self._pipe.close()


def _child(options: dict[str, Any], pipe: Connection) -> None:
    """Be a block server: report over the pipe, end with 0 when stopped and 1 on any failure.

    It has a session of its own: Ctrl-C at the terminal is the parent's to pass on. It ends when the parent is gone.
    """
    os.setsid()
    from petals_async.server.block_server import BlockServer
    from petals_async.server.serve import serve

    def ready(server: BlockServer) -> None:
        info = server.info
        _say(pipe, Ready(info.server_id, info.address, str(info.span)))

    async def main() -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(_end_with_parent, tasks.cancel_scope)
            await serve(BlockServer(on_progress=lambda line: _say(pipe, line), **options), ready)
            tasks.cancel_scope.cancel()

    try:
        run(main)
    except PetalsAsyncError as error:
        _say(pipe, Failed(error.message))
        sys.exit(1)
    sys.exit(0)


async def _end_with_parent(scope: anyio.CancelScope) -> None:
    """Stop at once when the parent has ended, however it did, so that nothing is left behind."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    await anyio.wait_readable(parent.sentinel)
    signal.alarm(ORPHAN_GRACE_S)
    scope.cancel()


def _say(pipe: Connection, message: object) -> None:
    """Tell the parent; it may have stopped listening."""
    with suppress(OSError):
        pipe.send(message)
