"""Rules 5 to 7: closing, cancelling, resume."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio

from petals_async.core.messages import (
    SESSION_ID_BYTES,
    Opened,
    StepState,
)
from petals_async.errors import (
    PeerError,
    RequestError,
)
from petals_async.testing.conformance.target import (
    LIMIT_S,
    POLL_S,
    ConformanceError,
    Target,
    equal,
    listed,
    need,
    require,
)
from petals_async.testing.conformance.wire import Model, Wire, open_bench, progress_until

# -- rule 5: closing


@listed
async def check_close_frees_at_once(target: Target) -> None:
    """Rule 5: `close` frees the session, ends the stream, and leaves nothing to resume."""
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
            await wire.goodbye()
            require(await bench.find(wire.session_id) is None, "a closed session is still listed")
        wire.model = Model()
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(1))


@listed
async def check_lease_keeps_the_session(target: Target) -> None:
    """Rule 5: a stream that ends without `close` keeps the KV, to be taken up by a resume."""
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
            found = await bench.find(wire.session_id)
            require(found is not None and found.connected, "a resumed session is connected")


@listed
async def check_lease_runs_out(target: Target) -> None:
    """Rule 5: when the lease is over the session is freed; a resume in time ends it."""
    advance = need(target.advance, "advance")
    async with open_bench(target) as bench:
        async with bench.stream(bench.opening()) as wire:
            lease_s = (await wire.open()).lease_s
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        await advance(0.6 * lease_s)
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
            await advance(1.2 * lease_s)
            await again.step(4, again.states(1))
        await bench.until_left(wire.session_id)
        await advance(0.6 * lease_s)
        require(await bench.find(wire.session_id) is not None, "a resume must begin a new lease")
        await advance(0.6 * lease_s)
        await bench.until_gone(wire.session_id, "the lease is over")


@listed
async def check_session_without_a_step_is_freed(target: Target) -> None:
    """Rule 5: a session that never completed a step is freed as soon as its stream ends."""
    async with open_bench(target) as bench:
        async with bench.session() as silent:
            pass
        async with bench.session() as refused:
            await refused.post(1, 3, refused.states(1))
            await refused.refusal(1, "OFFSET_GAP")
        for wire in (silent, refused):
            await bench.until_gone(wire.session_id, "it never completed a step")


@listed
async def check_close_session(target: Target) -> None:
    """Rule 5: CloseSession frees by id, with or without a stream; an unknown id is no error."""
    async with open_bench(target) as bench:
        await bench.channel.close_session(secrets.token_bytes(SESSION_ID_BYTES))
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
            await bench.channel.close_session(wire.session_id)
            require(await bench.find(wire.session_id) is None, "CloseSession must free the session")
            await wire.over(PeerError)
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
        await bench.until_left(wire.session_id)
        await bench.channel.close_session(wire.session_id)
        require(await bench.find(wire.session_id) is None, "CloseSession must free the session")
        await bench.channel.close_session(wire.session_id)


# -- rule 6: cancelling at the client, as the server sees it


@listed
async def check_stream_lost_while_computing(target: Target) -> None:
    """Rule 6: a step that was running when the stream was lost ends; its reply is kept for the resume."""
    hold = need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench, AsyncExitStack() as held:
        async with bench.session() as wire:
            first, second = wire.states(2), wire.states(1, at=2)
            await wire.step(0, first)
            await held.enter_async_context(hold())
            await wire.post(2, 2, second)
            await progress_until(wire, 2, StepState.RUNNING)
        await held.aclose()
        wire.model.run(2, second, ())
        async with bench.resumed(wire) as again:
            again.model.chunks.pop()
            again.model.next_step_id = 2
            await again.step(2, second)
            await again.step(3, again.states(1))


# -- rule 7: resume


@listed
async def check_resume_supersedes(target: Target) -> None:
    """Rule 7: a resume ends the old stream as SUPERSEDED, and states position and next id."""
    async with open_bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(3))
        async with bench.resumed(old) as again:
            error = await old.over(PeerError)
            equal(error.reason, "SUPERSEDED", "how the old stream ends")
            await again.step(3, again.states(1))
            async with bench.resumed(again) as third:
                await third.step(4, third.states(1))


@listed
async def check_resume_before_any_step(target: Target) -> None:
    """Rule 7: a session without a step is taken up as well, while its stream is there."""
    async with open_bench(target) as bench, bench.session() as old, bench.resumed(old) as again:
        equal((await old.over(PeerError)).reason, "SUPERSEDED", "how the old stream ends")
        await again.step(0, again.states(1))
        found = await bench.find(again.session_id)
        require(found is not None and found.connected and found.position == 1, f"it is listed as {found}")


@listed
async def check_resume_waits_for_the_running_step(target: Target) -> None:
    """Rule 7: a running step finishes, then `opened` states what is held; steps queued behind it are dropped."""
    hold = need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        second = old.states(1, at=2)
        resume = replace(old.opening, resume=True)
        async with AsyncExitStack() as held, bench.stream(resume, old.model.copy()) as again:
            await held.enter_async_context(hold())
            await old.post(2, 2, second)
            await old.post(3, 3, old.states(1, at=3))
            await progress_until(old, 2, StepState.RUNNING)
            await again.stream.send(resume)
            await _until_superseded(old)
            await held.aclose()
            opened = await again.receive()
            if not isinstance(opened, Opened):
                raise ConformanceError(f"`open` must be answered with `opened`, got {opened}")
            equal((opened.position, opened.next_step_id), (3, 3), "position and next id after the running step")
            again.model.run(2, second, ())
            await again.step(3, again.states(1, salt=3))


async def _until_superseded(old: Wire) -> None:
    """Give a resume time to arrive, while the running step is held: the listing shows that it has."""
    with anyio.move_on_after(0.5):
        while (found := await old.bench.find(old.session_id)) is not None and found.connected:  # noqa: ASYNC110
            await anyio.sleep(POLL_S)


@listed
async def check_two_resumes_at_once(target: Target) -> None:
    """Rule 7: of two streams that resume one session at the same time one is superseded by the other."""
    async with open_bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        resume = replace(old.opening, resume=True)
        async with bench.stream(resume) as one, bench.stream(resume) as other:
            await one.stream.send(resume)
            await other.stream.send(resume)
            reasons = await _first_to_end(one, other)
            equal(reasons, ["SUPERSEDED"], "how one of the two streams ends")
        async with bench.resumed(old) as again:
            await again.step(2, again.states(1))


async def _first_to_end(*wires: Wire) -> list[str]:
    """Read several streams until one is over; returns the reasons of those that are. The others are lost by it."""
    reasons: list[str] = []
    over = anyio.Event()

    async def read(wire: Wire) -> None:
        reasons.append((await wire.over(PeerError)).reason)
        over.set()

    with anyio.move_on_after(LIMIT_S / 2):
        async with anyio.create_task_group() as tasks:
            for wire in wires:
                tasks.start_soon(read, wire)
            await over.wait()
            tasks.cancel_scope.cancel()
    return reasons


@listed
async def check_resume_of_an_unknown_session(target: Target) -> None:
    """Rule 7: a resume of a session that isn't held opens a new one at 0."""
    async with open_bench(target) as bench, bench.session(resume=True) as wire:
        await wire.step(0, wire.states(2))


@listed
async def check_resume_cannot_change_the_session(target: Target) -> None:
    """Rule 7: a resume for another size is the client's fault, and leaves the old stream alone."""
    async with open_bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        async with bench.stream(replace(old.opening, resume=True, max_tokens=old.opening.max_tokens - 1)) as wire:
            await wire.stream.send(wire.opening)
            await wire.over(RequestError)
        await old.step(2, old.states(1))
