"""One swarm of real processes that outlives the tests, and a stage on which only some of its servers are seen.

`RespawningSwarm` starts a server again, under the same name, when it was killed. `Stage` gives a client its
registry: it shows the servers that a test wants to be seen, so that the planner has one choice only.
"""

import signal
from contextlib import asynccontextmanager

import anyio

from petals_async.errors import PetalsAsyncError
from petals_async.registry.address import connect_registry
from petals_async.registry.memory import MemoryRegistry
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.server.process import ServerProcess

LEASE_S = 60.0
"""How long a server that was put on the stage stays there without a renewal: longer than any test."""


class RespawningSwarm:
    """Named block servers, each in a process; started at first use, and again when they were killed.

    Args:
        context: The fork server.
        model: Path of the model.
        registry: Address of the registry that they announce themselves to.
        spans: The blocks of each name.
        options: More options of the servers.
    """

    def __init__(self, context, model, registry, spans, **options):
        self._context = context
        self._registry = registry
        self._options = {"model": str(model), "registry": registry, "threads": 1, **options}
        self._processes = {}
        self._infos = {}
        self.spans = spans

    async def ensure(self, names):
        """Start those that don't run."""
        missing = [name for name in names if not self.runs(name)]
        async with anyio.create_task_group() as tasks:
            for name in missing:
                tasks.start_soon(self._start, name)

    def runs(self, name):
        process = self._processes.get(name)
        return process is not None and process.exit_code is None

    async def _start(self, name):
        process = ServerProcess(self._context, {**self._options, "name": name, "blocks": self.spans[name]})
        self._processes[name] = process
        ready = await process.start()
        async with connect_registry(self._registry) as registry:
            while True:
                servers = await registry.list_servers()
                found = [server for server in servers if server.server_id == ready.server_id]
                if found and found[0].state.value == "serving":
                    break
                await anyio.sleep(0.02)
        self._infos[name] = found[0]

    def info(self, name):
        """Return what the server of this name, as it runs now, says of itself."""
        return self._infos[name]

    async def kill(self, name):
        """Kill a server, and return when it is dead."""
        self._processes[name].signal(signal.SIGKILL)
        await self._processes[name].wait()

    async def num_sessions(self, name):
        """Ask a server how many sessions it holds."""
        async with GrpcConnector().connect(self.info(name).address) as channel:
            return len(await channel.list_sessions())

    async def stop(self):
        """End all processes."""
        async with anyio.create_task_group() as tasks:
            for process in self._processes.values():
                tasks.start_soon(process.stop, 0)


class Stage:
    """What a client sees of a swarm: an `abc.Registry` that a test fills, and the respawner of who dies on it.

    Attributes:
        registry: For `Client(registry=...)`.
        encore: Whether a server that was started again is shown.
        num_kills: Servers killed so far.
    """

    def __init__(self, swarm, registry, tasks):
        self._swarm = swarm
        self._tasks = tasks
        self._waiting = []
        self.registry = registry
        self.encore = False
        self.num_kills = 0

    async def show(self, *names):
        """Let the client see servers."""
        for name in names:
            await self.registry.announce(self._swarm.info(name), ttl_s=LEASE_S)

    async def kill(self, name):
        """Kill a server; it is started again under the same name, and shown once there is an encore."""
        self.num_kills += 1
        dead = self._swarm.info(name)
        await self._swarm.kill(name)
        self._tasks.start_soon(self._respawn, name, dead)

    async def _respawn(self, name, dead):
        with anyio.CancelScope(shield=True):  # a failed test must leave no half-started server to the next one
            await self._swarm.ensure([name])
        await self.registry.withdraw(dead.server_id)
        if self.encore:
            await self.show(name)
        else:
            self._waiting.append(name)

    async def give_encore(self):
        """Show who was started again, and from now on at once."""
        self.encore = True
        await self.show(*self._waiting)


@asynccontextmanager
async def open_stage(swarm, *names):
    """Open a stage with these servers on it; leaving it waits for those that are being started again."""
    await swarm.ensure(names)
    async with MemoryRegistry() as registry, anyio.create_task_group() as tasks:
        stage = Stage(swarm, registry, tasks)
        await stage.show(*names)
        yield stage


async def eventually(condition, timeout_s=10.0):
    """Wait until a condition holds, asking again and again; fail when it doesn't in time."""
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                if await condition():
                    return
            except PetalsAsyncError:
                pass
            await anyio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {condition}")
