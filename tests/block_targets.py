"""A block server over the toy model with everything that conformance checks can ask for, on both transports."""

from contextlib import asynccontextmanager

import anyio

from petals_async.core.server_info import Limits, ServerInfo
from petals_async.core.span import Span
from petals_async.errors import ComputeError
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.rpc.block_servicer import BlockServicer
from petals_async.rpc.server import serve_blocks
from petals_async.server.host import BlockHost, HostOptions
from petals_async.testing.conformance import Target
from petals_async.testing.gate import Gate
from petals_async.testing.memory_network import MemoryListener, MemoryNetwork
from petals_async.testing.toy import TOY_KV_BYTES, ToyBackend, toy_reference, toy_states, toy_vectors

SPAN = Span(2, 5)
HIDDEN_SIZE = 8
LIMITS = Limits(max_step_tokens=256, max_session_tokens=512, max_batch_size=48, max_in_flight_steps=4)
KV_TOKENS = 12_800
PROGRESS_INTERVAL_S = 0.05
INFO = ServerInfo(
    server_id="server-1",
    name="toy",
    address="toy:1",
    version="test",
    model="toy",
    model_fingerprint="f" * 64,
    num_blocks=8,
    hidden_size=HIDDEN_SIZE,
    span=SPAN,
    dtype="float32",
    limits=LIMITS,
)


class HeldWorker:
    """Runs the backend inline; steps can be held, counted, and made to fail."""

    def __init__(self, backend):
        self._backend = backend
        self.gate = Gate()
        self.failure = None
        self.num_computed = 0

    async def run(self, step):
        await anyio.lowlevel.checkpoint()
        await self.gate.passed()
        failure, self.failure = self.failure, None
        if isinstance(failure, ComputeError):
            return failure
        if failure is not None:
            raise failure
        self.num_computed += 1
        return self._backend.run([step])[0]

    async def call(self, function):
        await anyio.lowlevel.checkpoint()
        return function()


class Served:
    """A host over the toy model, and its hooks."""

    def __init__(self, *, limits=LIMITS, **options):
        backend = ToyBackend(SPAN, hidden_size=HIDDEN_SIZE)
        budget = len(SPAN) * KV_TOKENS * TOY_KV_BYTES
        defaults = {"kv_budget_bytes": budget, "progress_interval_s": PROGRESS_INTERVAL_S}
        self.worker = HeldWorker(backend)
        self.host = BlockHost(INFO, backend, self.worker, HostOptions(**(defaults | options)))
        self.tasks = None

    def target(self, connector, address):
        return Target(
            connector,
            address,
            reference=reference,
            evict=self.evict,
            advance=self.advance,
            hold_compute=self.hold_compute,
            fail_next_compute=self.fail_next_compute,
            num_computed=lambda: self.worker.num_computed,
            start_draining=self.start_draining,
        )

    async def evict(self, session_id):
        return self.host.table.evict(session_id)

    async def advance(self, seconds):
        """Move the leases rather than the clock."""
        for session in self.host.table._sessions.values():
            if session.expires_at is not None:
                session.expires_at -= seconds
        self.host.table.expire()

    @asynccontextmanager
    async def hold_compute(self):
        self.worker.gate.close()
        try:
            yield
        finally:
            self.worker.gate.open()

    def fail_next_compute(self):
        self.worker.failure = ComputeError("asked to fail")

    async def start_draining(self, deadline_s):
        self.tasks.start_soon(self.host.drain, deadline_s)


def reference(hidden, span):
    rows = [
        toy_reference(row, len(span), first_block=span.start, hidden_size=HIDDEN_SIZE) for row in toy_vectors(hidden)
    ]
    return toy_states(hidden.dtype, rows)


@asynccontextmanager
async def grpc_target(served):
    """Serve over gRPC on a free port of this machine."""
    servicer = BlockServicer()
    servicer.service = served.host
    async with (
        serve_blocks(servicer, "127.0.0.1", 0) as server,
        anyio.create_task_group() as served.tasks,
    ):
        served.tasks.start_soon(served.host.run)
        await server.set_serving(True)
        yield served.target(GrpcConnector(), f"127.0.0.1:{server.port}")
        served.tasks.cancel_scope.cancel()


@asynccontextmanager
async def memory_target(served):
    """Serve on an in-memory network."""
    network = MemoryNetwork()
    async with anyio.create_task_group() as served.tasks:
        listener = MemoryListener(served.host, served.tasks, Gate(), Gate())
        network.listen("toy:1", listener)
        served.tasks.start_soon(served.host.run)
        yield served.target(network.connector(), "toy:1")
        network.unlisten("toy:1", listener)
        served.tasks.cancel_scope.cancel()
