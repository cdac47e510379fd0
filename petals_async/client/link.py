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


@dataclass(frozen=True, slots=True)
class JoinedChunks:
    """Consecutive chunks of a log as one: the first one's offset, all their tokens, and the tokens of each."""

    token_offset: int
    hidden: HiddenStates
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, chunks: list[Chunk]) -> JoinedChunks:
        """Join chunks, each of which begins where the one before it ends."""
        hidden = HiddenStates.concat_tokens([chunk.hidden for chunk in chunks])
        return cls(chunks[0].token_offset, hidden, tuple(chunk.hidden.num_tokens for chunk in chunks))

    def apart(self) -> Iterator[JoinedChunks]:
        """Give each chunk by itself."""
        start = 0
        for size in self.sizes:
            hidden = self.hidden.slice_tokens(start, start + size)
            yield JoinedChunks(self.token_offset + start, hidden, (size,))
            start += size


async def replay(links: list[Link], end: int, *, merge_tokens: int, fast: bool = False) -> int:
    """Fill the segments of consecutive links from the first one's log, up to a position.

    All links but the last replay with all outputs, which become the next one's log; the last one with none.
    Links work at the same time: the second on one chunk while the first is on the next.

    Args:
        links: Consecutive links with open segments; the logs of all but the first are empty.
        end: Tokens to be held in the end: the pending step's offset, which is never replayed itself.
        merge_tokens: Chunks are joined up to this many tokens, for servers that give each token its bits all the same.
        fast: Join them for other servers too.

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
    chunks = joined(links[0].log.read(start, end), merge_tokens)
    async with open_tasks() as tasks:
        inbox: Iterable[JoinedChunks] | MemoryObjectReceiveStream[JoinedChunks] = chunks
        for link, following in zip(links, [*links[1:], None], strict=True):
            if following is None:
                tasks.start_soon(_replay_one, link, inbox, None, fast)
            else:
                send, receive = anyio.create_memory_object_stream[JoinedChunks](REPLAY_WINDOW)
                tasks.start_soon(_replay_one, link, inbox, send, fast)
                inbox = receive
    return end - start


async def _replay_one(
    link: Link,
    inbox: Iterable[JoinedChunks] | MemoryObjectReceiveStream[JoinedChunks],
    outbox: MemoryObjectSendStream[JoinedChunks] | None,
    fast: bool,
) -> None:
    """Send chunks to one link, keeping several in flight, and hand its outputs on."""
    num_outputs = None if outbox else 0
    exact = link.segment.server.exact
    in_flight: deque[tuple[JoinedChunks, Ticket]] = deque()

    async def send(joint: JoinedChunks) -> None:
        for part in [joint] if exact or fast else joint.apart():
            sizes = part.sizes if exact and len(part.sizes) > 1 else ()
            ticket = await link.segment.send(
                part.token_offset, part.hidden, num_outputs=num_outputs, chunk_tokens=sizes
            )
            in_flight.append((part, ticket))
            if len(in_flight) >= REPLAY_WINDOW:
                await collect()

    async def collect() -> None:
        part, ticket = in_flight.popleft()
        outputs = await link.segment.wait(ticket)
        if outbox is not None and outputs is not None:
            await outbox.send(JoinedChunks(part.token_offset, outputs, part.sizes))

    try:
        if isinstance(inbox, MemoryObjectReceiveStream):
            with inbox:
                async for joint in inbox:
                    for chunk in joint.apart():
                        link.log.append(chunk.token_offset, chunk.hidden)
                    await send(joint)
        else:
            for joint in inbox:
                await send(joint)
        while in_flight:
            await collect()
    finally:
        if outbox is not None:
            outbox.close()


def joined(chunks: Iterator[Chunk], max_tokens: int) -> Iterator[JoinedChunks]:
    """Join consecutive chunks up to a number of tokens."""
    gathered: list[Chunk] = []
    for chunk in chunks:
        if gathered and chunk.end - gathered[0].token_offset > max_tokens:
            yield JoinedChunks.of(gathered)
            gathered = []
        gathered.append(chunk)
    if gathered:
        yield JoinedChunks.of(gathered)
