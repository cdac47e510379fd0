"""A registry in this process, and block servers as its children, from one preloaded fork server."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskStatus

from petals_async.cli.supervisor import Supervisor
from petals_async.core.span import Span
from petals_async.engine.thread import worker_thread
from petals_async.errors import ConfigurationError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.resolve import resolve
from petals_async.registry.embedded import Registry
from petals_async.scopes import open_tasks
from petals_async.server.process import forkserver, preload

HOST = "127.0.0.1"
"""`up` is for one machine: nothing of it can be reached from others."""

if TYPE_CHECKING:
    from petals_async.cli.up import Output, UpOptions


def split_evenly(num_blocks: int, num_servers: int) -> list[Span]:
    """Return consecutive spans over all blocks; their lengths differ by one at most, longer ones first.

    Raises:
        ConfigurationError: There are more servers than blocks.
    """
    if num_servers > num_blocks:
        raise ConfigurationError(f"the model has {num_blocks} blocks, they can't be shared by {num_servers} servers")
    length, longer = divmod(num_blocks, num_servers)
    starts = [index * length + min(index, longer) for index in range(num_servers + 1)]
    return [Span(start, end) for start, end in itertools.pairwise(starts)]


def default_threads(num_servers: int) -> int:
    """Return each server's share of the cores that this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_servers)


class LocalSwarm:
    """A registry and supervised servers.

    Args:
        options: What was typed.
        output: Where it is told.
    """

    def __init__(self, options: UpOptions, output: Output) -> None:
        self._options = options
        self._output = output
        self._supervisors: list[Supervisor] = []

    async def run(self) -> None:
        """Start everything, and keep it running until it is cancelled.

        Raises:
            PetalsAsyncError: The model, the port or a server's first start failed.
        """
        options, output = self._options, self._output
        async with Registry(f"{HOST}:{options.port}") as registry, worker_thread("petals-async files") as thread:
            checkpoint = await thread.call(self._open_checkpoint)
            spans = split_evenly(checkpoint.num_blocks, options.servers)
            output.tell("importing torch and transformers, once for all servers")
            context = forkserver(checkpoint.text_config.get("model_type"))
            await preload(context)
            async with open_tasks() as tasks:
                async with open_tasks() as starts:
                    for supervisor in self._supervise(context, registry.address, spans):
                        starts.start_soon(tasks.start, supervisor.run)
                output.complete(registry.address)

    def _open_checkpoint(self) -> Checkpoint:
        """Fetch or convert the model once, before the servers look for it."""
        return Checkpoint.open(resolve(self._options.model, progress=self._output.tell))

    def _supervise(self, context: ForkServerContext, registry: str, spans: list[Span]) -> list[Supervisor]:
        options = self._options
        common: dict[str, Any] = {
            "model": options.model,
            "registry": registry,
            "dtype": options.dtype,
            "kv_budget": options.kv_budget,
            "threads": options.threads or default_threads(len(spans)),
        }
        self._supervisors = [
            Supervisor(
                context,
                {**common, "blocks": span, "name": f"up-{number}"},
                on_ready=partial(self._output.ready, f"up-{number}"),
                on_line=self._output.tell,
            )
            for number, span in enumerate(spans, start=1)
        ]
        return self._supervisors

    def stop_at_once(self) -> None:
        """Let the servers not wait for their clients, now or when they are ended."""
        for supervisor in self._supervisors:
            supervisor.stop_at_once()


async def run_swarm(options: UpOptions, output: Output) -> None:
    """Run a swarm until SIGTERM, which lets it drain, or SIGINT or a second SIGTERM, which end it at once.

    Raises:
        PetalsAsyncError: It can't be started.
    """
    swarm = LocalSwarm(options, output)
    async with open_tasks() as tasks:
        scope = anyio.CancelScope()
        await tasks.start(_obey_signals, swarm, scope)
        with scope:
            await swarm.run()
        tasks.cancel_scope.cancel()


async def _obey_signals(
    swarm: LocalSwarm, scope: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGINT or scope.cancel_called:
                swarm.stop_at_once()
            scope.cancel()
