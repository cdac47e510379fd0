"""One block server of the in-memory swarm: what it is, and one life of its process after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from petals_async.abc import BackendStep, BlockBackend, Registry
from petals_async.core.server_info import Limits, ServerInfo, ServerState
from petals_async.core.span import Span
from petals_async.server.announcer import Announcer
from petals_async.server.host import DEFAULT_PROGRESS_INTERVAL_S, BlockHost, HostOptions
from petals_async.server.session_table import DEFAULT_LEASE_S
from petals_async.testing.gate import Gate
from petals_async.testing.memory_network import MemoryListener, MemoryNetwork
from petals_async.testing.memory_registry import GatedRegistry
from petals_async.testing.memory_stream import Tap
from petals_async.testing.workers import InlineWorker

DEFAULT_KV_BUDGET_BYTES = 64 * 1024**2
"""KV bytes of a node, if nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node of the swarm is.

    Attributes:
        name: Stable, for people and for fault plans; also its address.
        blocks: "START:END".
        block_step_s: What it states of its speed: the planner prefers the fast.
        step_s: Virtual seconds that a step takes to compute, or a function of the step.
        respawn_s: Seconds after which it comes back when it has died; None for never.
        block_digests: One for each block, or none.
    """

    name: str
    blocks: str
    dtype: str = "float32"
    kv_budget_bytes: int = DEFAULT_KV_BUDGET_BYTES
    limits: Limits = field(default_factory=Limits)
    progress_interval_s: float = DEFAULT_PROGRESS_INTERVAL_S
    lease_s: float = DEFAULT_LEASE_S
    step_s: float | Callable[[BackendStep], float] = 0.001
    block_step_s: float = 0.001
    respawn_s: float | None = None
    block_digests: tuple[str, ...] = ()
    numeric_fingerprint: str = "inline"

    @property
    def span(self) -> Span:
        """The blocks held."""
        return Span.parse(self.blocks)

    @property
    def address(self) -> str:
        """Where it listens; the same in all its lives."""
        return f"{self.name}.memory:1"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What all nodes of a swarm serve.

    Attributes:
        name: For people.
        fingerprint: Of the model.
        num_blocks: Blocks of the whole model.
        hidden_size: Width of the hidden states.
    """

    name: str
    fingerprint: str
    num_blocks: int
    hidden_size: int


class MemoryNode:
    """A node in one life: made when its process starts, useless when that has died.

    Args:
        spec: What it is.
        model: What it serves a part of.
        server_id: New in each life.
        backend: The blocks.
        network: Where it listens.
        path: Closed while the network swallows everything to and from it.
        tap: Sees its messages.
        during: Called in the middle of each step's computing.

    Attributes:
        host: The very code of a real server.
        process: Closed while the process is stopped.
    """

    def __init__(
        self,
        spec: NodeSpec,
        model: ModelSpec,
        server_id: str,
        backend: BlockBackend,
        network: MemoryNetwork,
        path: Gate,
        *,
        tap: Tap | None = None,
        during: Callable[[BackendStep], object] | None = None,
    ) -> None:
        self.spec = spec
        self.path = path
        self.process = Gate()
        self.backend = backend
        self.worker = InlineWorker(backend, step_s=spec.step_s, during=self._during if during else None)
        self._on_compute = during
        self._network = network
        self._tap = tap
        self._scope = anyio.CancelScope()
        self._listener: MemoryListener | None = None
        self._leave = anyio.Event()
        self.drain_deadline_s = 0.0
        self.host = BlockHost(
            self._info(model, server_id),
            backend,
            self.worker,
            HostOptions(spec.kv_budget_bytes, lease_s=spec.lease_s, progress_interval_s=spec.progress_interval_s),
        )

    def _info(self, model: ModelSpec, server_id: str) -> ServerInfo:
        spec = self.spec
        return ServerInfo(
            server_id=server_id,
            name=spec.name,
            address=spec.address,
            version="memory",
            model=model.name,
            model_fingerprint=model.fingerprint,
            num_blocks=model.num_blocks,
            hidden_size=model.hidden_size,
            span=spec.span,
            dtype=spec.dtype,
            state=ServerState.SERVING,
            block_digests=spec.block_digests,
            numeric_fingerprint=spec.numeric_fingerprint,
            exact=True,
            limits=spec.limits,
            block_step_s=spec.block_step_s,
        )

    @property
    def num_streams(self) -> int:
        """Streams that are served now."""
        return self._listener.num_streams if self._listener else 0

    async def _during(self, step: BackendStep) -> None:
        await self.process.passed()
        if self._on_compute is not None:
            self._on_compute(step)
        await self.process.passed()

    async def run(self, registry: Registry, ttl_s: float) -> None:
        """Live: listen, announce, serve, until killed; or until `leave` and the drain are done."""
        announcer = Announcer(GatedRegistry(registry, self.process), self.host.get_server_info, ttl_s)
        with self._scope:
            async with anyio.create_task_group() as tasks:
                self._listener = MemoryListener(self.host, tasks, self.process, self.path, self._tap)
                self._network.listen(self.spec.address, self._listener)
                try:
                    tasks.start_soon(self.host.run)
                    tasks.start_soon(announcer.run)
                    await self._leave.wait()
                    await announcer.announce_now(self.drain_deadline_s)
                    await self.host.drain(self.drain_deadline_s)
                    await announcer.withdraw()
                    tasks.cancel_scope.cancel()
                finally:
                    self._network.unlisten(self.spec.address, self._listener)

    def kill(self) -> None:
        """Die at once, as by SIGKILL: streams break, nothing is withdrawn."""
        if self._listener is not None:
            self._network.unlisten(self.spec.address, self._listener)
        self.worker.stop()
        self._scope.cancel()
        self.process.open()

    def leave(self, deadline_s: float) -> None:
        """Drain and end, as by SIGTERM."""
        self.drain_deadline_s = deadline_s
        self._leave.set()
