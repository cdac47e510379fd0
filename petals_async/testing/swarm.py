"""A whole swarm in memory: registry, block servers and clients' connections, in whatever time AnyIO's clock shows.

    async with MemorySwarm([NodeSpec("a", "0:2"), NodeSpec("b", "2:4")]) as swarm, swarm.session() as session:
        outputs = await session.step(ToyEdges(4).embed([1, 2, 3], position=0))
        swarm.kill("b")

The servers are the real `BlockHost`, `SessionTable` and `Announcer`; the clients are the real ones. Only the
network and the compute thread are stand-ins. On trio's mock clock an hour of time limits passes in milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from petals_async.abc import BlockBackend
from petals_async.client.route import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, RouteOptions
from petals_async.client.session import Session, open_session
from petals_async.client.swarm import Swarm, open_swarm
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.replay import DEFAULT_REPLAY_LOG_BYTES
from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.core.span import Span
from petals_async.errors import ClosedError, leaf_of
from petals_async.testing.faults import FaultKind, FaultPlan
from petals_async.testing.gate import Gate
from petals_async.testing.injector import FaultInjector
from petals_async.testing.memory_network import DEFAULT_LATENCY_S, MemoryNetwork
from petals_async.testing.memory_registry import RestartableRegistry
from petals_async.testing.node import MemoryNode, ModelSpec, NodeSpec
from petals_async.testing.toy import TOY_HIDDEN_SIZE, ToyBackend

DEFAULT_TTL_S = 3.0
"""A dead node leaves the registry after this time."""

DEFAULT_MAX_TOKENS = 256
"""Tokens of a session, if nobody says otherwise."""

DEFAULT_CHUNK_TOKENS = 512
"""Tokens of a step at most, if nobody says otherwise."""

TRACE_LINES = 20_000
"""Lines of the trace that are kept."""

BackendFactory = Callable[[NodeSpec], BlockBackend]


def toy_backend(spec: NodeSpec) -> ToyBackend:
    """Make a node's blocks of the toy model."""
    return ToyBackend(spec.span, dtype=spec.dtype)


class MemorySwarm:
    """Block servers in memory, with the means to let them die.

    Args:
        nodes: Who serves what.
        model: What is served; None for the toy model with as many blocks as the nodes hold.
        backend: Makes a node's blocks, anew for each of its lives.
        ttl_s: Time to live of the nodes' leases.
        latency_s: Seconds that a message is on the way.
        respawn_s: Seconds after which any dead node comes back; None for never, or as the node says.
        plan: Faults to come.

    Attributes:
        registry: Who serves what.
        network: Addresses, and connectors to them.
        model: What is served.
        trace: What happened, one line each.
        faults: What carries out the plan; `faults.fired` is what came true.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        *,
        model: ModelSpec | None = None,
        backend: BackendFactory = toy_backend,
        ttl_s: float = DEFAULT_TTL_S,
        latency_s: float = DEFAULT_LATENCY_S,
        respawn_s: float | None = None,
        plan: FaultPlan | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in nodes}
        self._backend = backend
        self._ttl_s = ttl_s
        self._respawn_s = respawn_s
        self._paths: dict[str, Gate] = {}
        self._lives: dict[str, int] = {}
        self._nodes: dict[str, MemoryNode] = {}
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self.registry = RestartableRegistry()
        self.network = MemoryNetwork(latency_s)
        self.model = model or toy_model(max(spec.span.end for spec in nodes))
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.faults = FaultInjector(plan or FaultPlan(), self)

    # -- life

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._tasks = tasks
            self._stack = stack.pop_all()
        self.registry.start(tasks)
        for name in list(self._specs):
            self._start(name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks = None
        for node in self._nodes.values():
            node.process.open()
        try:
            await self._stack.aclose()  # not told of the error, which would come out wrapped in a group
        except BaseExceptionGroup as group:
            raise leaf_of(group) from None

    def _open_tasks(self) -> TaskGroup:
        if self._tasks is None:
            raise ClosedError("the swarm works inside `async with` only")
        return self._tasks

    def _start(self, name: str) -> None:
        """Begin a node's next life."""
        spec = self._specs[name]
        self._lives[name] = self._lives.get(name, 0) + 1
        server_id = f"{name}-{self._lives[name]}"
        tap = self.faults.tap(name)
        node = MemoryNode(
            spec,
            self.model,
            server_id,
            self._backend(spec),
            self.network,
            self._paths.setdefault(name, Gate()),
            tap=tap,
            during=tap.computing,
        )
        self._nodes[name] = node
        self.note(f"{server_id} starts")
        self._open_tasks().start_soon(self._live, name, node)

    async def _live(self, name: str, node: MemoryNode) -> None:
        await node.run(self.registry, self._ttl_s)
        if self._nodes.get(name) is node:
            del self._nodes[name]

    # -- what can be done to it

    def add(self, spec: NodeSpec) -> None:
        """Let a new node join."""
        self._specs[spec.name] = spec
        self._start(spec.name)

    def kill(self, name: str) -> None:
        """Let a node die as by SIGKILL; it comes back if the respawn policy says so."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self.note(f"{name} dies")
        node.kill()
        respawn_s = node.spec.respawn_s if node.spec.respawn_s is not None else self._respawn_s
        if respawn_s is not None:
            self._open_tasks().start_soon(self._respawn, name, respawn_s)

    def restart(self, name: str, after_s: float = 0.0) -> None:
        """Kill a node, if it lives, and start it again after some time: a new server id, the same address."""
        node = self._nodes.pop(name, None)
        if node is not None:
            self.note(f"{name} dies, to come back")
            node.kill()
        self._open_tasks().start_soon(self._respawn, name, after_s)

    async def _respawn(self, name: str, after_s: float) -> None:
        await anyio.sleep(after_s)
        if name not in self._nodes and self._tasks is not None:
            self._start(name)

    def pause(self, name: str) -> None:
        """Stop a node's process, as by SIGSTOP."""
        if name in self._nodes:
            self.note(f"{name} stops")
            self._nodes[name].process.close()

    def resume(self, name: str) -> None:
        """Let a stopped process go on, as by SIGCONT."""
        if name in self._nodes:
            self.note(f"{name} goes on")
            self._nodes[name].process.open()

    def black_hole(self, name: str) -> None:
        """Let the network swallow everything to and from a node."""
        self.note(f"{name} is cut off")
        self._paths.setdefault(name, Gate()).close()

    def reconnect(self, name: str) -> None:
        """End that; what was swallowed arrives now, as TCP would send it again."""
        self.note(f"{name} is reached again")
        self._paths.setdefault(name, Gate()).open()

    def drain(self, name: str, deadline_s: float = 10.0) -> None:
        """Let a node leave as by SIGTERM: it drains, withdraws, and ends."""
        self.note(f"{name} drains")
        self._nodes[name].leave(deadline_s)

    def stop_registry(self) -> None:
        """Let the registry go away."""
        self.note("the registry goes away")
        self.registry.stop()

    def start_registry(self) -> None:
        """Let it come back, with no memory of what it knew."""
        self.note("the registry is back")
        self.registry.start(self._open_tasks())

    def evict(self, name: str) -> int:
        """Drop the KV of all sessions on a node whose steps are all answered; return how many that were."""
        node = self._nodes.get(name)
        if node is None:
            return 0
        held: list[bytes] = []
        node.host.table.streams(lambda session: held.append(session.request.session_id))
        return sum(self.evict_session(name, session_id) for session_id in held)

    def evict_session(self, name: str, session_id: bytes) -> bool:
        """Drop one session's KV on a node, unless a step of it is being worked on."""
        node = self._nodes.get(name)
        evicted = node is not None and node.host.table.evict(session_id)
        self.note(f"{name} evicts a session" if evicted else f"{name} keeps a session")
        return evicted

    def later(self, seconds: float, name: str, kind: FaultKind) -> None:
        """End a pause or a black hole after some time; 0 is never."""
        if seconds > 0:
            self._open_tasks().start_soon(self._end_fault, seconds, name, kind)

    async def _end_fault(self, seconds: float, name: str, kind: FaultKind) -> None:
        await anyio.sleep(seconds)
        if kind is FaultKind.PAUSE:
            self.resume(name)
        else:
            self.reconnect(name)

    # -- what can be seen of it

    @property
    def alive(self) -> list[str]:
        """Names of the nodes that live, stopped ones included."""
        return list(self._nodes)

    def node(self, name: str) -> MemoryNode:
        """Return a node that lives."""
        return self._nodes[name]

    def server(self, name: str) -> ServerInfo:
        """Return a living node's record."""
        return self._nodes[name].host.get_server_info()

    def kv_in_use(self) -> int:
        """KV bytes held on all nodes that live."""
        return sum(node.host.table.budget.used_bytes for node in self._nodes.values())

    def sessions(self) -> dict[str, list[SessionInfo]]:
        """Return the sessions held, by node."""
        return {name: list(node.host.list_sessions()) for name, node in self._nodes.items()}

    def num_sessions(self) -> int:
        """Sessions held on all nodes that live."""
        return sum(len(node.host.table) for node in self._nodes.values())

    def num_streams(self) -> int:
        """Streams open, seen from both ends."""
        return self.network.num_client_streams + sum(node.num_streams for node in self._nodes.values())

    def note(self, what: str) -> None:
        """Write a line into the trace."""
        self.trace.append(f"{anyio.current_time():.6f} {what}")

    # -- clients

    @asynccontextmanager
    async def client(
        self, name: str = "client", dtype: str = "float32", *, settled: bool = True
    ) -> AsyncIterator[Swarm]:
        """Open a client's picture of the swarm; sessions are opened over it.

        Args:
            name: For faults and traces.
            dtype: Only nodes that compute in this dtype count.
            settled: Whether to wait until the client knows all nodes that live now, so that its routes don't hang on
                who happened to announce itself first.
        """
        connector = self.network.connector(name)
        async with open_swarm(self.registry, connector, model_fingerprint=self.model.fingerprint, dtype=dtype) as swarm:
            if settled:
                with anyio.move_on_after(self._ttl_s):
                    await self.seen_by(swarm)
            yield swarm

    async def seen_by(self, client: Swarm) -> None:
        """Return when a client knows all nodes that live now."""
        ids = {self.server(name).server_id for name in self._nodes}
        while not ids <= {server.server_id for server in client.servers()}:
            await client.wait_for_change(self._ttl_s)

    @asynccontextmanager
    async def session(
        self,
        client: Swarm | None = None,
        *,
        batch_size: int = 1,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        dtype: str = "float32",
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        fast_replay: bool = False,
        log_bytes: int = DEFAULT_REPLAY_LOG_BYTES,
    ) -> AsyncIterator[Session]:
        """Open a client's session over all blocks; without a client, with one of its own."""
        async with AsyncExitStack() as stack:
            if client is None:
                client = await stack.enter_async_context(self.client(dtype=dtype))
            options = RouteOptions(
                model_fingerprint=self.model.fingerprint,
                batch_size=batch_size,
                max_tokens=max_tokens,
                dtype=dtype,
                chunk_tokens=chunk_tokens,
                timeout_s=timeout_s,
                max_retries=max_retries,
                fast_replay=fast_replay,
            )
            yield await stack.enter_async_context(
                open_session(
                    client,
                    options,
                    span=Span(0, self.model.num_blocks),
                    hidden_size=self.model.hidden_size,
                    log_budget=ByteBudget(log_bytes, "the replay logs"),
                )
            )


def toy_model(num_blocks: int) -> ModelSpec:
    """Return the toy model's record."""
    return ModelSpec("toy", f"toy-{num_blocks}", num_blocks, TOY_HIDDEN_SIZE)


def three_nodes(num_blocks: int = 6, **fields: Any) -> list[NodeSpec]:
    """Return nodes "a", "b" and "c" that hold a third of the blocks each."""
    third = num_blocks // 3
    spans = {"a": f"0:{third}", "b": f"{third}:{2 * third}", "c": f"{2 * third}:{num_blocks}"}
    return [replace(NodeSpec(name, blocks), **fields) for name, blocks in spans.items()]
