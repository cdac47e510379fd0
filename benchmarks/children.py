"""The processes of a benchmark: block servers from a fork server, and anything else that answers over a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import anyio

from petals_async.server.process import ServerProcess, forkserver


@dataclass
class Child:
    """A process on the other end of a pipe, and its first message."""

    pipe: Connection
    first: Any

    async def ask(self, question: Any) -> Any:
        """Send a message, and return the answer."""
        self.pipe.send(question)
        await anyio.wait_readable(self.pipe)
        return self.pipe.recv()


@asynccontextmanager
async def child(target: Any, *arguments: Any) -> AsyncIterator[Child]:
    """Run `target(pipe, *arguments)` in a process; wait for its first message; give both."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        await anyio.wait_readable(ours)
        yield Child(ours, ours.recv())
    finally:
        process.kill()
        process.join()


async def start_servers(
    stack: AsyncExitStack, registry: str, model: str, spans: Sequence[str], **options: Any
) -> list[ServerProcess]:
    """Start block servers with one thread each; they end with the stack."""
    context = forkserver("llama")
    servers = []
    for span in spans:
        settings = {"model": model, "blocks": span, "registry": registry, "threads": 1, **options}
        server = ServerProcess(context, settings)
        stack.push_async_callback(server.stop, 10.0)
        await server.start()
        servers.append(server)
    return servers
