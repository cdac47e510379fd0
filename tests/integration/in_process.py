"""A swarm of block servers in this very process, over real gRPC, so that a test can look into both ends."""

from contextlib import asynccontextmanager

import anyio

import petals_async
from petals_async.scopes import open_tasks

ROUTE = {"first": "0:2", "middle": "2:4", "last": "4:6"}
"""The usual three spans of a model of six blocks."""


class InProcessSwarm:
    """A registry and named block servers, each in a task; `lose` takes one away."""

    def __init__(self, model, registry, tasks, options):
        self._model = str(model)
        self._options = options
        self._tasks = tasks
        self._ends = {}
        self.registry = registry
        self.servers = {}

    async def add(self, name, blocks, **options):
        options = {"registry": self.registry.address, "threads": 1, **self._options, **options}
        model = options.pop("model", self._model)
        server = petals_async.BlockServer(str(model), blocks, name=name, **options)
        self._ends[name] = anyio.Event(), anyio.Event()
        await self._tasks.start(self._serve, server, *self._ends[name])
        self.servers[name] = server
        return server

    async def _serve(self, server, end, ended, *, task_status=anyio.TASK_STATUS_IGNORED):
        async with server:
            task_status.started()
            await end.wait()
        ended.set()

    async def lose(self, name):
        """End a server and all its streams, without a word before."""
        del self.servers[name]
        end, ended = self._ends.pop(name)
        end.set()
        await ended.wait()

    def sessions(self):
        """Return the sessions held, of all servers."""
        return [session for server in self.servers.values() for session in server.host.list_sessions()]

    def kv_bytes(self):
        """Return the bytes of KV that are taken, of all servers."""
        budgets = [server.host.table.budget for server in self.servers.values()]
        return sum(budget.capacity_bytes - budget.free_bytes for budget in budgets)


@asynccontextmanager
async def in_process_swarm(model, spans=ROUTE, **options):
    """Serve a model in this process, over the named spans; the options are for all servers."""
    async with petals_async.Registry("127.0.0.1:0") as registry, open_tasks() as tasks:
        swarm = InProcessSwarm(model, registry, tasks, options)
        for name, blocks in spans.items():
            await swarm.add(name, blocks)
        try:
            yield swarm
        finally:
            with anyio.CancelScope(shield=True):
                for name in list(swarm.servers):
                    await swarm.lose(name)
