"""Real processes: a registry here, block servers as children of one preloaded fork server."""

import signal
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import petals_async
from petals_async.server.process import ServerProcess, forkserver
from petals_async.testing.tiny import make_tiny_llama


@pytest.fixture(scope="session")
def context():
    return forkserver("llama")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_blocks=6)


class ProcessSwarm:
    """A registry and named block servers in processes of their own."""

    def __init__(self, context, model, registry, stack):
        self._context = context
        self._stack = stack
        self._options = {"model": str(model), "threads": 1}
        self.registry = registry
        self.processes = {}

    async def add(self, name, blocks, **options):
        settings = {**self._options, "registry": self.registry.address, "name": name, "blocks": blocks, **options}
        process = ServerProcess(self._context, settings)
        self._stack.push_async_callback(process.stop, 10)
        self.processes[name] = process
        return await process.start()

    async def kill(self, name):
        self.processes[name].signal(signal.SIGKILL)
        await self.processes[name].wait()


@pytest.fixture
def process_swarm(context):
    @asynccontextmanager
    async def start(model, **spans):
        async with petals_async.Registry("127.0.0.1:0") as registry, AsyncExitStack() as stack:
            swarm = ProcessSwarm(context, model, registry, stack)
            for name, blocks in spans.items():
                await swarm.add(name, blocks)
            yield swarm

    return start
