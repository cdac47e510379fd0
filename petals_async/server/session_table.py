"""All sessions that a server holds, and who among them may hold KV memory."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from petals_async.abc import BlockBackend, ComputeWorker
from petals_async.core.kv_budget import Admitted, KvBudget, NotNow
from petals_async.core.ledger import StepLedger
from petals_async.core.messages import ForkSource, OpenSession
from petals_async.core.server_info import Limits, SessionInfo
from petals_async.errors import (
    AuthError,
    LengthExceededError,
    RequestError,
    ServerOverloadedError,
    ServerUnavailableError,
)
from petals_async.server.session import HeldSession

DEFAULT_LEASE_S = 30.0
"""A session whose stream ended without a goodbye is kept this long."""

MAX_SESSIONS = 4096
"""Sessions held at once."""

MEMORY_WAIT_S = 10.0
"""A step of an evicted session waits this long for memory before it is refused."""


class SessionTable:
    """Opens, resumes, evicts, expires and frees sessions.

    Args:
        backend: The blocks; asked for sizes here, and for memory through `worker`.
        worker: Where the backend runs.
        limits: The server's bounds.
        kv_budget_bytes: Bytes that all KV caches may hold.
        lease_s: How long a session without a stream is kept.
        max_sessions: Sessions held at once.
    """

    def __init__(
        self,
        backend: BlockBackend,
        worker: ComputeWorker,
        *,
        limits: Limits,
        kv_budget_bytes: int,
        lease_s: float = DEFAULT_LEASE_S,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self._backend = backend
        self._worker = worker
        self._limits = limits
        self._max_sessions = max_sessions
        self._sessions: dict[bytes, HeldSession] = {}
        self._memory_freed = anyio.Event()
        self.lease_s = lease_s
        self.budget = KvBudget(kv_budget_bytes)

    def __len__(self) -> int:
        return len(self._sessions)

    def infos(self) -> list[SessionInfo]:
        """Return what may be shown of all sessions, oldest first."""
        now = anyio.current_time()
        return [session.info(now) for session in self._sessions.values()]

    def find(self, session_id: bytes) -> HeldSession | None:
        """Return a session by its id."""
        return self._sessions.get(session_id)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token of one row over the whole span."""
        return self._backend.kv_bytes(self._backend.span, 1, 1)

    async def open(self, request: OpenSession, principal: str) -> HeldSession:
        """Open a session, or take up one that is held.

        Raises:
            AuthError: It is somebody else's.
            RequestError: A resume asks for other blocks or another size; the old stream goes on.
            LengthExceededError: It can never fit into the KV budget.
            ServerOverloadedError: It doesn't fit now.
        """
        while (held := self._sessions.get(request.session_id)) is not None:
            if held.principal != principal:
                raise AuthError("this session is somebody else's", reason="PERMISSION_DENIED")
            if not request.resume:
                await self.close(request.session_id)
                continue
            _check_resume(held.request, request)
            await self._supersede(held)
            if self.find(request.session_id) is held:
                return held
        return await self._create(request, principal)

    async def _supersede(self, session: HeldSession) -> None:
        """End the old stream; return when its running step has finished, and no stream is attached.

        The old stream then finds itself detached, and neither frees the session nor starts its lease; so the
        lease starts here, for the case that we are cancelled while we wait.
        """
        while True:
            scope, session.scope = session.scope, None
            if scope is not None:
                session.expires_at = anyio.current_time() + self.lease_s
                scope.cancel()
            async with session.running:
                pass
            if session.scope is None:
                return

    async def _create(self, request: OpenSession, principal: str) -> HeldSession:
        if len(self._sessions) >= self._max_sessions:
            raise ServerOverloadedError(f"{self._max_sessions} sessions are held", reason="TOO_MANY_SESSIONS")
        now = anyio.current_time()
        kv_bytes = self._backend.kv_bytes(request.span, request.batch_size, request.max_tokens)
        session = HeldSession(
            request=request,
            principal=principal,
            ledger=StepLedger(max_kept_replies=self._limits.max_in_flight_steps),
            cache=None,
            kv_bytes=kv_bytes,
            opened_at=now,
            last_used=now,
        )
        self._grant(session)
        self._sessions[request.session_id] = session
        self.pin(session)
        try:
            await self._allocate(session)
            if request.fork is not None:
                await self._copy_fork(session, request.fork)
            self._check_held(session)
        except BaseException:
            self._remove(session)
            raise
        finally:
            self.unpin(session)
        return session

    def _check_held(self, session: HeldSession) -> None:
        if self.find(session.request.session_id) is not session:
            raise ServerUnavailableError("the session was closed while it opened", reason="SUPERSEDED")

    def _grant(self, session: HeldSession) -> None:
        """Reserve a session's memory, evicting others where the rules allow."""
        if session.kv_bytes > self.budget.capacity_bytes:
            raise LengthExceededError(
                f"{session.request.batch_size} x {session.request.max_tokens} tokens over blocks "
                f"{session.request.span} need {session.kv_bytes} bytes of KV, "
                f"the budget is {self.budget.capacity_bytes} bytes"
            )
        key = session.request.session_id
        outcome = self.budget.admit(key, session.kv_bytes, anyio.current_time())
        match outcome:
            case NotNow(retry_after_s):
                raise ServerOverloadedError(
                    f"{session.kv_bytes} bytes of KV are needed, {self.budget.free_bytes} of "
                    f"{self.budget.capacity_bytes} are free",
                    reason="KV_EXHAUSTED",
                    retry_after_s=retry_after_s,
                )
            case Admitted(evicted):
                for victim in evicted:
                    self._forget_cache(self._sessions[victim])  # type: ignore[index]

    async def _allocate(self, session: HeldSession) -> None:
        request = session.request
        session.cache = await self._worker.call(
            lambda: self._backend.allocate(request.span, request.batch_size, request.max_tokens)
        )

    async def _copy_fork(self, session: HeldSession, fork: ForkSource) -> None:
        """Start with the source's prefix; a missing or different source is no error."""
        source = self._sessions.get(fork.session_id)
        if source is None or source.cache is None or source.principal != session.principal:
            return
        if (source.request.span, source.request.batch_size) != (
            session.request.span,
            session.request.batch_size,
        ):
            return
        async with source.running:
            ledger = source.ledger.fork(max(0, min(fork.max_tokens, session.request.max_tokens)))
            copied, target = source.cache, session.cache
            if copied is not None and ledger.position:
                length = ledger.position
                await self._worker.call(lambda: self._backend.copy_prefix(copied, target, length))
                session.ledger = ledger

    async def ensure_memory(self, session: HeldSession) -> None:
        """Give an evicted session its memory again, waiting up to `MEMORY_WAIT_S` for it.

        Raises:
            ServerOverloadedError: No memory came free in that time.
        """
        if session.cache is not None:
            return
        deadline = anyio.current_time() + MEMORY_WAIT_S
        while session.request.session_id not in self.budget:
            try:
                self._grant(session)
            except ServerOverloadedError as error:
                remaining_s = deadline - anyio.current_time()
                if remaining_s <= 0:
                    raise
                with anyio.move_on_after(min(error.retry_after_s, remaining_s)):
                    await self._memory_freed.wait()
        await self._allocate(session)

    def pin(self, session: HeldSession) -> None:
        """Protect a session's memory while its step is worked on."""
        self.budget.pin(session.request.session_id)

    def unpin(self, session: HeldSession) -> None:
        """End that protection; a session that has replayed keeps its memory for a while."""
        now = anyio.current_time()
        session.last_used = now
        self.budget.unpin(session.request.session_id, now, replay_cost_s=session.replay_cost_s)

    def attach(self, session: HeldSession, scope: anyio.CancelScope) -> None:
        """Note that a stream serves this session now."""
        session.scope, session.expires_at = scope, None
        self.budget.set_orphaned(session.request.session_id, False)

    def detach(self, session: HeldSession, *, goodbye: bool) -> None:
        """Note that the stream has ended: free at once after a goodbye or without any step, else keep."""
        session.scope = None
        if self._sessions.get(session.request.session_id) is not session:
            return
        if goodbye or session.num_completed == 0:
            self._remove(session)
            return
        session.expires_at = anyio.current_time() + self.lease_s
        self.budget.set_orphaned(session.request.session_id, True)

    async def close(self, session_id: bytes) -> None:
        """Free a session by its id, after its running step; an unknown id is no error."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        await self._supersede(session)
        self._remove(session)

    def evict(self, session_id: bytes) -> bool:
        """Drop a session's KV, if it isn't pinned; the session itself stays. For tests and operators."""
        session = self._sessions.get(session_id)
        if session is None or session.cache is None or self.budget.pinned(session_id):
            return False
        self.budget.free(session_id)
        self._forget_cache(session)
        return True

    def _forget_cache(self, session: HeldSession) -> None:
        session.cache = None
        session.ledger.evict(0)
        self._wake_waiting()

    def _remove(self, session: HeldSession) -> None:
        session_id = session.request.session_id
        if self._sessions.get(session_id) is session:
            del self._sessions[session_id]
            self.budget.free(session_id)
        session.cache = None
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._memory_freed.set()
        self._memory_freed = anyio.Event()

    def expire(self) -> None:
        """Free the sessions whose lease has run out."""
        now = anyio.current_time()
        for session in list(self._sessions.values()):
            if session.expires_at is not None and session.expires_at <= now:
                self._remove(session)

    def next_expiry_s(self, default_s: float) -> float:
        """Seconds until the next lease runs out, at most `default_s`."""
        expiries = [s.expires_at for s in self._sessions.values() if s.expires_at is not None]
        return min([default_s, *(max(0.0, expiry - anyio.current_time()) for expiry in expiries)])

    def streams(self, action: Callable[[HeldSession], None]) -> None:
        """Do something with every session that has a stream."""
        for session in list(self._sessions.values()):
            if session.scope is not None:
                action(session)


def _check_resume(held: OpenSession, asked: OpenSession) -> None:
    if (held.span, held.batch_size, held.max_tokens) != (asked.span, asked.batch_size, asked.max_tokens):
        raise RequestError(
            f"the session is held for blocks {held.span}, {held.batch_size} rows, {held.max_tokens} tokens; "
            f"a resume can't change that"
        )
