"""What a block server says of itself: in GetServerInfo, and in the registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from petals_async.core.span import Span


class ServerState(Enum):
    """Where a block server is in its life."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds a server states; asking for more is the caller's fault and names the limit."""

    max_step_tokens: int = 512
    max_session_tokens: int = 8192
    max_batch_size: int = 64
    max_in_flight_steps: int = 8


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One block server: who, where, which blocks of which model, how large, how fast.

    `server_id` is new at each process start, so a restarted server is another server; `name` is stable and
    for people. `block_digests` has one entry for each block of `span`, in order. `block_step_s` is the
    measured time of one token through one block, in seconds; 0 when not measured. `exact` says that a token's bits were
    found to be the same alone, in any company, and in a replay of many at once; `numeric_fingerprint` tells whose bits.
    """

    server_id: str
    name: str
    address: str
    version: str
    model: str
    model_fingerprint: str
    num_blocks: int
    hidden_size: int
    span: Span
    dtype: str
    state: ServerState = ServerState.JOINING
    block_digests: tuple[str, ...] = ()
    numeric_fingerprint: str = ""
    exact: bool = False
    limits: Limits = field(default_factory=Limits)
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0
    block_step_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.server_id[:8]}) at {self.address}"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One held session, for debugging: never its id, only a handle made from it.

    `handle` is the first 8 hex digits of the SHA-256 of the session id.
    """

    handle: str
    span: Span
    batch_size: int
    position: int
    max_tokens: int
    kv_bytes: int
    age_s: float
    idle_s: float
    connected: bool
    principal: str = ""
