"""The route planner: which server runs which blocks.

Theory. A route is an exact cover of `[start, end)` by *legs*, each a run of blocks on one server. A leg costs

    rtt_s + HOP_OVERHEAD_S + blocks * block_step_s      seconds for each token that is decoded,

so every further server has to earn its hop: where one server holds all the blocks at about the same speed,
the route is that one server (a like system became six times slower by adding machines that added only hops).
Time is counted in whole nanoseconds, so that equal costs compare equal, and no choice hangs on rounding.

One pass over the blocks finds the cheapest cover. For each server the pass keeps the cheapest way to be *on
it* at this block: either it was on it before, or it goes over to it here, from the cheapest way to have
reached this block. The work is blocks * servers.

Rules:

- Only a SERVING server that isn't excluded is given a leg, and a leg never leaves the span asked for: a
  server that holds 6:24 runs 8:14 of it if that is the hole.
- A server whose whole KV memory is too small for the session is no candidate. One that is merely short of
  free memory now is a last resort (KV_PENALTY_S): it may evict, or make us wait. Room is judged for the
  longest leg that the server could get in this plan. A server that states no capacity is not judged.
- Holders of one block must agree on its digest. If they don't, nobody here can know who is right: both are
  named, and nothing is planned. With `lost_digests` it is known: only a holder of that very digest will do.
- Ties go to fewer legs, then to the lower server ids, then to the earlier change of server. One server may
  get two legs, with another's between them.
- What servers say of their own speed is not trusted beyond MAX_TIME_S.

Source: shortest path by blocks, as in Petals (arXiv 2209.01188), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.span import Span
from petals_async.errors import NoRouteError

HOP_OVERHEAD_S = 0.002
"""What one more server costs a token besides its round trip: hand-overs to a compute thread, copies."""

DEFAULT_RTT_S = 0.010
"""Round trip to a server that was never spoken to, in seconds."""

DEFAULT_BLOCK_STEP_S = 0.001
"""One token through one block where neither we nor the server measured it, in seconds."""

KV_PENALTY_S = 100_000.0
"""What a leg on a server without enough free KV memory costs: more than any route of servers that have it."""

MAX_TIME_S = 10.0
"""A round trip or block time above this, negative, or not a number counts as this many seconds."""

MAX_LISTED = 8
"""At most this many servers or conflicts are listed in an error."""

DIGEST_CHARS = 12
"""Digits of a block digest shown in an error."""

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server as the planner sees it: what it says of itself, and what was measured from here.

    Args:
        server: What the server says of itself.
        rtt_s: Round trip from here, in seconds; None for DEFAULT_RTT_S.
        block_step_s: One token through one block, in seconds, as measured from here; None for the server's
            own figure, or DEFAULT_BLOCK_STEP_S if it has none.
        free_kv_tokens: Free KV memory over its whole span, in tokens of one row; None for the server's
            own figure.
    """

    server: ServerInfo
    rtt_s: float | None = None
    block_step_s: float | None = None
    free_kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Leg:
    """A run of blocks on one server; `span` lies within the server's span."""

    server: ServerInfo
    span: Span

    def __str__(self) -> str:
        return f"{self.span} on {self.server}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two servers that hold different weights under one model fingerprint, and the first such block."""

    block: int
    first: ServerInfo
    second: ServerInfo

    def __str__(self) -> str:
        ours, theirs = digest_of(self.first, self.block), digest_of(self.second, self.block)
        return (
            f"block {self.block}: {self.first} holds {ours[:DIGEST_CHARS]}, {self.second} holds {theirs[:DIGEST_CHARS]}"
        )


def plan_route(
    span: Span,
    candidates: Sequence[Candidate],
    *,
    kv_tokens: int = 0,
    excluded: Collection[str] = (),
    lost_digests: Mapping[int, str] | None = None,
) -> tuple[Leg, ...]:
    """Return the cheapest route over the blocks of `span`.

    Args:
        span: The blocks to cover; the whole model, or a hole.
        candidates: Servers of one model; of two with one id the later stands.
        kv_tokens: KV memory that the session needs on each server, in tokens of one row: batch * max_tokens.
        excluded: Ids of servers that must not be used.
        lost_digests: For blocks whose weights are known by their digest, that digest.

    Returns:
        The legs, in the order of the blocks: together exactly `span`.

    Raises:
        NoRouteError: Some blocks have no usable holder: they are named, with what stood against their holders
            (NO_ROUTE). Or holders of one block have different weights: both are named (CONFLICTING_WEIGHTS).
    """
    rules = _Rules(span, kv_tokens, frozenset(excluded), lost_digests or {})
    _refuse_conflicts(rules, candidates)
    runs = [run for candidate in _by_id(candidates) for run in rules.runs(candidate)]
    missing = _gaps(span, runs)
    if missing:
        raise NoRouteError(_no_route(rules, candidates, missing))
    return _legs(_cheapest(span, runs), span, {run.server.server_id: run.server for run in runs})


def uncovered(
    span: Span,
    candidates: Sequence[Candidate],
    *,
    kv_tokens: int = 0,
    excluded: Collection[str] = (),
    lost_digests: Mapping[int, str] | None = None,
) -> list[Span]:
    """Return the blocks of `span` that no candidate can run, as maximal spans in order; see `plan_route`."""
    rules = _Rules(span, kv_tokens, frozenset(excluded), lost_digests or {})
    return _gaps(span, [run for candidate in _by_id(candidates) for run in rules.runs(candidate)])


def conflicting_holders(servers: Iterable[ServerInfo], *, blocks: Iterable[int] | None = None) -> list[Conflict]:
    """Return the pairs of servers that hold different weights for one block of one model, by block.

    Each server is compared with the first holder of each digest, and a pair is listed once, for its first
    block. Servers that state no digest for a block agree with everybody.

    Args:
        servers: Any servers, of one model or more.
        blocks: Look at these blocks only; None for all.
    """
    pairs: dict[tuple[str, str], Conflict] = {}
    firsts: dict[tuple[str, int], list[ServerInfo]] = {}
    wanted = None if blocks is None else frozenset(blocks)
    for server in sorted(servers, key=lambda server: server.server_id):
        for block in range(server.span.start, server.span.end):
            if digest_of(server, block) and (wanted is None or block in wanted):
                _compare(server, block, firsts.setdefault((server.model_fingerprint, block), []), pairs)
    return sorted(pairs.values(), key=lambda found: (found.block, found.first.server_id, found.second.server_id))


def digest_of(server: ServerInfo, block: int) -> str:
    """Return the digest which a server states for a block, or "" if it states none or doesn't hold it."""
    index = block - server.span.start
    if block not in server.span or index >= len(server.block_digests):
        return ""
    return server.block_digests[index]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks that one server may run in this plan, and what a leg in it costs."""

    server: ServerInfo
    span: Span
    fixed_ns: int
    block_ns: int


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a server has to fulfil to be given a leg in this plan."""

    span: Span
    kv_tokens: int
    excluded: frozenset[str]
    lost_digests: Mapping[int, str]

    def runs(self, candidate: Candidate) -> Iterator[_Run]:
        """Yield what a candidate may run, in order."""
        server = candidate.server
        if self.objection(server):
            return
        fixed_ns, block_ns = self._fixed_ns(candidate), _nanoseconds(_block_step_s(candidate))
        for span in _spans(self.matching_blocks(server)):
            yield _Run(server, span, fixed_ns, block_ns)

    def objection(self, server: ServerInfo) -> str:
        """Return why a server can't have a leg, whatever the block; "" if it can."""
        if server.server_id in self.excluded:
            return "excluded after a failure"
        if server.state is not ServerState.SERVING:
            return f"it is {server.state.value}"
        if server.kv_capacity_tokens and not self._fits(server, server.kv_capacity_tokens):
            return f"its KV memory is {server.kv_capacity_tokens} tokens, {self.kv_tokens} are needed"
        return ""

    def matching_blocks(self, server: ServerInfo) -> list[int]:
        """Return the blocks in the span that a server holds with the weights wanted."""
        overlap = server.span.overlap(self.span)
        blocks = range(overlap.start, overlap.end) if overlap else range(0)
        return [block for block in blocks if self.matches(server, block)]

    def matches(self, server: ServerInfo, block: int) -> bool:
        """Whether a server's block has the digest wanted; any will do where none is known."""
        wanted = self.lost_digests.get(block, "")
        return not wanted or digest_of(server, block) == wanted

    def _fixed_ns(self, candidate: Candidate) -> int:
        rtt_s = DEFAULT_RTT_S if candidate.rtt_s is None else candidate.rtt_s
        free = candidate.server.kv_free_tokens if candidate.free_kv_tokens is None else candidate.free_kv_tokens
        short = candidate.server.kv_capacity_tokens > 0 and not self._fits(candidate.server, free)
        return _nanoseconds(rtt_s) + round((HOP_OVERHEAD_S + KV_PENALTY_S * short) * _NANOSECONDS)

    def _fits(self, server: ServerInfo, whole_span_tokens: int) -> bool:
        """Whether memory for so many tokens over its whole span is enough over its part of the plan."""
        overlap = server.span.overlap(self.span)
        return overlap is None or self.kv_tokens * len(overlap) <= whole_span_tokens * len(server.span)


_Way = tuple[int, int, tuple[tuple[str, int], ...]]
"""A cover of the blocks so far: nanoseconds, number of legs, and (server id, first block) of each leg."""


def _cheapest(span: Span, runs: Sequence[_Run]) -> _Way:
    """Return the least cover of a span whose every block is in some run."""
    reached: _Way = (0, 0, ())
    on: dict[int, _Way] = {}
    for block in range(span.start, span.end):
        ways: dict[int, _Way] = {}
        for index, run in enumerate(runs):
            if run.span.start <= block < run.span.end:
                over = (
                    reached[0] + run.fixed_ns,
                    reached[1] + 1,
                    (*reached[2], (run.server.server_id, block)),
                )
                cost, legs, path = min(on[index], over) if index in on else over
                ways[index] = (cost + run.block_ns, legs, path)
        on, reached = ways, min(ways.values())
    return reached


def _legs(way: _Way, span: Span, servers: Mapping[str, ServerInfo]) -> tuple[Leg, ...]:
    starts = [first for _, first in way[2]]
    ends = [*starts[1:], span.end]
    return tuple(
        Leg(servers[server_id], Span(first, end)) for (server_id, first), end in zip(way[2], ends, strict=True)
    )


def _by_id(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in the order of their ids; of two with one id the later stands."""
    known = {candidate.server.server_id: candidate for candidate in candidates}
    return [known[server_id] for server_id in sorted(known)]


def _nanoseconds(seconds: float) -> int:
    usable = math.isfinite(seconds) and 0 <= seconds <= MAX_TIME_S
    return round((seconds if usable else MAX_TIME_S) * _NANOSECONDS)


def _block_step_s(candidate: Candidate) -> float:
    if candidate.block_step_s is not None:
        return candidate.block_step_s
    return candidate.server.block_step_s or DEFAULT_BLOCK_STEP_S


def _spans(blocks: Sequence[int]) -> list[Span]:
    """Return ascending blocks as maximal spans."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1].end == block:
            spans[-1] = Span(spans[-1].start, block + 1)
        else:
            spans.append(Span(block, block + 1))
    return spans


def _gaps(span: Span, runs: Sequence[_Run]) -> list[Span]:
    covered = {block for run in runs for block in range(run.span.start, run.span.end)}
    return _spans([block for block in range(span.start, span.end) if block not in covered])


def _compare(server: ServerInfo, block: int, firsts: list[ServerInfo], pairs: dict[tuple[str, str], Conflict]) -> None:
    """Set one holder of a block against the first holder of each other digest."""
    others = [other for other in firsts if digest_of(other, block) != digest_of(server, block)]
    for other in others:
        pairs.setdefault((other.server_id, server.server_id), Conflict(block, other, server))
    if len(others) == len(firsts):
        firsts.append(server)


def _refuse_conflicts(rules: _Rules, candidates: Sequence[Candidate]) -> None:
    """Raise if serving holders of a block in the span disagree, and nothing says who is right."""
    serving = [c.server for c in candidates if c.server.state is ServerState.SERVING]
    unknown = [b for b in range(rules.span.start, rules.span.end) if not rules.lost_digests.get(b)]
    found = conflicting_holders(serving, blocks=unknown)
    if found:
        raise NoRouteError(
            f"servers hold different weights under one model fingerprint: {_listed(map(str, found))}; "
            "stop the ones that are wrong",
            reason="CONFLICTING_WEIGHTS",
        )


def _no_route(rules: _Rules, candidates: Sequence[Candidate], missing: Sequence[Span]) -> str:
    """Return the message for blocks without a usable holder."""
    blocks = ", ".join(str(span) for span in missing)
    reasons = [_refusal(rules, c.server, missing) for c in _by_id(candidates)]
    listed = _listed(reason for reason in reasons if reason)
    return f"no server for blocks {blocks} of {rules.span}" + (f"; {listed}" if listed else "")


def _refusal(rules: _Rules, server: ServerInfo, missing: Sequence[Span]) -> str:
    """Return what stood against a holder of missing blocks, or "" if it holds none of them."""
    held = [overlap for span in missing if (overlap := server.span.overlap(span))]
    if not held:
        return ""
    objection = rules.objection(server)
    return f"not {server}: {objection or _other_weights(rules, server, held[0].start)}"


def _other_weights(rules: _Rules, server: ServerInfo, block: int) -> str:
    theirs = digest_of(server, block)[:DIGEST_CHARS] or "unknown"
    wanted = rules.lost_digests[block][:DIGEST_CHARS]
    return f"its weights of block {block} are {theirs}, wanted are {wanted}"


def _listed(items: Iterable[str]) -> str:
    """Join the first items, and say how many more there are."""
    texts = list(items)
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return "; ".join(texts[:MAX_LISTED] + more)
