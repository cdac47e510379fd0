"""Which error each reason on the wire stands for: the one table, used in both directions.

A reason that isn't listed (a newer peer's) becomes a RemoteProtocolError, which excludes the peer.
"""

from __future__ import annotations

from petals_async.errors import (
    AuthError,
    ComputeError,
    LengthExceededError,
    OffsetGapError,
    PeerError,
    PetalsAsyncError,
    PositionError,
    RemoteProtocolError,
    RequestError,
    ServerDrainingError,
    ServerOverloadedError,
    ServerUnavailableError,
    SessionLostError,
)

ERROR_OF_REASON: dict[str, type[PetalsAsyncError]] = {
    "CONNECT_FAILED": ServerUnavailableError,
    "STREAM_LOST": ServerUnavailableError,
    "SILENT": ServerUnavailableError,
    "SUPERSEDED": ServerUnavailableError,
    "NOT_SERVING": ServerUnavailableError,
    "DRAINING": ServerDrainingError,
    "KV_EXHAUSTED": ServerOverloadedError,
    "QUEUE_FULL": ServerOverloadedError,
    "TOO_MANY_SESSIONS": ServerOverloadedError,
    "EVICTED": SessionLostError,
    "OFFSET_GAP": OffsetGapError,
    "OUT_OF_ORDER": OffsetGapError,
    "STALE_STEP": OffsetGapError,
    "ROWS_CHANGED": OffsetGapError,
    "COMPUTE_FAILED": ComputeError,
    "NON_FINITE": ComputeError,
    "BAD_REPLY": RemoteProtocolError,
    "BAD_REQUEST": RequestError,
    "BAD_SHAPE": RequestError,
    "BAD_DTYPE": RequestError,
    "BAD_ROWS": RequestError,
    "BAD_PART": RequestError,
    "BAD_SPAN": RequestError,
    "BAD_ADAPTER": RequestError,
    "BAD_TOKENS": RequestError,
    "NON_FINITE_INPUT": RequestError,
    "WRONG_MODEL": RequestError,
    "NOT_FOUND": RequestError,
    "LENGTH_EXCEEDED": LengthExceededError,
    "UNAUTHENTICATED": AuthError,
    "PERMISSION_DENIED": AuthError,
}


def error_from_reason(
    reason: str,
    message: str,
    *,
    server: str = "",
    position: int = 0,
    next_step_id: int = 1,
    retry_after_s: float = 1.0,
) -> PetalsAsyncError:
    """Build the error that a reason stands for, with what the server stated about itself."""
    kind = ERROR_OF_REASON.get(reason, RemoteProtocolError)
    if issubclass(kind, PositionError):
        return kind(message, reason=reason, server=server, position=position, next_step_id=next_step_id)
    if issubclass(kind, ServerOverloadedError):
        return kind(message, reason=reason, server=server, retry_after_s=retry_after_s)
    if issubclass(kind, PeerError):
        return kind(message, reason=reason, server=server)
    return kind(message, reason=reason)
