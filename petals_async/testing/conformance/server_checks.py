"""Who the server is, what it holds, and how sessions open."""

from __future__ import annotations

import secrets

from petals_async.core.hidden import ITEM_BYTES
from petals_async.core.messages import (
    SESSION_ID_BYTES,
    CloseSession,
    Part,
    Step,
)
from petals_async.core.server_info import ServerState
from petals_async.core.span import Span
from petals_async.errors import (
    LengthExceededError,
    RequestError,
)
from petals_async.testing.conformance.target import (
    ConformanceError,
    NotOfferedError,
    Target,
    equal,
    listed,
    require,
)
from petals_async.testing.conformance.wire import handle_of, open_bench

# -- who the server is, and what it holds


@listed
async def check_server_info(target: Target) -> None:
    """GetServerInfo: what it says of itself is sound."""
    async with open_bench(target) as bench:
        info = bench.info
        require(bool(info.server_id and info.model_fingerprint), f"id and fingerprint must be given: {info}")
        require(info.span in Span(0, info.num_blocks), f"blocks {info.span} of {info.num_blocks}")
        require(info.dtype in ITEM_BYTES and info.hidden_size > 0, f"states of {info.hidden_size} x {info.dtype}")
        require(len(info.block_digests) in (0, len(info.span)), "one digest for each block, or none")
        limits = info.limits
        bounds = (limits.max_step_tokens, limits.max_session_tokens, limits.max_batch_size, limits.max_in_flight_steps)
        require(min(bounds) >= 1, f"every limit is at least 1: {limits}")
        equal(info.state, ServerState.SERVING, "the state of a server that takes sessions")
        require(0 <= info.kv_free_tokens <= info.kv_capacity_tokens, f"{info.kv_free_tokens} KV tokens free")


@listed
async def check_free_kv(target: Target) -> None:
    """GetServerInfo: an open session takes KV memory, and gives it back when it is closed."""
    async with open_bench(target) as bench:
        if not bench.info.kv_capacity_tokens:
            raise NotOfferedError("the server doesn't state its KV capacity")
        free = bench.info.kv_free_tokens
        async with bench.session() as wire:
            info = await bench.channel.get_server_info()
            equal(free - info.kv_free_tokens, wire.opening.max_tokens, "KV tokens that a session takes")
            await wire.goodbye()
        equal((await bench.channel.get_server_info()).kv_free_tokens, free, "free KV tokens after closing")


@listed
async def check_listing(target: Target) -> None:
    """ListSessions: shows what is held under a handle made from the id, and never the id."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        listed = await bench.channel.list_sessions()
        found = next((session for session in listed if session.handle == handle_of(wire.session_id)), None)
        if found is None:
            raise ConformanceError(f"the session isn't listed under {handle_of(wire.session_id)}: {listed}")
        stated = (found.span, found.batch_size, found.position, found.max_tokens, found.connected)
        equal(stated, (bench.info.span, 1, 3, wire.opening.max_tokens, True), "the session as it is listed")
        require(found.kv_bytes > 0, f"KV memory in bytes: {found.kv_bytes}")
        require(found.age_s >= found.idle_s >= 0, f"age {found.age_s} s, idle {found.idle_s} s")
        for secret in (wire.session_id.hex(), repr(wire.session_id), str(int.from_bytes(wire.session_id))):
            require(secret not in repr(listed), "a listing must not hold a session's id")


@listed
async def check_listing_is_oldest_first(target: Target) -> None:
    """ListSessions: the oldest session comes first."""
    async with open_bench(target) as bench, bench.session() as first, bench.session() as second:
        handles = [session.handle for session in await bench.channel.list_sessions()]
        mine = [handle for handle in handles if handle in (handle_of(first.session_id), handle_of(second.session_id))]
        equal(mine, [handle_of(first.session_id), handle_of(second.session_id)], "the order of the listing")


# -- opening


@listed
async def check_opened(target: Target) -> None:
    """Opening: a new session begins at 0 with step id 1, and states its lease and progress interval."""
    async with open_bench(target) as bench, bench.stream(bench.opening()) as wire:
        opened = await wire.open()
        equal((opened.position, opened.next_step_id), (0, 1), "a new session's position and next id")
        require(opened.lease_s > 0 and opened.progress_interval_s > 0, f"lease and interval are positive: {opened}")


@listed
async def check_wrong_model(target: Target) -> None:
    """Opening: another model's fingerprint is refused as WRONG_MODEL."""
    async with open_bench(target) as bench:
        for fingerprint in ("0" * 64, "", bench.info.model_fingerprint + "0"):
            await bench.refused_opening(RequestError, "WRONG_MODEL", model_fingerprint=fingerprint)


@listed
async def check_span_outside(target: Target) -> None:
    """Opening: blocks that aren't all held are refused as BAD_SPAN, and the message names those that are."""
    async with open_bench(target) as bench:
        span = bench.info.span
        for asked in (Span(span.start, span.end + 1), Span(span.end, span.end + 1), Span(span.end + 5, span.end + 9)):
            await bench.refused_opening(RequestError, "BAD_SPAN", said=str(span), span=asked)
        if span.start:
            await bench.refused_opening(RequestError, "BAD_SPAN", said=str(span), span=Span(span.start - 1, span.end))


@listed
async def check_part_of_the_span(target: Target) -> None:
    """Opening: any blocks inside the server's span may be asked for, and only those are run."""
    async with open_bench(target) as bench:
        held = bench.info.span
        for span in {Span(held.start, held.start + 1), Span(held.end - 1, held.end)}:
            async with bench.session(span=span) as wire:
                await wire.step(0, wire.states(2))
                await wire.step(2, wire.states(1))


@listed
async def check_bad_session_ids(target: Target) -> None:
    """Opening: a session id is 16 bytes."""
    async with open_bench(target) as bench:
        for size in (0, SESSION_ID_BYTES - 1, SESSION_ID_BYTES + 1):
            await bench.refused_opening(
                RequestError, "BAD_REQUEST", said=str(SESSION_ID_BYTES), session_id=secrets.token_bytes(size)
            )


@listed
async def check_unknown_adapter(target: Target) -> None:
    """Opening: an adapter that isn't there is refused as BAD_ADAPTER."""
    async with open_bench(target) as bench:
        await bench.refused_opening(RequestError, "BAD_ADAPTER", said="no-such-adapter", adapter="no-such-adapter")


@listed
async def check_wrong_wire_dtype(target: Target) -> None:
    """Opening: another type of hidden states is refused as BAD_DTYPE, and the message names the right one."""
    async with open_bench(target) as bench:
        for dtype in sorted({*ITEM_BYTES, "int8"} - {bench.info.dtype}):
            await bench.refused_opening(RequestError, "BAD_DTYPE", said=bench.info.dtype, wire_dtype=dtype)


@listed
async def check_opening_limits(target: Target) -> None:
    """Opening: too many rows or tokens, or none, are refused, and the message names the limit."""
    async with open_bench(target) as bench:
        rows, tokens = bench.info.limits.max_batch_size, bench.info.limits.max_session_tokens
        for asked in (-1, 0, rows + 1):
            await bench.refused_opening(RequestError, "BAD_SHAPE", said=str(rows), batch_size=asked)
        for asked in (-1, 0, tokens + 1):
            await bench.refused_opening(LengthExceededError, "LENGTH_EXCEEDED", said=str(tokens), max_tokens=asked)


@listed
async def check_a_stream_begins_with_open(target: Target) -> None:
    """Opening: any other first message ends the stream with the client's fault."""
    async with open_bench(target) as bench:
        for message in (CloseSession(), Part(0, b"1234"), Step(1, 0, 0)):
            async with bench.stream(bench.opening()) as wire:
                await wire.stream.send(message)
                await wire.over(RequestError)


@listed
async def check_one_open_a_stream(target: Target) -> None:
    """Opening: a second `open` on one stream ends it with the client's fault."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.stream.send(bench.opening())
        await wire.over(RequestError)
