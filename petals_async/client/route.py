"""How a client gets servers for some blocks, at the start and after a loss: plan, open, replay, until it holds.

Everything that retries in the client is the one loop in `Router.obtain`; what it does about an error is decided
by `core.recovery.action_for`, and nothing wider than our own error tree is caught.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from petals_async.client.link import Link, replay
from petals_async.client.segment import Segment, SegmentRequest
from petals_async.client.swarm import Needs, Swarm
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.recovery import Action, action_for
from petals_async.core.replay import ReplayLog
from petals_async.core.route import Leg
from petals_async.core.server_info import ServerInfo
from petals_async.core.span import Span
from petals_async.errors import (
    Attempt,
    ComputeError,
    NoRouteError,
    PeerError,
    PetalsAsyncError,
    ServerDrainingError,
    ServerOverloadedError,
)
from petals_async.scopes import open_tasks

log = logging.getLogger(__name__)

DEFAULT_MAX_RETRIES = 20
"""Failed attempts in one recovery, at most; the time limit mostly comes first."""

DEFAULT_TIMEOUT_S = 120.0
"""How long one step may wait for a route."""

MAX_WAIT_S = 1.0
"""Without news the planner is asked again after this time."""

AVOID_DRAINING_S = 60.0
"""A draining server isn't asked again in this time."""


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What one session asks of its servers, and how hard it tries.

    `chunk_tokens` bounds a step; a replacement must take steps as long. With `fast_replay`, a replay joins chunks even
    for servers that compute joined ones otherwise.
    """

    model_fingerprint: str
    batch_size: int
    max_tokens: int
    dtype: str
    chunk_tokens: int = 512
    timeout_s: float = DEFAULT_TIMEOUT_S
    max_retries: int = DEFAULT_MAX_RETRIES
    fast_replay: bool = False


@dataclass(slots=True)
class Search:
    """One attempt after the other to get servers for a span: what failed so far, and who is avoided.

    A server without room has not failed: waiting for room is bounded by the deadline alone, and of the attempts that
    met no room on one server only the last is kept.
    """

    span: Span
    deadline: float
    attempts: list[Attempt] = field(default_factory=list)
    num_failures: int = 0
    avoid: dict[str, float] = field(default_factory=dict)
    compute_failures: int = 0


class Router:
    """Opens segments for one session.

    Args:
        swarm: Who serves what.
        tasks: The session's task group, in which segments live.
        options: What to ask for.
        log_budget: Bytes that the session's replay logs share.
    """

    def __init__(self, swarm: Swarm, tasks: TaskGroup, options: RouteOptions, log_budget: ByteBudget) -> None:
        self._swarm = swarm
        self._tasks = tasks
        self._log_budget = log_budget
        self.options = options

    def search(self, span: Span) -> Search:
        """Begin to look for servers; the time limit starts now."""
        return Search(span, anyio.current_time() + self.options.timeout_s)

    async def obtain(
        self,
        search: Search,
        *,
        log: ReplayLog | None = None,
        end: int = 0,
        lost_digests: Mapping[int, str] | None = None,
    ) -> list[Link]:
        """Return links with open segments for the search's span, filled from a log up to `end`.

        Raises:
            NoRouteError: Not within the time limit or the number of attempts; lists each attempt.
            RequestError: A server refused for a fault of ours.
        """
        while True:
            legs = await self._plan(search, lost_digests)
            try:
                return await self._open_and_fill(search, legs, log, end)
            except PeerError as error:
                if action_for(error, same_step_failures=search.compute_failures - 1) is Action.RAISE:
                    raise
                self.check_attempts(search)

    async def _plan(self, search: Search, lost_digests: Mapping[int, str] | None) -> tuple[Leg, ...]:
        """Return a route, waiting for one while there is none."""
        while True:
            try:
                return self._swarm.plan(search.span, self._needs(), avoid=search.avoid, lost_digests=lost_digests)
            except NoRouteError as error:
                now = anyio.current_time()
                if now >= search.deadline:
                    raise NoRouteError(
                        f"{error.message}, and none came within {self.options.timeout_s:g} s",
                        reason=error.reason,
                        attempts=search.attempts,
                    ) from error
            await self._swarm.wait_for_change(self._pause_s(search, now))

    def check_attempts(self, search: Search) -> None:
        """Give up after `max_retries` failed attempts.

        Raises:
            NoRouteError: There were more; lists each.
        """
        if search.num_failures > self.options.max_retries:
            raise NoRouteError(
                f"no route for blocks {search.span} after {len(search.attempts)} failed attempts",
                attempts=search.attempts,
            )

    def _needs(self) -> Needs:
        return Needs(self.options.batch_size, self.options.max_tokens, self.options.chunk_tokens)

    def _pause_s(self, search: Search, now: float) -> float:
        pauses = [MAX_WAIT_S, search.deadline - now]
        pauses += [until - now for until in search.avoid.values() if until > now]
        readmission_s = self._swarm.next_readmission_s()
        if readmission_s is not None:
            pauses.append(readmission_s)
        return max(min(pauses), 0.001)

    async def _open_and_fill(self, search: Search, legs: Sequence[Leg], log: ReplayLog | None, end: int) -> list[Link]:
        """Open all segments of a plan in parallel, and replay; on any failure close them all again."""
        segments: list[Segment] = []
        links: list[Link] = []
        try:
            segments = await self._open_all(search, legs)
            for segment in segments:
                own = log if log is not None and not links else ReplayLog(self._log_budget)
                links.append(Link(segment.span, segment, own))
            if end:
                await self._fill(search, links, end)
            for link in links:
                if log is not None and link.log is not log:
                    link.log.commit(log.committed)
        except BaseException:
            for segment in segments:
                segment.close()
            for link in links:
                if link.log is not log:
                    link.log.close()
            raise
        return links

    async def _open_all(self, search: Search, legs: Sequence[Leg]) -> list[Segment]:
        opened: dict[Span, Segment] = {}
        errors: list[PetalsAsyncError] = []

        async def open_one(leg: Leg) -> None:
            try:
                opened[leg.span] = await self._open_segment(leg.server, leg.span)
            except PetalsAsyncError as error:
                self.note(search, leg.server, error)
                errors.append(error)

        try:
            async with open_tasks() as tasks:
                for leg in legs:
                    tasks.start_soon(open_one, leg)
            if errors:
                raise next((e for e in errors if action_for(e) is Action.RAISE), errors[0])
        except BaseException:
            for segment in opened.values():
                segment.close()
            raise
        return [opened[leg.span] for leg in legs]

    async def _open_segment(self, server: ServerInfo, span: Span) -> Segment:
        options = self.options
        channel = await self._swarm.channel(server.address)
        request = SegmentRequest(options.model_fingerprint, span, options.batch_size, options.max_tokens, options.dtype)
        segment = Segment(channel, server, request)
        self._tasks.start_soon(segment.run)
        try:
            await segment.opened()
        except BaseException:
            segment.close()
            raise
        self._swarm.health.record_success(server.server_id, anyio.current_time())
        return segment

    async def _fill(self, search: Search, links: list[Link], end: int) -> None:
        try:
            await replay(links, end, merge_tokens=self.options.chunk_tokens, fast=self.options.fast_replay)
        except PeerError as error:
            servers = [link.segment.server for link in links]
            self.note(search, next((s for s in servers if str(s) == error.server), servers[0]), error)
            raise

    def note(self, search: Search, server: ServerInfo, error: PetalsAsyncError) -> None:
        """Write a failed attempt down, and keep away from the server as far as the error says."""
        now = anyio.current_time()
        attempt = Attempt(str(server), str(search.span), error.reason, error.message)
        if isinstance(error, ServerOverloadedError):
            same = (attempt.server, attempt.reason)
            search.attempts[:] = [known for known in search.attempts if (known.server, known.reason) != same]
        else:
            search.num_failures += 1
        search.attempts.append(attempt)
        log.debug("blocks %s on %s: %s", search.span, server, error)
        if isinstance(error, ComputeError):
            search.compute_failures += 1
        match action_for(error):
            case Action.EXCLUDE:
                self._swarm.health.record_failure(server.server_id, now, error.reason)
            case Action.MOVE if isinstance(error, ServerOverloadedError):
                search.avoid[server.server_id] = now + max(error.retry_after_s, 0.05)
            case Action.MOVE:
                search.avoid[server.server_id] = now + AVOID_DRAINING_S
                if isinstance(error, ServerDrainingError):
                    self._swarm.mark_draining(server)
            case Action.RAISE | Action.REPLAY:
                pass
