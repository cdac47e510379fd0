"""One RunSession stream on the server: reads messages, answers steps in order, gives signs of life.

Three tasks share the stream: `_read` takes messages off it and puts tensors together, `_answer_all` works on
the steps one after the other, `_tick` tells the client every `progress_interval_s` that we are alive. The
compute itself is shielded: a stream that dies while a step runs leaves the step's reply in the ledger.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import anyio

from petals_async.abc import BackendResult, BackendStep, ComputeWorker, ServerStream
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.hidden import HiddenStates
from petals_async.core.ledger import Resend, Run
from petals_async.core.messages import (
    CloseSession,
    OpenSession,
    Part,
    Progress,
    Refused,
    Result,
    ServerMessage,
    Step,
    StepState,
)
from petals_async.core.parts import PartAssembler, cut, travels_inline
from petals_async.core.server_info import ServerInfo
from petals_async.core.validation import check_step
from petals_async.errors import (
    ClosedError,
    ComputeError,
    LengthExceededError,
    PetalsAsyncError,
    RequestError,
    ServerDrainingError,
    ServerOverloadedError,
)
from petals_async.server.session import HeldSession
from petals_async.server.session_table import SessionTable


@dataclass(slots=True)
class _Pending:
    """A step without a reply: its header, its bytes as they arrive, and why it can't be run if so."""

    step: Step
    arrived_at: float
    assembler: PartAssembler | None = None
    data: bytes | None = None
    error: PetalsAsyncError | None = None
    state: StepState = StepState.RECEIVING
    arrived: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.data) if self.data is not None else 0

    def fail(self, error: PetalsAsyncError) -> None:
        self.error, self.data, self.assembler, self.arrived = error, None, None, True

    def finish(self, data: bytes | None) -> None:
        self.data, self.assembler, self.state, self.arrived = data, None, StepState.QUEUED, True


class SessionHandler:
    """Serves one session's stream.

    Args:
        stream: The server's end of the stream.
        session: The session that it is for; attached for as long as this runs.
        table: Where the session lives.
        worker: Where steps are computed.
        server: What the server is, limits included.
        receive_budget: Bytes of steps that all streams together may hold.
        progress_interval_s: Seconds between signs of life.
    """

    def __init__(
        self,
        stream: ServerStream,
        session: HeldSession,
        *,
        table: SessionTable,
        worker: ComputeWorker,
        server: ServerInfo,
        receive_budget: ByteBudget,
        progress_interval_s: float,
    ) -> None:
        self._stream = stream
        self._session = session
        self._table = table
        self._worker = worker
        self._server = server
        self._receive_budget = receive_budget
        self._progress_interval_s = progress_interval_s
        self._pending: deque[_Pending] = deque()
        self._work = anyio.Event()
        self._any_step = False
        self.goodbye = False

    async def run(self) -> None:
        """Serve until the stream ends; `goodbye` then says whether the client said so."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._answer_all)
                tasks.start_soon(self._tick)
                await self._read()
                tasks.cancel_scope.cancel()
        finally:
            while self._pending:
                self._forget(self._pending.popleft())

    # -- reading

    async def _read(self) -> None:
        """Take messages until the stream ends."""
        while True:
            message = await self._stream.receive()
            match message:
                case Step():
                    await self._take_step(message)
                case Part():
                    self._take_part(message)
                case CloseSession():
                    self.goodbye = True
                    return
                case OpenSession():
                    raise RequestError("a stream opens one session only")
                case None:
                    return

    async def _take_step(self, step: Step) -> None:
        self._any_step = True
        if self._pending:
            error = RequestError("the next step came before the last part", reason="BAD_PART")
            self._break_off(self._pending[-1], error)
        if len(self._pending) >= self._server.limits.max_in_flight_steps:
            await self._stream.send(self._too_many(step))
            return
        pending = _Pending(step, anyio.current_time())
        self._table.pin(self._session)
        self._pending.append(pending)
        try:
            check_step(step, session=self._session.request, server=self._server)
            self._take_header(pending)
        except (RequestError, ServerOverloadedError) as error:
            pending.fail(error)
        self._work.set()

    def _take_header(self, pending: _Pending) -> None:
        step = pending.step
        if step.tensor is not None and step.data is None:
            pending.assembler = PartAssembler(step.tensor.num_bytes)
            return
        self._hold(len(step.data or b""))
        pending.finish(step.data)

    def _hold(self, num_bytes: int) -> None:
        try:
            self._receive_budget.take(num_bytes)
        except LengthExceededError as error:
            raise ServerOverloadedError(error.message, reason="QUEUE_FULL") from error

    def _take_part(self, part: Part) -> None:
        """Add a part to the step whose header came last; parts of a step that failed are dropped."""
        if not self._any_step:
            raise RequestError("a part came before any step", reason="BAD_PART")
        pending = self._pending[-1] if self._pending else None
        if pending is None or (assembler := pending.assembler) is None:
            return
        try:
            assembler.check(part)
            self._hold(len(part.data))
        except (RequestError, ServerOverloadedError) as error:
            self._break_off(pending, error)
            return
        assembler.add(part)
        if assembler.complete:
            pending.finish(assembler.join())
            self._work.set()

    def _break_off(self, pending: _Pending, error: PetalsAsyncError) -> None:
        """Give up a step whose parts are still arriving."""
        if pending.assembler is not None:
            self._receive_budget.give_back(pending.assembler.received_bytes)
            pending.fail(error)
            self._work.set()

    def _too_many(self, step: Step) -> Refused:
        limit = self._server.limits.max_in_flight_steps
        return self._session.ledger.refuse(
            step.step_id, "QUEUE_FULL", f"at most {limit} steps of a session may be in flight"
        )

    # -- answering

    async def _answer_all(self) -> None:
        while True:
            while not (self._pending and self._pending[0].arrived):
                self._work = anyio.Event()
                await self._work.wait()
            pending = self._pending[0]
            reply = await self._answer(pending)
            self._pending.popleft()
            self._forget(pending)
            await self._send_reply(reply)

    def _forget(self, pending: _Pending) -> None:
        assembler = pending.assembler
        self._receive_budget.give_back(assembler.received_bytes if assembler else pending.num_bytes)
        self._table.unpin(self._session)

    async def _answer(self, pending: _Pending) -> Result | Refused:
        """Decide by the ledger's rules; compute if it says so."""
        session, step = self._session, pending.step
        async with session.running:
            match session.ledger.decide(step.step_id, step.token_offset):
                case Refused() as refused:
                    return refused
                case Resend(kept):
                    return kept
                case Run():
                    pass
            if pending.error is not None:
                return self._refuse(step, pending.error)
            try:
                if session.cache is None:
                    await self._table.ensure_memory(session)
                pending.state = StepState.RUNNING
                with anyio.CancelScope(shield=True):
                    reply = await self._compute(pending)
            except (ServerOverloadedError, ComputeError) as error:
                return self._refuse(step, error)
            except ClosedError as error:
                return self._refuse(step, ServerDrainingError(error.message))
            return reply

    async def _compute(self, pending: _Pending) -> Result | Refused:
        session, step = self._session, pending.step
        started_at = anyio.current_time()
        outcome = await self._worker.run(
            BackendStep(
                cache=session.cache,
                span=session.request.span,
                token_offset=step.token_offset,
                hidden=self._hidden_of(pending),
                row_indices=step.row_indices,
                num_outputs=step.num_outputs,
                chunk_tokens=step.chunk_tokens,
            )
        )
        if not isinstance(outcome, BackendResult):
            return self._refuse(step, outcome)
        reply = self._result(pending, outcome, started_at)
        self._account_replay(step, outcome.compute_s)
        session.ledger.record(reply, permuted=bool(step.row_indices))
        session.num_completed += 1
        return reply

    def _hidden_of(self, pending: _Pending) -> HiddenStates | None:
        step = pending.step
        if step.tensor is None or pending.data is None:
            return None
        batch_size, num_tokens, width = step.tensor.shape
        return HiddenStates(step.tensor.dtype, (batch_size, num_tokens, width), pending.data)

    def _result(self, pending: _Pending, outcome: BackendResult, started_at: float) -> Result:
        step, outputs = pending.step, outcome.outputs
        return Result(
            step_id=step.step_id,
            token_offset=step.token_offset,
            position=step.token_offset + step.num_tokens,
            tensor=outputs.spec if outputs else None,
            data=outputs.data if outputs else None,
            queue_s=started_at - pending.arrived_at,
            compute_s=outcome.compute_s,
        )

    def _account_replay(self, step: Step, compute_s: float) -> None:
        """A session that begins at 0 builds its cache anew: what that costs protects it from eviction."""
        if step.token_offset == 0:
            self._session.replay_cost_s = 0.0
        if step.num_tokens > 1:
            self._session.replay_cost_s += compute_s

    def _refuse(self, step: Step, error: PetalsAsyncError) -> Refused:
        retry_after_s = error.retry_after_s if isinstance(error, ServerOverloadedError) else 0.0
        return self._session.ledger.refuse(step.step_id, error.reason, error.message, retry_after_s=retry_after_s)

    async def _send_reply(self, reply: Result | Refused) -> None:
        if isinstance(reply, Result) and reply.data is not None and not travels_inline(len(reply.data)):
            await self._send_in_parts(reply, reply.data)
        else:
            await self._stream.send(reply)

    async def _send_in_parts(self, reply: Result, data: bytes) -> None:
        header: ServerMessage = Result(
            reply.step_id,
            reply.token_offset,
            reply.position,
            reply.tensor,
            None,
            reply.queue_s,
            reply.compute_s,
        )
        await self._stream.send(header)
        for part in cut(data):
            await self._stream.send(part)

    # -- signs of life

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(self._progress_interval_s)
            for pending in list(self._pending):
                self._stream.send_nowait(self._progress(pending))

    def _progress(self, pending: _Pending) -> Progress:
        done = 0
        if pending.assembler is not None:
            whole = max(pending.assembler.total_bytes, 1)
            done = math.floor(pending.step.num_tokens * pending.assembler.received_bytes / whole)
        return Progress(pending.step.step_id, pending.state, done)
