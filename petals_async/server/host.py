"""What a block server does, whatever the transport: it implements `abc.BlockService` over a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from petals_async.abc import BlockBackend, ComputeWorker, ServerStream
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.messages import Draining, Opened, OpenSession
from petals_async.core.server_info import ServerInfo, ServerState, SessionInfo
from petals_async.core.validation import check_open
from petals_async.errors import RequestError, ServerDrainingError, ServerUnavailableError
from petals_async.server.session import HeldSession
from petals_async.server.session_handler import SessionHandler
from petals_async.server.session_table import DEFAULT_LEASE_S, SessionTable

DEFAULT_PROGRESS_INTERVAL_S = 0.5
"""Seconds between the signs of life of a step without a reply."""

DEFAULT_RECEIVE_BUDGET_BYTES = 256 * 1024**2
"""Bytes of steps not yet computed that all streams together may hold."""

FIRST_MESSAGE_TIMEOUT_S = 10.0
"""A stream that doesn't open a session within this time is ended."""

EXPIRY_CHECK_S = 1.0
"""Leases are checked at least this often."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The settings of a host; see the constants for the defaults' meaning."""

    kv_budget_bytes: int
    lease_s: float = DEFAULT_LEASE_S
    progress_interval_s: float = DEFAULT_PROGRESS_INTERVAL_S
    receive_budget_bytes: int = DEFAULT_RECEIVE_BUDGET_BYTES


class BlockHost:
    """Serves sessions over the blocks of one backend.

    Args:
        info: What the server is; `kv_*` and `state` are filled in here.
        backend: The blocks.
        worker: Where the backend runs.
        options: Bounds and intervals.
    """

    def __init__(self, info: ServerInfo, backend: BlockBackend, worker: ComputeWorker, options: HostOptions) -> None:
        self._info = replace(info, state=ServerState.SERVING)
        self._worker = worker
        self._options = options
        self._receive_budget = ByteBudget(options.receive_budget_bytes, "the receive buffers")
        self._streams: dict[anyio.CancelScope, ServerStream] = {}
        self._stream_ended = anyio.Event()
        self.table = SessionTable(
            backend,
            worker,
            limits=info.limits,
            kv_budget_bytes=options.kv_budget_bytes,
            lease_s=options.lease_s,
        )

    async def run(self) -> None:
        """Free sessions whose lease runs out, for ever."""
        while True:
            await anyio.sleep(self.table.next_expiry_s(EXPIRY_CHECK_S))
            self.table.expire()

    def get_server_info(self) -> ServerInfo:
        """Say what this server is, with the KV memory that is free now."""
        per_token = max(self.table.bytes_per_token, 1)
        return replace(
            self._info,
            kv_capacity_tokens=self.table.budget.capacity_bytes // per_token,
            kv_free_tokens=self.table.budget.free_bytes // per_token,
        )

    def list_sessions(self) -> Sequence[SessionInfo]:
        """Return the sessions held, oldest first."""
        return self.table.infos()

    async def close_session(self, session_id: bytes) -> None:
        """Free a session; an unknown id is no error."""
        await self.table.close(session_id)

    async def run_session(self, stream: ServerStream) -> None:
        """Serve one stream until it ends.

        Raises:
            RequestError: The opening, or a message after it, is the client's fault.
            ServerDrainingError: No new sessions are taken.
            ServerOverloadedError: There is no room for the session now.
            ServerUnavailableError: A resume elsewhere has superseded this stream.
        """
        request = await self._opening(stream)
        held = request.resume and self.table.find(request.session_id) is not None
        if self._info.state is ServerState.DRAINING and not held:
            raise ServerDrainingError(f"{self._info} is draining")
        check_open(request, self._info)
        session = await self.table.open(request, stream.principal)
        handler, scope = self._handler(stream, session), anyio.CancelScope()
        self.table.attach(session, scope)
        self._streams[scope] = stream
        try:
            with scope:
                await stream.send(self._opened(session))
                await handler.run()
        finally:
            del self._streams[scope]
            self._stream_ended.set()
            if session.scope is scope:
                self.table.detach(session, goodbye=handler.goodbye)
        if scope.cancelled_caught:
            raise ServerUnavailableError("the session went on elsewhere", reason="SUPERSEDED")

    async def _opening(self, stream: ServerStream) -> OpenSession:
        message = None
        with anyio.move_on_after(FIRST_MESSAGE_TIMEOUT_S):
            message = await stream.receive()
        if not isinstance(message, OpenSession):
            raise RequestError(f"a stream begins with `open`, within {FIRST_MESSAGE_TIMEOUT_S:g} s")
        return message

    def _opened(self, session: HeldSession) -> Opened:
        ledger = session.ledger
        return Opened(ledger.position, ledger.next_step_id, self._options.lease_s, self._options.progress_interval_s)

    def _handler(self, stream: ServerStream, session: HeldSession) -> SessionHandler:
        return SessionHandler(
            stream,
            session,
            table=self.table,
            worker=self._worker,
            server=self._info,
            receive_budget=self._receive_budget,
            progress_interval_s=self._options.progress_interval_s,
        )

    async def drain(self, deadline_s: float) -> None:
        """Take no new sessions, tell the clients, and wait until they have left or the deadline has passed."""
        self._info = replace(self._info, state=ServerState.DRAINING)
        with anyio.move_on_after(deadline_s):
            async with anyio.create_task_group() as tasks:
                for stream in list(self._streams.values()):
                    tasks.start_soon(stream.send, Draining(deadline_s))
                await self._all_left()
                tasks.cancel_scope.cancel()

    async def _all_left(self) -> None:
        while self._streams:
            self._stream_ended = anyio.Event()
            await self._stream_ended.wait()
