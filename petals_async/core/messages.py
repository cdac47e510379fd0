"""The messages of one inference session, as values: what `petals_async.v1` carries, without protobuf.

They mirror the wire one to one and are deliberately unchecked: a peer may have written anything into them.
`core/validation.py` is where a server's checks live; the client's lie with its segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from petals_async.core.hidden import HiddenStates, TensorSpec
from petals_async.core.span import Span

MAX_INLINE_BYTES = 256 * 1024
"""Tensors up to this size travel inside their step or result; larger ones follow in parts."""

PART_BYTES = 256 * 1024
"""Bytes of one part (the last one may be shorter)."""

SESSION_ID_BYTES = 16
"""A session id is this many random bytes: 128 bits, which nobody can guess."""


@dataclass(frozen=True, slots=True)
class ForkSource:
    """The session to share a prefix with, and how many of its tokens at most."""

    session_id: bytes
    max_tokens: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The first message of a stream: which session, over which blocks, how large."""

    session_id: bytes
    model_fingerprint: str
    span: Span
    batch_size: int
    max_tokens: int
    wire_dtype: str
    adapter: str = ""
    resume: bool = False
    fork: ForkSource | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens at one offset.

    `data` is None when the bytes follow in parts, or when there are no tokens. `num_outputs` says how many of
    the last tokens' outputs are wanted: None for all, 0 for none. `chunk_tokens` has the tokens of each chunk in which
    these were first computed; empty for one chunk.
    """

    step_id: int
    token_offset: int
    num_tokens: int
    tensor: TensorSpec | None = None
    data: bytes | None = None
    row_indices: tuple[int, ...] = ()
    num_outputs: int | None = None
    chunk_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the tensor whose header came last: where it starts, in bytes, and its bytes."""

    byte_offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The client's goodbye: only this frees a session at once."""


ClientMessage = OpenSession | Step | Part | CloseSession


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is there: the position really held, the next step id, the lease."""

    position: int
    next_step_id: int
    lease_s: float
    progress_interval_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A step was run: the new position and the wanted outputs (None when none were wanted)."""

    step_id: int
    token_offset: int
    position: int
    tensor: TensorSpec | None = None
    data: bytes | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0


class StepState(Enum):
    """Where a step is that has no reply yet."""

    RECEIVING = "receiving"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Progress:
    """A step's sign of life."""

    step_id: int
    state: StepState
    tokens_done: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that was not run and changed nothing, and where the session really stands."""

    step_id: int
    reason: str
    message: str
    position: int
    next_step_id: int
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Draining:
    """The server is leaving: finish elsewhere within the deadline."""

    deadline_s: float


ServerMessage = Opened | Result | Part | Progress | Refused | Draining


def outputs_of(result: Result) -> HiddenStates | None:
    """Return a complete result's outputs, (batch, m, hidden_size), or None when none were wanted.

    Raises:
        RequestError: The bytes don't fit the shape.
    """
    if result.tensor is None:
        return None
    batch, tokens, width = result.tensor.shape if len(result.tensor.shape) == 3 else (-1, -1, -1)
    return HiddenStates(result.tensor.dtype, (batch, tokens, width), result.data or b"")
