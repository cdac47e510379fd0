"""A link of a stage: a span, the segment that serves it now, and the log of all inputs at its boundary."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from petals_async.client.segment import Segment, Ticket
from petals_async.core.hidden import HiddenStates
from petals_async.core.replay import Chunk, ReplayLog
from petals_async.core.span import Span
from petals_async.errors import OffsetGapError
from petals_async.scopes import open_tasks

REPLAY_WINDOW = 4
"""Chunks of a replay that one segment works on before the oldest one's outputs are collected."""


@dataclass(slots=True)
class Link:
    """One span of a stage. `log` outlives segments: it is what a new one is filled from.

    `gathered_at` is the offset of the last row permutation that the segment's replay had gathered in. The server
    knows nothing of it, and would truncate behind it without giving the rows their old order back.
    """

    span: Span
    segment: Segment
    log: ReplayLog
    gathered_at: int = 0

    def check_rows(self, token_offset: int) -> None:
        """Check that the segment's rows have the order that they had at an offset.

        Raises:
            OffsetGapError: They don't (ROWS_CHANGED): everything must be replayed.
        """
        if 0 < token_offset <= self.gathered_at:
            raise OffsetGapError(
                f"rows were gathered up to offset {self.gathered_at}, {token_offset} lies before it",
                reason="ROWS_CHANGED",
                server=str(self.segment.server),
            )


async def replay(links: list[Link], end: int, *, merge_tokens: int = 0) -> int:
    """Fill the segments of consecutive links from the first one's log, up to a position.

    All links but the last replay with all outputs, which become the next one's log; the last one with none.
    Links work at the same time: the second on one chunk while the first is on the next.

    Args:
        links: Consecutive links with open segments; the logs of all but the first are empty.
        end: Tokens to be held in the end: the pending step's offset, which is never replayed itself.
        merge_tokens: Join chunks up to this many tokens; 0 repeats the chunks as they were first sent.

    Returns:
        Tokens that were sent to the first link's segment.

    Raises:
        PetalsAsyncError: A segment failed; the first link's log is as it was.
    """
    single = len(links) == 1 and not 0 < end <= links[0].gathered_at
    start = min(links[0].segment.position, end) if single else 0
    for link in links:
        link.gathered_at = links[0].log.last_permutation(end)
        if link is not links[0]:
            link.log.gathered_at = link.gathered_at
    chunks = links[0].log.read(start, end)
    if merge_tokens:
        chunks = merged(chunks, merge_tokens)
    async with open_tasks() as tasks:
        inbox: Iterable[Chunk] | MemoryObjectReceiveStream[Chunk] = chunks
        for link, following in zip(links, [*links[1:], None], strict=True):
            if following is None:
                tasks.start_soon(_replay_one, link, inbox, None)
            else:
                send, receive = anyio.create_memory_object_stream[Chunk](REPLAY_WINDOW)
                tasks.start_soon(_replay_one, link, inbox, send)
                inbox = receive
    return end - start


async def _replay_one(
    link: Link,
    inbox: Iterable[Chunk] | MemoryObjectReceiveStream[Chunk],
    outbox: MemoryObjectSendStream[Chunk] | None,
) -> None:
    """Send chunks to one link, keeping several in flight, and hand its outputs on."""
    num_outputs = None if outbox else 0
    in_flight: deque[tuple[Chunk, Ticket]] = deque()

    async def send(chunk: Chunk) -> None:
        ticket = await link.segment.send(chunk.token_offset, chunk.hidden, num_outputs=num_outputs)
        in_flight.append((chunk, ticket))
        if len(in_flight) >= REPLAY_WINDOW:
            await collect()

    async def collect() -> None:
        chunk, ticket = in_flight.popleft()
        outputs = await link.segment.wait(ticket)
        if outbox is not None and outputs is not None:
            await outbox.send(Chunk(chunk.token_offset, outputs))

    try:
        if isinstance(inbox, MemoryObjectReceiveStream):
            with inbox:
                async for chunk in inbox:
                    link.log.append(chunk.token_offset, chunk.hidden)
                    await send(chunk)
        else:
            for chunk in inbox:
                await send(chunk)
        while in_flight:
            await collect()
    finally:
        if outbox is not None:
            outbox.close()


def merged(chunks: Iterator[Chunk], max_tokens: int) -> Iterator[Chunk]:
    """Join consecutive chunks up to a number of tokens."""
    gathered: list[HiddenStates] = []
    start, size = 0, 0
    for chunk in chunks:
        if gathered and size + chunk.hidden.num_tokens > max_tokens:
            yield Chunk(start, HiddenStates.concat_tokens(gathered))
            gathered, size = [], 0
        if not gathered:
            start = chunk.token_offset
        gathered.append(chunk.hidden)
        size += chunk.hidden.num_tokens
    if gathered:
        yield Chunk(start, HiddenStates.concat_tokens(gathered))
