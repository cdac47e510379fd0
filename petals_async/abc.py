"""The seams: the few interfaces through which the client, the server and the registry see the world.

Over them the same code runs on gRPC between machines and on the in-memory swarm in virtual time.
All coroutines may be cancelled; a cancelled one has closed what it opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from petals_async.core.hidden import HiddenStates
from petals_async.core.lease import RegistryEvent, WatchCursor
from petals_async.core.messages import ClientMessage, ServerMessage
from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.core.span import Span
from petals_async.errors import ComputeError, RequestError

T = TypeVar("T")


class SessionStream(Protocol):
    """The client's end of one RunSession stream."""

    async def send(self, message: ClientMessage) -> None:
        """Write one message.

        Raises:
            PeerError: The stream is over; `receive` tells why.
        """

    async def receive(self) -> ServerMessage:
        """Return the next message.

        Raises:
            PeerError: The stream is over, for the reason that the server or the transport gave.
            RequestError: The server ended the stream for a fault of ours.
        """


class ServerStream(Protocol):
    """The server's end of one RunSession stream."""

    @property
    def principal(self) -> str:
        """Whose stream it is; empty without authentication."""

    async def receive(self) -> ClientMessage | None:
        """Return the next message; None when the stream has ended, however it did.

        Raises:
            RequestError: The message can't be read.
        """

    async def send(self, message: ServerMessage) -> None:
        """Queue one message; waits while the client is slow."""

    def send_nowait(self, message: ServerMessage) -> None:
        """Queue one message if there is room; drop it otherwise (signs of life)."""


class BlockService(Protocol):
    """What a block server does, whatever the transport; errors of our tree end the call."""

    def get_server_info(self) -> ServerInfo:
        """Say what this server is."""

    async def run_session(self, stream: ServerStream) -> None:
        """Serve one stream until it ends."""

    async def close_session(self, session_id: bytes) -> None:
        """Free a session; an unknown id is no error."""

    def list_sessions(self) -> Sequence[SessionInfo]:
        """Return the sessions held, oldest first."""


class BlockChannel(Protocol):
    """A connection to one block server."""

    @property
    def address(self) -> str:
        """HOST:PORT of the server."""

    async def get_server_info(self) -> ServerInfo:
        """Ask the server what it is. Raises PeerError."""

    def open_stream(self) -> AbstractAsyncContextManager[SessionStream]:
        """Open one RunSession stream; leaving the context cancels it."""

    async def close_session(self, session_id: bytes) -> None:
        """Free a session by its id; an unknown id is no error. Raises PeerError."""

    async def list_sessions(self) -> Sequence[SessionInfo]:
        """Return all sessions held there. Raises PeerError."""


class Connector(Protocol):
    """Makes connections to block servers."""

    def connect(self, address: str) -> AbstractAsyncContextManager[BlockChannel]:
        """Open a connection, without waiting for the peer; leaving the context closes it."""


class RegistryWatch(Protocol):
    """A stream of what changes in the registry: a snapshot first."""

    async def receive(self) -> RegistryEvent:
        """Return the next event. Raises RegistryUnavailableError when the stream is over."""


class Registry(Protocol):
    """Who serves what."""

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Put a server's record, or put it anew, for `ttl_s` seconds. Raises RegistryUnavailableError."""

    async def renew(self, server_id: str) -> bool:
        """Extend a lease by its time to live; False if it is not known (announce again).

        Raises:
            RegistryUnavailableError: No registry answers.
        """

    async def withdraw(self, server_id: str) -> None:
        """Remove a server's record; an unknown one is no error. Raises RegistryUnavailableError."""

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all. Raises RegistryUnavailableError."""

    def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AbstractAsyncContextManager[RegistryWatch]:
        """Watch the servers of one model, from a cursor on if it is still known, else from a snapshot.

        Raises:
            RegistryUnavailableError: No registry answers.
        """


@dataclass(slots=True)
class BackendStep:
    """One step as the compute worker sees it: a session's cache, and new tokens at an offset.

    `hidden` is (batch, num_tokens, hidden_size), or None for zero tokens (truncate only).
    `num_outputs`: how many of the last tokens' outputs to return; None for all, 0 for none.
    `chunk_tokens`: tokens of each chunk in which they were first computed, in order; empty for one chunk.
    """

    cache: Any
    span: Span
    token_offset: int
    hidden: HiddenStates | None
    row_indices: tuple[int, ...] = ()
    num_outputs: int | None = None
    chunk_tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class BackendResult:
    """What a step gave: outputs (batch, m, hidden_size) or None, and the seconds it took."""

    outputs: HiddenStates | None
    compute_s: float


BackendOutcome = BackendResult | ComputeError | RequestError
"""A step that failed comes back as a value, with all layers put back to the length before it."""


class BlockBackend(Protocol):
    """The blocks of one span, and the KV caches over them. Every method runs on the one compute worker."""

    @property
    def span(self) -> Span:
        """The blocks held."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    @property
    def dtype(self) -> str:
        """Name of the dtype of the hidden states."""

    def kv_bytes(self, span: Span, batch_size: int, num_tokens: int) -> int:
        """Return the exact bytes of a cache for `num_tokens` tokens of `batch_size` rows over `span`."""

    def allocate(self, span: Span, batch_size: int, max_tokens: int) -> Any:
        """Return an empty cache for a session.

        Raises:
            ComputeError: The memory isn't there.
        """

    def copy_prefix(self, source: Any, target: Any, num_tokens: int) -> None:
        """Copy the first tokens of one session's cache into another's of the same span and batch."""

    def run(self, steps: Sequence[BackendStep]) -> list[BackendOutcome]:
        """Run steps of different sessions; the outcomes come in the same order."""


class ComputeWorker(Protocol):
    """The one place where the backend runs: a thread of its own, or inline in virtual time."""

    async def run(self, step: BackendStep) -> BackendOutcome:
        """Queue a step, and return its outcome.

        Raises:
            ServerOverloadedError: The queue is full (QUEUE_FULL).
            ClosedError: The worker has stopped.
        """

    async def call(self, function: Callable[[], T]) -> T:
        """Run a short function of the backend (allocate, copy_prefix) between steps, and return its result."""


class Edges(Protocol):
    """The client's part of the model: embeddings before the first block; norm and head after the last."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def embed(self, token_ids: Sequence[int], *, position: int) -> HiddenStates:
        """Return the hidden states of one row of tokens that start at `position`: (1, n, hidden_size).

        Raises:
            RequestError: A token id is outside the vocabulary.
        """

    def logits(self, hidden: HiddenStates) -> Any:
        """Return the logits of hidden states (batch, n, hidden_size) as a tensor (batch, n, vocab_size)."""
