"""A stage: one span of the route as planned at the start. It owns its segments, and it alone heals itself.

It handles its steps in order, one at a time, so one loss is handled once, however many chunks are in flight on
the whole route. A hole that two servers fill stays one stage, with two links from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from petals_async.client.link import Link, replay
from petals_async.client.result import Recovery
from petals_async.client.route import Router, Search
from petals_async.core.hidden import HiddenStates
from petals_async.core.recovery import Action, action_for
from petals_async.core.span import Span
from petals_async.errors import (
    ComputeError,
    NoRouteError,
    OffsetGapError,
    PeerError,
    PetalsAsyncError,
    PositionError,
    ServerDrainingError,
)

log = logging.getLogger(__name__)


class Stage:
    """One span of the route.

    Args:
        link: The span's first segment and its log.
        router: Gets other servers.
        on_recovery: Called with each recovery, and whether it was exact.
    """

    def __init__(self, link: Link, router: Router, on_recovery: Callable[[Recovery, bool], None]) -> None:
        self._router = router
        self._on_recovery = on_recovery
        self.links = [link]

    async def step(
        self,
        token_offset: int,
        hidden: HiddenStates,
        *,
        row_indices: tuple[int, ...] = (),
        num_outputs: int | None = None,
    ) -> HiddenStates | None:
        """Run one step through all links, healing those that fail.

        Args:
            token_offset: Index of the first token.
            hidden: (batch, n, hidden_size), n at least 1.
            row_indices: For each row the row whose cache it goes on from; empty for its own.
            num_outputs: How many of the last tokens' outputs are wanted; None for all.

        Returns:
            (batch, m, hidden_size), or None when none were wanted.

        Raises:
            NoRouteError: No server could be had in time.
            RequestError: The step is the caller's fault.
            ComputeError: It failed in computing on two servers.
        """
        await self._restore_logs(token_offset)
        index, outputs = 0, hidden
        search: Search | None = None
        while index < len(self.links):
            link = self.links[index]
            if link.log.end == token_offset:
                link.log.append(token_offset, outputs, row_indices)
            if link.segment.draining:
                await self._leave_draining(index, token_offset)
                link = self.links[index]
            last = index == len(self.links) - 1
            try:
                link.check_rows(token_offset)
                result = await link.segment.step(
                    token_offset, outputs, row_indices=row_indices, num_outputs=num_outputs if last else None
                )
            except PetalsAsyncError as error:
                search = search or self._router.search(link.span)
                await self._heal(index, error, token_offset, search)
                continue
            if last:
                return result
            if result is None:
                raise NoRouteError("a link gave no outputs")
            index, outputs, search = index + 1, result, None
        return outputs

    async def _heal(self, index: int, error: PetalsAsyncError, end: int, search: Search) -> None:
        """Make link `index` hold `[0, end)` again: on the same server, or on others.

        Raises:
            PetalsAsyncError: The error itself, if nothing can be done about it.
        """
        link, started_at = self.links[index], anyio.current_time()
        failures = search.compute_failures
        search.span = link.span
        self._router.note(search, link.segment.server, error)
        action = action_for(error, same_step_failures=failures)
        if action is Action.RAISE:
            raise error
        self._router.check_attempts(search)
        if action is Action.REPLAY and await self._refill(link, end, error, search, started_at):
            return
        await self._replace(index, error, end, search, started_at)

    async def _refill(self, link: Link, end: int, error: PetalsAsyncError, search: Search, started_at: float) -> bool:
        """Replay what the same server lacks; False if it fails at that."""
        if link.segment.error is not None:
            return False
        try:
            options = self._router.options
            replayed = await replay([link], end, merge_tokens=options.chunk_tokens, fast=options.fast_replay)
        except PeerError as failure:
            self._router.note(search, link.segment.server, failure)
            return False
        if replayed:
            self._report(link, [link], error, end, replayed, started_at)
        return True

    async def _replace(self, index: int, error: PetalsAsyncError, end: int, search: Search, started_at: float) -> None:
        """Give a link up, and put new ones in its place."""
        self.links[index].segment.close()
        await self._take_over(index, error, end, search, started_at)

    async def _take_over(
        self, index: int, error: PetalsAsyncError, end: int, search: Search, started_at: float
    ) -> None:
        """Put new links in the place of one, filled up to `end`; nothing changes if there are none to be had."""
        link = self.links[index]
        links = await self._router.obtain(search, log=link.log, end=end, lost_digests=_digests(link))
        self.links[index : index + 1] = links
        self._report(link, links, error, end, end, started_at)

    async def _restore_logs(self, end: int) -> None:
        """Make logs again that a rollback behind a permutation has left empty: from the log of the link before."""
        while index := next((i for i, link in enumerate(self.links) if link.log.end < end), 0):
            first, lost = self.links[index - 1 : index + 1]
            started_at = anyio.current_time()
            error = OffsetGapError("the log's rows were gathered", reason="ROWS_CHANGED")
            search = self._router.search(Span(first.span.start, lost.span.end))
            first.segment.close()
            lost.segment.close()
            digests = _digests(first) | _digests(lost)
            links = await self._router.obtain(search, log=first.log, end=end, lost_digests=digests)
            lost.log.close()
            self.links[index - 1 : index + 1] = links
            self._report(lost, links, error, end, end, started_at)

    async def _leave_draining(self, index: int, end: int) -> None:
        """Move off a server that is leaving, if there is another one now; stay as long as there is none."""
        link, started_at = self.links[index], anyio.current_time()
        link.segment.draining = False
        error = ServerDrainingError("the server is draining", server=str(link.segment.server))
        search = self._router.search(link.span)
        search.deadline = started_at
        self._router.note(search, link.segment.server, error)
        try:
            await self._take_over(index, error, end, search, started_at)
        except NoRouteError:
            return
        link.segment.close()

    def _report(
        self, lost: Link, links: list[Link], error: PetalsAsyncError, end: int, replayed: int, started_at: float
    ) -> None:
        recovery = Recovery(
            at=end,
            span=lost.span,
            lost=str(lost.segment.server),
            replacements=tuple(str(link.segment.server) for link in links),
            reason=error.reason,
            replayed_tokens=replayed,
            duration_s=anyio.current_time() - started_at,
        )
        log.info(
            "blocks %s: %s on %s; went on with %s after %.0f ms, %d tokens replayed",
            recovery.span,
            recovery.reason,
            recovery.lost,
            ", ".join(f"{link.span} on {link.segment.server}" for link in links),
            recovery.duration_s * 1e3,
            recovery.replayed_tokens,
        )
        self._on_recovery(recovery, self._was_exact(lost, links))

    def _was_exact(self, lost: Link, links: list[Link]) -> bool:
        """Whether the new servers were found to give each replayed token the bits that it had on the lost one."""
        expected = lost.segment.server.numeric_fingerprint
        servers = [lost.segment.server, *(link.segment.server for link in links)]
        alike = all(server.exact and server.numeric_fingerprint == expected for server in servers)
        return bool(expected) and alike and not lost.log.cut

    # -- the log

    def commit(self, position: int) -> None:
        """Make what was sent count, up to a position."""
        for link in self.links:
            link.log.commit(position)

    def rollback_tail(self) -> None:
        """Forget what was sent by a call that did not succeed."""
        for link in self.links:
            link.log.rollback_tail()

    def truncate(self, position: int) -> None:
        """Forget what was sent from a position on."""
        for link in self.links:
            link.log.truncate(position)

    async def rollback(self, position: int) -> None:
        """Tell the servers to go back to a position; one that can't be reached learns it with its next step."""
        for link in self.links:
            try:
                await link.segment.step(position, None)
            except PeerError as error:
                if not isinstance(error, PositionError | ComputeError):
                    log.debug("rollback on %s: %s", link.segment.server, error)

    def close(self) -> None:
        """End all segments and forget the logs."""
        for link in self.links:
            link.segment.close()
            link.log.close()


def _digests(link: Link) -> dict[int, str]:
    """Return the digest of each block that a replacement must have, as far as the lost server stated them."""
    server = link.segment.server
    if len(server.block_digests) != len(server.span):
        return {}
    span: Span = link.span
    return {block: server.block_digests[block - server.span.start] for block in range(span.start, span.end)}
