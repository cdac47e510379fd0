"""One session as a server holds it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import anyio

from petals_async.core.ledger import StepLedger
from petals_async.core.messages import OpenSession
from petals_async.core.server_info import SessionInfo


@dataclass(slots=True, eq=False)
class HeldSession:
    """The KV cache of one session, its ledger, and the stream that is attached to it.

    `cache` is None when it was evicted. `running` is held while a step is computed. `expires_at` is set while
    no stream is attached. `scope` cancels the attached stream's handling.
    """

    request: OpenSession
    principal: str
    ledger: StepLedger
    cache: Any
    kv_bytes: int
    opened_at: float
    last_used: float
    running: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    scope: anyio.CancelScope | None = None
    expires_at: float | None = None
    num_completed: int = 0
    replay_cost_s: float = 0.0

    @property
    def handle(self) -> str:
        """What may be shown of the id: the first 8 hex digits of its SHA-256."""
        return hashlib.sha256(self.request.session_id).hexdigest()[:8]

    def info(self, now: float) -> SessionInfo:
        """Return what may be shown of the session."""
        return SessionInfo(
            handle=self.handle,
            span=self.request.span,
            batch_size=self.request.batch_size,
            position=self.ledger.position,
            max_tokens=self.request.max_tokens,
            kv_bytes=self.kv_bytes if self.cache is not None else 0,
            age_s=now - self.opened_at,
            idle_s=now - self.last_used,
            connected=self.scope is not None,
            principal=self.principal,
        )
