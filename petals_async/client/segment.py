"""A segment: one span on one server, with its open stream and the position that the server acknowledged.

One task alone reads the stream, and steps wait on its results, so that cancelling a step does not kill the
stream. Writes are shielded for the same reason; what bounds them is the watchdog, which ends the stream after
three progress intervals of silence.
"""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from petals_async.abc import BlockChannel, SessionStream
from petals_async.core.hidden import HiddenStates, TensorSpec
from petals_async.core.messages import (
    SESSION_ID_BYTES,
    CloseSession,
    Draining,
    Opened,
    OpenSession,
    Part,
    Progress,
    Refused,
    Result,
    ServerMessage,
    Step,
    outputs_of,
)
from petals_async.core.parts import PartAssembler, cut, travels_inline
from petals_async.core.reasons import error_from_reason
from petals_async.core.server_info import ServerInfo
from petals_async.core.span import Span
from petals_async.errors import (
    PeerError,
    PetalsAsyncError,
    RemoteProtocolError,
    RequestError,
    ServerUnavailableError,
)
from petals_async.scopes import open_tasks

OPEN_TIMEOUT_S = 5.0
"""How long a server may take to answer `open`."""

GOODBYE_TIMEOUT_S = 0.5
"""How long saying goodbye may take; the lease frees the session otherwise."""

SILENT_INTERVALS = 3
"""This many progress intervals without a word, while a step is pending, mean that the server is lost."""

LATE_TIMER_S = 0.1
"""A watchdog that wakes this much too late was asleep itself, and gives one more interval."""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """What a segment asks of a server when it opens."""

    model_fingerprint: str
    span: Span
    batch_size: int
    max_tokens: int
    wire_dtype: str


@dataclass(slots=True)
class Ticket:
    """A step that was sent, and what became of it."""

    step: Step
    answered: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    error: PetalsAsyncError | None = None


class Segment:
    """One span on one server.

    Args:
        channel: The connection to the server.
        server: What the server says of itself.
        request: What to open.

    Attributes:
        position: Tokens that the server has acknowledged.
        draining: Whether the server has said that it is leaving.
        error: Why the segment is over; None while it lives.
    """

    def __init__(self, channel: BlockChannel, server: ServerInfo, request: SegmentRequest) -> None:
        self._channel = channel
        self._request = request
        self._session_id = secrets.token_bytes(SESSION_ID_BYTES)
        self._stream: SessionStream | None = None
        self._scope = anyio.CancelScope()
        self._next_step_id = 1
        self._pending: deque[Ticket] = deque()
        self._settled = anyio.Event()
        self._closing = anyio.Event()
        self._said_goodbye = False
        self._writing = anyio.Lock(fast_acquire=True)
        self._in_flight = anyio.Semaphore(max(1, server.limits.max_in_flight_steps), fast_acquire=True)
        self._assembling: tuple[Result, PartAssembler] | None = None
        self._progress_interval_s = OPEN_TIMEOUT_S
        self._last_heard = 0.0
        self.server = server
        self.span = request.span
        self.position = 0
        self.draining = False
        self.error: PetalsAsyncError | None = None

    # -- life

    async def run(self) -> None:
        """Open the stream, and read it until the segment is closed or lost; `opened` tells how the opening went.

        To be run in the session's task group. It raises nothing of our tree: what ends it is in `error`.
        """
        with self._scope:
            try:
                async with self._channel.open_stream() as stream:
                    try:
                        await self._open(stream)
                        self._stream = stream
                        self._scope.shield = True  # a cancelled session still says goodbye
                        self._settled.set()
                        await self._serve(stream)
                    except PetalsAsyncError as error:
                        self._lose(error)
            finally:
                self._lose(ServerUnavailableError("the segment was closed", server=str(self.server)))
                self._settled.set()
                await self._free()

    async def opened(self) -> None:
        """Return when the segment is open; if this is cancelled, `close` it (`TaskGroup.start` would wait for `run`).

        Raises:
            PeerError: The server could not be reached, or did not open the session.
            RequestError: The server refused the opening for a fault of ours.
        """
        await self._settled.wait()
        if self._stream is None and self.error is not None:
            raise self.error

    async def _serve(self, stream: SessionStream) -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(self._watch_silence)
            tasks.start_soon(self._close_when_asked, stream)
            await self._read(stream)

    async def _open(self, stream: SessionStream) -> None:
        request = self._request
        message = OpenSession(
            session_id=self._session_id,
            model_fingerprint=request.model_fingerprint,
            span=request.span,
            batch_size=request.batch_size,
            max_tokens=request.max_tokens,
            wire_dtype=request.wire_dtype,
        )
        try:
            with anyio.fail_after(OPEN_TIMEOUT_S):
                await stream.send(message)
                reply = await stream.receive()
                while isinstance(reply, Draining):
                    self.draining = True
                    reply = await stream.receive()
        except ServerUnavailableError as error:
            if error.reason == "STREAM_LOST":
                error.reason = "CONNECT_FAILED"
            raise
        except TimeoutError:
            raise ServerUnavailableError(
                f"no answer to `open` within {OPEN_TIMEOUT_S:g} s", reason="CONNECT_FAILED", server=str(self.server)
            ) from None
        if not isinstance(reply, Opened):
            raise self._bad_reply(f"`open` was answered with {type(reply).__name__}")
        self.position, self._next_step_id = reply.position, reply.next_step_id
        self._progress_interval_s = max(reply.progress_interval_s, 0.01)
        self._last_heard = anyio.current_time()

    def close(self) -> None:
        """End the segment; its own task says goodbye to the server, within `GOODBYE_TIMEOUT_S`."""
        self._closing.set()
        if self._stream is None:
            self._scope.cancel()

    async def _close_when_asked(self, stream: SessionStream) -> None:
        """Say goodbye in-band, and leave the end of the stream to the server (a cancelled read kills the RPC)."""
        await self._closing.wait()
        with anyio.move_on_after(GOODBYE_TIMEOUT_S):
            async with self._writing:
                await stream.send(CloseSession())
                self._said_goodbye = True
            await anyio.sleep(GOODBYE_TIMEOUT_S)
        self._scope.cancel()

    async def _free(self) -> None:
        """Free the session by its id, if its stream has ended without a goodbye."""
        if self._said_goodbye:
            return
        with anyio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
            with suppress(PeerError, RequestError):  # nobody is there to be told; the lease frees it
                await self._channel.close_session(self._session_id)

    def _lose(self, error: PetalsAsyncError) -> None:
        """Note why the segment is over, and wake all steps that wait."""
        if self.error is None:
            if isinstance(error, PeerError):
                error.server = str(self.server)
            self.error = error
        while self._pending:
            self._settle_oldest(error=self.error)

    def _settle_oldest(self, *, result: Result | None = None, error: PetalsAsyncError | None = None) -> None:
        ticket = self._pending.popleft()
        ticket.result, ticket.error = result, error
        ticket.answered.set()
        self._in_flight.release()

    def _bad_reply(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(what, server=str(self.server))

    # -- reading

    async def _read(self, stream: SessionStream) -> None:
        while True:
            message = await stream.receive()
            self._last_heard = anyio.current_time()
            self._take(message)

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Result():
                self._take_result(message)
            case Part():
                self._take_part(message)
            case Refused():
                self._take_refusal(message)
            case Progress():
                pass
            case Draining():
                self.draining = True
            case _:
                raise self._bad_reply(f"{type(message).__name__} out of order")

    def _take_result(self, result: Result) -> None:
        if self._assembling is not None:
            raise self._bad_reply("a result came before the last one's parts")
        if not self._is_stale(result.step_id):
            self._check_result(self._expect(result.step_id).step, result)
        if result.tensor is not None and result.data is None:
            self._assembling = (result, PartAssembler(result.tensor.num_bytes))
        else:
            self._finish(result)

    def _is_stale(self, step_id: int) -> bool:
        """Whether this step was answered before: its reply came twice, and is dropped."""
        oldest = self._pending[0].step.step_id if self._pending else self._next_step_id
        return 0 < step_id < oldest

    def _expect(self, step_id: int) -> Ticket:
        if not self._pending or self._pending[0].step.step_id != step_id:
            raise self._bad_reply(f"a reply to step {step_id}, which is not the oldest without one")
        return self._pending[0]

    def _check_result(self, step: Step, result: Result) -> None:
        """Check a result's header against its step."""
        position = step.token_offset + step.num_tokens
        if (result.token_offset, result.position) != (step.token_offset, position):
            raise self._bad_reply(
                f"step {step.step_id} at {step.token_offset} should end at {position}, "
                f"the reply says {result.token_offset} to {result.position}"
            )
        wanted = step.num_tokens if step.num_outputs is None else step.num_outputs
        if wanted == 0 and result.tensor is None:
            return
        shape = (self._request.batch_size, wanted, self.server.hidden_size)
        expected = TensorSpec(self._request.wire_dtype, shape)
        if result.tensor != expected:
            raise self._bad_reply(f"outputs should be {expected}, got {result.tensor}")
        if result.data is not None and len(result.data) != expected.num_bytes:
            raise self._bad_reply(f"{expected} is {expected.num_bytes} bytes, got {len(result.data)}")

    def _take_part(self, part: Part) -> None:
        if self._assembling is None:
            raise self._bad_reply("a part without a result")
        result, assembler = self._assembling
        try:
            assembler.add(part)
        except RequestError as error:
            raise self._bad_reply(error.message) from error
        if assembler.complete:
            self._assembling = None
            self._finish(
                Result(
                    result.step_id,
                    result.token_offset,
                    result.position,
                    result.tensor,
                    assembler.join(),
                    result.queue_s,
                    result.compute_s,
                )
            )

    def _finish(self, result: Result) -> None:
        if self._is_stale(result.step_id):
            return
        self.position = result.position
        self._settle_oldest(result=result)

    def _take_refusal(self, refused: Refused) -> None:
        if self._is_stale(refused.step_id):
            return
        self._expect(refused.step_id)
        if refused.position < 0 or refused.next_step_id < 1:
            raise self._bad_reply(f"a refusal at position {refused.position}, next id {refused.next_step_id}")
        self.position = refused.position
        self._settle_oldest(
            error=error_from_reason(
                refused.reason,
                refused.message,
                server=str(self.server),
                position=refused.position,
                next_step_id=refused.next_step_id,
                retry_after_s=refused.retry_after_s,
            )
        )
        if not self._pending:
            self._next_step_id = refused.next_step_id

    # -- silence

    async def _watch_silence(self) -> None:
        """Lose the server when a step is pending and nothing was heard for `SILENT_INTERVALS`."""
        while True:
            interval_s = self._progress_interval_s
            due = anyio.current_time() + interval_s
            await anyio.sleep(interval_s)
            now = anyio.current_time()
            if now - due > LATE_TIMER_S:
                self._last_heard = max(self._last_heard, now - (SILENT_INTERVALS - 1) * interval_s)
            if self._pending and now - self._last_heard >= SILENT_INTERVALS * interval_s:
                raise ServerUnavailableError(
                    f"not a word for {now - self._last_heard:.1f} s while a step was pending",
                    reason="SILENT",
                    server=str(self.server),
                )

    # -- steps

    async def send(
        self,
        token_offset: int,
        hidden: HiddenStates | None,
        *,
        row_indices: tuple[int, ...] = (),
        num_outputs: int | None = None,
        chunk_tokens: tuple[int, ...] = (),
    ) -> Ticket:
        """Send one step; waits while `max_in_flight_steps` are without a reply.

        Args:
            token_offset: Index of the first token.
            hidden: (batch, n, hidden_size), or None to truncate only.
            row_indices: For each row the row whose cache it goes on from; empty for its own.
            num_outputs: How many of the last tokens' outputs are wanted; None for all.
            chunk_tokens: Tokens of each chunk in which they were first sent; empty for one chunk.

        Raises:
            PetalsAsyncError: The segment is over, for the reason in `error`.
        """
        async with self._writing:
            await self._in_flight.acquire()
            return await self._write(token_offset, hidden, row_indices, num_outputs, chunk_tokens)

    async def _write(
        self,
        token_offset: int,
        hidden: HiddenStates | None,
        row_indices: tuple[int, ...],
        num_outputs: int | None,
        chunk_tokens: tuple[int, ...],
    ) -> Ticket:
        stream = self._stream
        if self.error is not None or stream is None:
            self._in_flight.release()
            raise self.error or ServerUnavailableError("the segment is not open", server=str(self.server))
        inline = hidden is None or travels_inline(hidden.num_bytes)
        step = Step(
            step_id=self._next_step_id,
            token_offset=token_offset,
            num_tokens=hidden.num_tokens if hidden else 0,
            tensor=hidden.spec if hidden else None,
            data=hidden.data if hidden and inline else None,
            row_indices=row_indices,
            num_outputs=num_outputs,
            chunk_tokens=chunk_tokens,
        )
        self._next_step_id += 1
        ticket = Ticket(step)
        if not self._pending:
            self._last_heard = anyio.current_time()
        self._pending.append(ticket)
        try:
            with anyio.CancelScope(shield=True):
                await stream.send(step)
                if hidden is not None and not inline:
                    for part in cut(hidden.data):
                        await stream.send(part)
        except PeerError as error:
            raise self.error or error from None
        return ticket

    async def wait(self, ticket: Ticket) -> HiddenStates | None:
        """Return a step's outputs, (batch, m, hidden_size), or None when none were wanted.

        Raises:
            PetalsAsyncError: The step was refused, or the segment is over.
        """
        await ticket.answered.wait()
        if ticket.error is not None:
            raise ticket.error
        if ticket.result is None:
            raise self._bad_reply("a reply without a result")
        return outputs_of(ticket.result)

    async def step(
        self,
        token_offset: int,
        hidden: HiddenStates | None,
        *,
        row_indices: tuple[int, ...] = (),
        num_outputs: int | None = None,
    ) -> HiddenStates | None:
        """Send one step and return its outputs."""
        ticket = await self.send(token_offset, hidden, row_indices=row_indices, num_outputs=num_outputs)
        return await self.wait(ticket)
