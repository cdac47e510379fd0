"""A session: one generation over a route, from the client's side. It alone owns the position.

`committed` moves only when a whole call has succeeded on all stages; a call that failed or was cancelled leaves
the position and all logs as they were.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from petals_async.client.result import Recovery
from petals_async.client.route import RouteOptions, Router
from petals_async.client.stage import Stage
from petals_async.client.swarm import Swarm
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.hidden import HiddenStates
from petals_async.core.server_info import ServerInfo
from petals_async.core.span import Span
from petals_async.errors import ClosedError, LengthExceededError, RemoteProtocolError, RequestError
from petals_async.scopes import open_tasks

PIPELINE_CHUNKS = 2
"""Chunks that wait between two stages while a long input is worked on."""


class Session:
    """Hidden states through all blocks, with a KV cache on the servers that survives them.

    Make one with `Client.session`. Two calls at once raise `anyio.BusyResourceError`.

    Attributes:
        position: Tokens committed; the index of the next token.
        recoveries: What was lost and replaced so far.
        exact: Whether all replays repeated the very same computation on like hardware.
    """

    def __init__(self, stages: list[Stage], options: RouteOptions, hidden_size: int) -> None:
        self._stages = stages
        self._options = options
        self._hidden_size = hidden_size
        self._busy = False
        self._closed = False
        self.position = 0
        self.recoveries: list[Recovery] = []
        self.exact = True

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._options.batch_size

    @property
    def max_tokens(self) -> int:
        """Tokens that each row may have."""
        return self._options.max_tokens

    @property
    def route(self) -> list[tuple[Span, ServerInfo]]:
        """The spans and their servers now, in order."""
        return [(link.span, link.segment.server) for stage in self._stages for link in stage.links]

    def note_recovery(self, recovery: Recovery, exact: bool) -> None:
        """Write a recovery down."""
        self.recoveries.append(recovery)
        self.exact = self.exact and exact

    async def step(self, hidden: Any, *, row_indices: Sequence[int] = (), num_outputs: int | None = None) -> Any:
        """Run new tokens through all blocks; the position grows by their number.

        Args:
            hidden: (batch, n, hidden_size), a torch tensor or `HiddenStates`, in the swarm's dtype. Long inputs are
                cut into chunks and pipelined.
            row_indices: For each row the row whose cache it goes on from (beam search); empty for its own.
            num_outputs: How many of the last tokens' outputs are wanted; None for all.

        Returns:
            (batch, m, hidden_size), of the same type as the input; m = n unless `num_outputs` says otherwise.

        Raises:
            RequestError: A wrong shape, dtype or row; nothing was sent.
            LengthExceededError: More tokens than the session was opened for; nothing was sent.
            NoRouteError: Some blocks had no server in time; the session stays usable.
            anyio.BusyResourceError: Another call is running.
        """
        states = hidden if isinstance(hidden, HiddenStates) else _from_tensor(hidden)
        rows = tuple(int(row) for row in row_indices)
        self._check(states, rows, num_outputs)
        outputs = await self._step(states, rows, num_outputs)
        return outputs if isinstance(hidden, HiddenStates) else _to_tensor(outputs)

    def _check(self, hidden: HiddenStates, rows: tuple[int, ...], num_outputs: int | None) -> None:
        options = self._options
        batch_size, num_tokens, width = hidden.shape
        if (batch_size, width) != (options.batch_size, self._hidden_size) or num_tokens < 1:
            raise RequestError(
                f"hidden states must have the shape (batch, tokens, hidden_size) = "
                f"({options.batch_size}, >= 1, {self._hidden_size}), got {hidden.shape}",
                reason="BAD_SHAPE",
            )
        if hidden.dtype != options.dtype:
            raise RequestError(f"hidden states must be {options.dtype}, got {hidden.dtype}", reason="BAD_DTYPE")
        if self.position + num_tokens > options.max_tokens:
            raise LengthExceededError(
                f"the session was opened for {options.max_tokens} tokens and holds {self.position}; "
                f"{num_tokens} more don't fit"
            )
        if rows and (len(rows) != batch_size or not 0 <= min(rows) <= max(rows) < batch_size):
            raise RequestError(
                f"row_indices must be {batch_size} numbers below {batch_size}, got {list(rows)}", reason="BAD_ROWS"
            )
        if num_outputs is not None and not 1 <= num_outputs <= num_tokens:
            raise RequestError(f"num_outputs must be 1 to {num_tokens}, got {num_outputs}")

    async def _step(self, hidden: HiddenStates, rows: tuple[int, ...], num_outputs: int | None) -> HiddenStates:
        self._enter()
        try:
            outputs = await self._run(hidden, rows, num_outputs)
            for stage in self._stages:
                stage.commit(self.position + hidden.num_tokens)
            self.position += hidden.num_tokens
            return outputs
        except BaseException:
            for stage in self._stages:
                stage.rollback_tail()
            raise
        finally:
            self._busy = False

    def _enter(self) -> None:
        if self._closed:
            raise ClosedError("the session is closed")
        if self._busy:
            raise anyio.BusyResourceError("using")
        self._busy = True

    async def _run(self, hidden: HiddenStates, rows: tuple[int, ...], num_outputs: int | None) -> HiddenStates:
        work = self._cut(hidden, rows, hidden.num_tokens if num_outputs is None else num_outputs)
        if len(work) == 1:
            return _present(await self._through(work[0]))
        pieces = await self._pipeline(work)
        return HiddenStates.concat_tokens(pieces)

    def _cut(self, hidden: HiddenStates, rows: tuple[int, ...], num_outputs: int) -> list[_Chunk]:
        """Cut an input into chunks; only the first permutes rows, only the last tokens' outputs are wanted."""
        size, total = self._options.chunk_tokens, hidden.num_tokens
        chunks = []
        for start in range(0, total, size):
            end = min(start + size, total)
            wanted = max(0, end - max(start, total - num_outputs))
            piece = hidden.slice_tokens(start, end)
            chunks.append(_Chunk(self.position + start, piece, rows if start == 0 else (), wanted))
        return chunks

    async def _through(self, chunk: _Chunk) -> HiddenStates | None:
        """Run one chunk through all stages, one after the other."""
        outputs: HiddenStates | None = chunk.hidden
        for stage in self._stages:
            outputs = await self._at(stage, chunk, _present(outputs))
        return outputs

    async def _at(self, stage: Stage, chunk: _Chunk, hidden: HiddenStates) -> HiddenStates | None:
        wanted = chunk.num_outputs if stage is self._stages[-1] else None
        return await stage.step(chunk.token_offset, hidden, row_indices=chunk.row_indices, num_outputs=wanted)

    async def _pipeline(self, work: list[_Chunk]) -> list[HiddenStates]:
        """Run chunks through all stages at the same time: the second on one chunk while the first is on the next."""
        pieces: list[HiddenStates] = []
        async with open_tasks() as tasks:
            send, receive = anyio.create_memory_object_stream[_Flow](PIPELINE_CHUNKS)
            tasks.start_soon(_feed, work, send)
            for stage in self._stages:
                following, inbox = anyio.create_memory_object_stream[_Flow](PIPELINE_CHUNKS)
                tasks.start_soon(self._serve_stage, stage, receive, following)
                receive = inbox
            with receive:
                async for _, outputs in receive:
                    if outputs is not None:
                        pieces.append(outputs)
        return pieces

    async def _serve_stage(
        self, stage: Stage, inbox: MemoryObjectReceiveStream[_Flow], outbox: MemoryObjectSendStream[_Flow]
    ) -> None:
        with inbox, outbox:
            async for chunk, hidden in inbox:
                await outbox.send((chunk, await self._at(stage, chunk, _present(hidden))))

    async def rollback(self, position: int) -> None:
        """Go back to an earlier position; the tokens behind it are forgotten.

        Args:
            position: The new position, absolute, 0 to the present one.

        Raises:
            RequestError: The position lies outside of that; nothing was changed.
            anyio.BusyResourceError: Another call is running.
        """
        if not 0 <= position <= self.position:
            raise RequestError(f"the position is {self.position}; {position} is not before it")
        self._enter()
        try:
            self.position = position
            for stage in self._stages:
                stage.truncate(position)
            async with open_tasks() as tasks:
                for stage in self._stages:
                    tasks.start_soon(stage.rollback, position)
        finally:
            self._busy = False

    def close(self) -> None:
        """End all segments; their tasks say goodbye to the servers."""
        self._closed = True
        for stage in self._stages:
            stage.close()


class _Chunk:
    """A piece of a call's input, and which of its outputs are wanted at the end."""

    __slots__ = ("hidden", "num_outputs", "row_indices", "token_offset")

    def __init__(self, token_offset: int, hidden: HiddenStates, row_indices: tuple[int, ...], num_outputs: int) -> None:
        self.token_offset = token_offset
        self.hidden = hidden
        self.row_indices = row_indices
        self.num_outputs = num_outputs


_Flow = tuple[_Chunk, HiddenStates | None]


async def _feed(work: list[_Chunk], send: MemoryObjectSendStream[_Flow]) -> None:
    with send:
        for chunk in work:
            await send.send((chunk, chunk.hidden))


def _present(outputs: HiddenStates | None) -> HiddenStates:
    if outputs is None:
        raise RemoteProtocolError("a stage gave no outputs")
    return outputs


def _from_tensor(tensor: Any) -> HiddenStates:
    from petals_async.models.codec import to_hidden

    return to_hidden(tensor)


def _to_tensor(hidden: HiddenStates) -> Any:
    from petals_async.models.codec import from_hidden

    return from_hidden(hidden)


@asynccontextmanager
async def open_session(
    swarm: Swarm, options: RouteOptions, *, span: Span, hidden_size: int, log_budget: ByteBudget
) -> AsyncIterator[Session]:
    """Open a session over a span for as long as the context is open; closing it frees the servers' KV.

    Raises:
        NoRouteError: Some blocks have no server within the time limit.
        RequestError: A server refused the opening for a fault of ours.
    """
    async with open_tasks() as tasks:
        router = Router(swarm, tasks, options, log_budget)
        session = Session([], options, hidden_size)
        links = await router.obtain(router.search(span))
        session._stages.extend(Stage(link, router, session.note_recovery) for link in links)
        try:
            yield session
        finally:
            session.close()
