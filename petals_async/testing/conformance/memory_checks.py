"""Rules 8 and 9: eviction and forks."""

from __future__ import annotations

import math
import secrets

from petals_async.core.messages import (
    SESSION_ID_BYTES,
    ForkSource,
    StepState,
)
from petals_async.errors import (
    ServerOverloadedError,
)
from petals_async.testing.conformance.target import (
    NotOfferedError,
    Target,
    equal,
    listed,
    need,
    require,
)
from petals_async.testing.conformance.wire import Bench, Model, old_order_wanted, open_bench, progress_until, two_rows

# -- rule 8: eviction


@listed
async def check_evicted(target: Target) -> None:
    """Rule 8: an evicted session's next step is EVICTED with position 0, under the same id; a replay mends it."""
    evict = need(target.evict, "evict")
    async with open_bench(target) as bench, bench.session() as wire:
        first = wire.states(3)
        await wire.step(0, first)
        await wire.step(3, wire.states(1))
        require(await evict(wire.session_id), "a session without a step in flight can be evicted")
        found = await bench.find(wire.session_id)
        require(found is not None and (found.position, found.kv_bytes) == (0, 0), f"it is listed as {found}")
        wire.model.truncate(0)
        await wire.post(3, 4, wire.states(1, at=4))
        await wire.refusal(3, "EVICTED")
        await wire.step(0, first)
        await wire.step(3, wire.states(1, salt=1))


@listed
async def check_resume_after_eviction(target: Target) -> None:
    """Rule 8: a resume of an evicted session opens at 0, with the next id as it was."""
    evict = need(target.evict, "evict")
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        require(await evict(wire.session_id), "a session without a stream can be evicted")
        wire.model.truncate(0)
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(2, salt=1))


@listed
async def check_no_eviction_under_a_step(target: Target) -> None:
    """Rule 8: the pages of a session with an accepted, unanswered step are never taken."""
    evict, hold = need(target.evict, "evict"), need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        hidden = wire.states(1)
        async with hold():
            await wire.post(2, 3, hidden)
            await progress_until(wire, 2, StepState.RUNNING)
            require(not await evict(wire.session_id), "a session with a step in flight must not be evicted")
        await wire.result(3, hidden)


def more_than_half(bench: Bench) -> tuple[int, int]:
    """Return rows and tokens of a session such that two don't fit into the KV memory."""
    info, limits = bench.info, bench.info.limits
    wanted = info.kv_capacity_tokens // 2 + 1
    tokens = min(wanted, limits.max_session_tokens)
    rows = math.ceil(wanted / tokens) if wanted > 1 else 0
    if not 0 < rows <= limits.max_batch_size or rows * tokens > info.kv_capacity_tokens:
        raise NotOfferedError(f"no session can take more than half of {info.kv_capacity_tokens} KV tokens")
    return rows, tokens


@listed
async def check_kv_exhausted(target: Target) -> None:
    """Rule 8: an opening that would need the pages under a step is KV_EXHAUSTED, and says when to try again."""
    hold = need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench:
        rows, tokens = more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            hidden = wire.states(1)
            async with hold():
                await wire.post(1, 0, hidden)
                await progress_until(wire, 1, StepState.RUNNING)
                error = await bench.refused_opening(
                    ServerOverloadedError, "KV_EXHAUSTED", batch_size=rows, max_tokens=tokens
                )
                require(error.retry_after_s > 0, "KV_EXHAUSTED must say when to try again")
            await wire.result(0, hidden)
            await wire.step(1, wire.states(1))


@listed
async def check_orphans_are_evicted_first(target: Target) -> None:
    """Rules 5 and 8: a session without a stream is first in line: a new one gets its memory at once."""
    async with open_bench(target) as bench:
        rows, tokens = more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            await wire.step(0, wire.states(2))
        await bench.until_left(wire.session_id)
        async with bench.session(batch_size=rows, max_tokens=tokens) as other:
            await other.step(0, other.states(1))
            await other.goodbye()
        wire.model.truncate(0)
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(2, salt=1))


# -- rule 9: fork


@listed
async def check_fork(target: Target) -> None:
    """Rule 9: a fork begins with the source's first tokens; what either does later doesn't touch the other."""
    async with open_bench(target) as bench, bench.session() as source:
        await source.step(0, source.states(4))
        await source.step(4, source.states(1))
        for asked, shared in ((3, 3), (5, 5), (9, 5), (0, 0)):
            opening = bench.opening(fork=ForkSource(source.session_id, asked))
            async with bench.stream(opening, Model(list(source.model.chunks))) as fork:
                fork.model.truncate(shared)
                opened = await fork.open()
                equal((opened.position, opened.next_step_id), (shared, 1), f"a fork at {asked} of 5 tokens")
                await fork.step(shared, fork.states(1, salt=3))
                await source.step(5, source.states(1, at=5, salt=asked))
                await source.step(5, None)
                await fork.step(shared + 1, fork.states(2, salt=4))
                await fork.step(max(shared - 1, 0), fork.states(1, at=max(shared - 1, 0), salt=5))
        await source.step(5, source.states(1))


@listed
async def check_fork_outlives_its_source(target: Target) -> None:
    """Rule 9: closing or truncating the source takes nothing from the fork."""
    async with open_bench(target) as bench, bench.session() as source:
        await source.step(0, source.states(4))
        opening = bench.opening(fork=ForkSource(source.session_id, 4))
        async with bench.stream(opening, Model(list(source.model.chunks))) as fork:
            await fork.open()
            await source.step(1, source.states(2, at=1, salt=6))
            await fork.step(4, fork.states(1))
            await source.goodbye()
            await fork.step(5, fork.states(1))


@listed
async def check_fork_without_a_source(target: Target) -> None:
    """Rule 9: a source that isn't held, or holds other rows, opens at 0, which is no error."""
    async with open_bench(target) as bench:
        async with bench.session(fork=ForkSource(secrets.token_bytes(SESSION_ID_BYTES), 4)) as wire:
            await wire.step(0, wire.states(2))
        async with bench.session() as source:
            await source.step(0, source.states(3))
            fork = ForkSource(source.session_id, 3)
            async with bench.session(fork=fork, batch_size=two_rows(bench)) as wire:
                await wire.step(0, wire.states(2))


@listed
async def check_fork_of_permuted_rows(target: Target) -> None:
    """Rules 4 and 9: a fork above a permutation has it; one at or below can't have the old order, and begins at 0."""
    async with open_bench(target) as bench, bench.session(batch_size=two_rows(bench)) as source:
        await source.step(0, source.states(3))
        before = source.model.copy()
        await source.step(3, source.states(2), rows=(1, 1))
        for asked in (5, 4):
            opening = bench.opening(fork=ForkSource(source.session_id, asked), batch_size=2)
            async with bench.stream(opening, Model(list(source.model.chunks))) as fork:
                fork.model.truncate(asked)
                equal((await fork.open()).position, asked, "a fork above the permutation")
                await fork.step(asked, fork.states(1, salt=1))
                await old_order_wanted(fork, 3, before.copy())
        opening = bench.opening(fork=ForkSource(source.session_id, 3), batch_size=2)
        async with bench.stream(opening, before.copy()) as fork:
            opened = await fork.open()
            require(opened.position in (0, 3), f"a fork at the permutation begins at 0 or 3, got {opened.position}")
            fork.model = Model(list(before.chunks))
            fork.model.truncate(opened.position)
            await fork.step(opened.position, fork.states(1, salt=1))
