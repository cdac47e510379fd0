"""Every error that petals_async raises on purpose.

    PetalsAsyncError
    |-- RequestError                the caller's fault: raised as it is, never retried, excludes nobody
    |   `-- LengthExceededError     more tokens than a stated limit
    |-- AuthError                   not who one says, or not allowed to
    |-- PeerError                   a block server could not do it; another one may
    |   |-- ServerUnavailableError  not reached, stream lost, or silent            -> exclude, rebuild, replay
    |   |-- ServerDrainingError     it is leaving                                  -> rebuild, no penalty
    |   |-- ServerOverloadedError   no KV memory or queue full just now            -> elsewhere, or wait
    |   |-- SessionLostError        the session's KV is gone (evicted)             -> replay
    |   |-- OffsetGapError          another position than we thought               -> start again from the stated one
    |   |-- ComputeError            the step failed in computing                   -> exclude, rebuild
    |   `-- RemoteProtocolError     a reply that breaks the protocol               -> exclude, rebuild
    |-- NoRouteError                no servers for some blocks, or all attempts failed; lists each attempt
    |-- RegistryUnavailableError    no registry answers; names the addresses tried
    |-- CheckpointError             a model's files are missing or damaged; names the file
    |-- UnsupportedModelError       an architecture that can't be cut into blocks; says why
    |-- ConfigurationError          an option that can't work (address, dtype, budget)
    `-- ClosedError                 used before it was opened, or after it was closed

`reason` is the stable, upper-case word which travels on the wire as `google.rpc.ErrorInfo.reason`.
Source of the split: invariant I7 in the architecture, and AIP-193 (https://google.aip.dev/193) for reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PetalsAsyncError(Exception):
    """Base of all errors of this library.

    Args:
        message: One line for a person, with the limit or the numbers in it.
        reason: Stable word for programs; the class's own default when left out.
    """

    default_reason = "ERROR"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason


class RequestError(PetalsAsyncError, ValueError):
    """The caller's fault: a wrong shape, dtype, length or option. Not retried, and excludes no server."""

    default_reason = "BAD_REQUEST"


class LengthExceededError(RequestError):
    """More tokens were asked for than a limit allows; nothing was sent or changed."""

    default_reason = "LENGTH_EXCEEDED"


class AuthError(PetalsAsyncError):
    """The peer doesn't know us, or doesn't allow this."""

    default_reason = "UNAUTHENTICATED"


class PeerError(PetalsAsyncError):
    """A block server could not do what was asked of it; another server may.

    Args:
        message: One line for a person.
        reason: Stable word for programs.
        server: Who it was, as "name id address", empty if not known.
    """

    default_reason = "PEER"

    def __init__(self, message: str, *, reason: str | None = None, server: str = "") -> None:
        super().__init__(message, reason=reason)
        self.server = server


class ServerUnavailableError(PeerError):
    """The server was not reached (CONNECT_FAILED), its stream ended (STREAM_LOST), or it was SILENT."""

    default_reason = "STREAM_LOST"


class ServerDrainingError(PeerError):
    """The server is leaving and takes no new sessions."""

    default_reason = "DRAINING"


class ServerOverloadedError(PeerError):
    """The server has no room for this now: KV_EXHAUSTED or QUEUE_FULL.

    Args:
        message: One line for a person.
        reason: KV_EXHAUSTED or QUEUE_FULL.
        server: Who it was.
        retry_after_s: Seconds after which room may be there.
    """

    default_reason = "KV_EXHAUSTED"

    def __init__(
        self, message: str, *, reason: str | None = None, server: str = "", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, reason=reason, server=server)
        self.retry_after_s = retry_after_s


class PositionError(PeerError):
    """The server holds another position than the client thought; it states the true one.

    Args:
        message: One line for a person.
        reason: Stable word for programs.
        server: Who it was.
        position: Tokens that the server really holds.
        next_step_id: The only step id that it will run next.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        server: str = "",
        position: int = 0,
        next_step_id: int = 1,
    ) -> None:
        super().__init__(message, reason=reason, server=server)
        self.position = position
        self.next_step_id = next_step_id


class SessionLostError(PositionError):
    """The session's KV was dropped, wholly or in part (EVICTED)."""

    default_reason = "EVICTED"


class OffsetGapError(PositionError):
    """A step that doesn't follow: OFFSET_GAP, OUT_OF_ORDER, STALE_STEP or ROWS_CHANGED. Nothing was changed."""

    default_reason = "OFFSET_GAP"


class ComputeError(PeerError):
    """A step failed in computing (COMPUTE_FAILED, NON_FINITE); the KV is as it was before it."""

    default_reason = "COMPUTE_FAILED"


class RemoteProtocolError(PeerError):
    """A reply breaks the protocol: an id, shape, dtype or order that can't be."""

    default_reason = "BAD_REPLY"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed try to serve a span, for error messages and `GenerationResult`."""

    server: str
    span: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.span} on {self.server}: {self.reason} ({self.message})"


class NoRouteError(PetalsAsyncError):
    """No servers for some blocks within the time allowed, or all attempts failed.

    Args:
        message: One line for a person.
        attempts: Each attempt that was made, oldest first.
    """

    default_reason = "NO_ROUTE"

    def __init__(self, message: str, *, reason: str | None = None, attempts: Sequence[Attempt] = ()) -> None:
        listed = "".join(f"\n  {number}. {attempt}" for number, attempt in enumerate(attempts, start=1))
        super().__init__(message + (f"; attempts:{listed}" if attempts else ""), reason=reason)
        self.attempts = tuple(attempts)


class RegistryUnavailableError(PetalsAsyncError):
    """No registry answers; the message names the addresses tried."""

    default_reason = "REGISTRY_UNAVAILABLE"


class CheckpointError(PetalsAsyncError):
    """A model's files are missing or damaged; the message names the file."""

    default_reason = "BAD_CHECKPOINT"


class UnsupportedModelError(PetalsAsyncError):
    """An architecture that can't be cut into blocks; the message says why."""

    default_reason = "UNSUPPORTED_MODEL"


class ConfigurationError(PetalsAsyncError, ValueError):
    """An option that can't work: an address, a dtype, a memory budget."""

    default_reason = "BAD_CONFIGURATION"


class ClosedError(PetalsAsyncError):
    """Used before it was opened with `async with`, or after it was closed."""

    default_reason = "CLOSED"


def leaf_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group, however deep: task groups wrap even a single one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
