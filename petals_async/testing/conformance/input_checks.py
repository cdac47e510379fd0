"""What a server checks of a step, and what becomes of a draining one."""

from __future__ import annotations

import math

from petals_async.core.hidden import ITEM_BYTES, TensorSpec
from petals_async.core.messages import (
    MAX_INLINE_BYTES,
    Draining,
    Part,
    Step,
)
from petals_async.core.parts import travels_inline
from petals_async.core.server_info import ServerState
from petals_async.errors import (
    RequestError,
    ServerDrainingError,
)
from petals_async.testing.conformance.target import (
    NotOfferedError,
    Target,
    equal,
    listed,
    need,
    require,
)
from petals_async.testing.conformance.wire import Wire, open_bench, two_rows

# -- what is checked of a step


async def _refused_step(wire: Wire, step: Step, *reasons: str, said: str = "") -> None:
    await wire.stream.send(step)
    refused = await wire.refusal(step.step_id, *reasons)
    require(said in refused.message, f"the message must name {said!r}: {refused.message}")


@listed
async def check_wrong_shapes(target: Target) -> None:
    """A tensor of another shape is BAD_SHAPE, before any part of it is waited for."""
    async with open_bench(target) as bench, bench.session() as wire:
        width, dtype = bench.info.hidden_size, bench.info.dtype
        await wire.step(0, wire.states(2))
        for shape in (
            (1, 2, width + 1),
            (1, 2, width - 1),
            (2, 2, width),
            (1, 3, width),
            (1, 1, width),
            (2, width),
            (1, 1, 2, width),
            (),
            (-1, -2, width),
            (1, 2**31, width),
        ):
            spec = TensorSpec(dtype, shape)
            await _refused_step(wire, Step(2, 2, 2, spec, None), "BAD_SHAPE", said=str((1, 2, width)))
            await _refused_step(wire, Step(2, 2, 2, spec, b"\0" * 8), "BAD_SHAPE", said=str((1, 2, width)))
        await wire.step(2, wire.states(2))


@listed
async def check_missing_tensor(target: Target) -> None:
    """Tokens without a tensor, and a tensor without tokens, are BAD_SHAPE."""
    async with open_bench(target) as bench, bench.session() as wire:
        width, dtype = bench.info.hidden_size, bench.info.dtype
        await _refused_step(wire, Step(1, 0, 2), "BAD_SHAPE")
        await _refused_step(wire, Step(1, 0, 0, TensorSpec(dtype, (1, 0, width)), b""), "BAD_SHAPE")
        await _refused_step(wire, Step(1, 0, 0, TensorSpec(dtype, (1, 1, width)), None), "BAD_SHAPE")
        await wire.step(0, wire.states(1))


@listed
async def check_wrong_dtypes(target: Target) -> None:
    """A tensor of another type is BAD_DTYPE, and the message names the right one."""
    async with open_bench(target) as bench, bench.session() as wire:
        for dtype in sorted({*ITEM_BYTES, "int8"} - {bench.info.dtype}):
            spec = TensorSpec(dtype, (1, 1, bench.info.hidden_size))
            await _refused_step(wire, Step(1, 0, 1, spec, b"\0\0\0\0"), "BAD_DTYPE", said=bench.info.dtype)
        await wire.step(0, wire.states(1))


@listed
async def check_wrong_byte_length(target: Target) -> None:
    """Bytes that don't fit type and shape are BAD_SHAPE, and the message says how many were expected."""
    async with open_bench(target) as bench, bench.session() as wire:
        sound = wire.states(2)
        for data in (b"", sound.data[:-1], sound.data + b"\0", sound.data * 2):
            step = Step(1, 0, 2, sound.spec, data)
            await _refused_step(wire, step, "BAD_SHAPE", said=str(sound.num_bytes))
        await wire.step(0, sound)


@listed
async def check_bad_rows(target: Target) -> None:
    """`row_indices` of another number, or that name no row, are BAD_ROWS."""
    async with open_bench(target) as bench, bench.session(batch_size=two_rows(bench)) as wire:
        await wire.step(0, wire.states(2))
        hidden = wire.states(1)
        for rows in ((0,), (0, 1, 0), (0, 2), (-1, 0)):
            await wire.post(2, 2, hidden, rows=rows)
            await wire.refusal(2, "BAD_ROWS")
        await wire.step(2, hidden)


@listed
async def check_joined_chunks(target: Target) -> None:
    """A step of several chunks runs as one; `chunk_tokens` that don't sum up to its tokens are BAD_SHAPE."""
    async with open_bench(target) as bench, bench.session() as wire:
        hidden = wire.states(4)
        for chunks in ((1, 2), (4, 1), (5, -1), (4, 0)):
            step = Step(1, 0, 4, hidden.spec, hidden.data, chunk_tokens=chunks)
            await _refused_step(wire, step, "BAD_SHAPE", said="4")
        await wire.stream.send(Step(1, 0, 4, hidden.spec, hidden.data, chunk_tokens=(1, 2, 1)))
        await wire.result(0, hidden)
        await wire.step(4, wire.states(1))


@listed
async def check_too_many_tokens(target: Target) -> None:
    """A step beyond the step's or the session's limit is LENGTH_EXCEEDED, and the message names the limit."""
    async with open_bench(target) as bench, bench.session() as wire:
        limit, tokens = bench.info.limits.max_step_tokens, wire.opening.max_tokens
        spec = TensorSpec(bench.info.dtype, (1, limit + 1, bench.info.hidden_size))
        await _refused_step(wire, Step(1, 0, limit + 1, spec, None), "LENGTH_EXCEEDED", said=str(limit))
        filled = min(limit, tokens)
        while wire.model.position + filled <= tokens:
            await wire.step(wire.model.position, wire.states(filled), num_outputs=1)
        left = tokens - wire.model.position
        await wire.post(wire.model.next_step_id, wire.model.position, wire.states(left + 1))
        refused = await wire.refusal(wire.model.next_step_id, "LENGTH_EXCEEDED")
        require(str(tokens) in refused.message, f"the message must name {tokens}: {refused.message}")
        if left:
            await wire.step(wire.model.position, wire.states(left))
        await wire.step(tokens - 1, wire.states(1, at=tokens - 1, salt=1))


@listed
async def check_negative_numbers(target: Target) -> None:
    """A negative offset or number of tokens is BAD_REQUEST."""
    async with open_bench(target) as bench, bench.session() as wire:
        sound = wire.states(1)
        await wire.step(0, sound)
        await _refused_step(wire, Step(2, -1, 1, sound.spec, sound.data), "BAD_REQUEST")
        await _refused_step(wire, Step(2, 0, -1), "BAD_REQUEST")
        await _refused_step(wire, Step(2, -5, 0), "BAD_REQUEST")
        await wire.step(1, wire.states(1))


# -- parts


@listed
async def check_small_tensor_in_parts(target: Target) -> None:
    """A tensor without its bytes comes in parts of any size, `close` and nothing else between them."""
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            hidden = wire.states(3)
            pieces = [Part(start, hidden.data[start : start + 7]) for start in range(0, hidden.num_bytes, 7)]
            await wire.step(0, hidden, parts=pieces)
            await wire.step(3, wire.states(1))
            await wire.post(3, 4, wire.states(2), parts=[Part(0, b"\0")])
            await wire.goodbye()
        require(await bench.find(wire.session_id) is None, "`close` between parts must free the session")


@listed
async def check_large_tensors(target: Target) -> None:
    """Tensors above 256 KiB travel in parts, both ways, whole."""
    async with open_bench(target) as bench:
        limits = bench.info.limits
        per_token = bench.info.hidden_size * ITEM_BYTES[bench.info.dtype]
        tokens = min(limits.max_step_tokens, limits.max_session_tokens, math.ceil((MAX_INLINE_BYTES + 1) / per_token))
        rows = math.ceil((MAX_INLINE_BYTES + 1) / (per_token * tokens))
        if rows > limits.max_batch_size:
            raise NotOfferedError(f"no step of this server is larger than {MAX_INLINE_BYTES} bytes")
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            hidden = wire.states(tokens)
            require(not travels_inline(hidden.num_bytes), "the tensor is too small for this check")
            await wire.step(0, hidden)
            await wire.step(tokens - 1, wire.states(1, at=tokens - 1, salt=1))


@listed
async def check_parts_out_of_order(target: Target) -> None:
    """A part that doesn't follow, or is empty or too long, makes its step BAD_PART; the stream lives on."""
    async with open_bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        data, size = hidden.data, hidden.num_bytes
        for parts in (
            [Part(1, data[1:])],
            [Part(-1, data)],
            [Part(0, data[:4]), Part(8, data[8:])],
            [Part(0, data[:4]), Part(0, data[:4])],
            [Part(0, data[:8]), Part(4, data[4:])],
            [Part(0, data[:4]), Part(4, b"")],
            [Part(0, data + b"\0")],
            [Part(0, data[:4]), Part(4, data)],
            [Part(size, data)],
        ):
            await wire.post(1, 0, hidden, parts=parts)
            await wire.refusal(1, "BAD_PART")
        await wire.step(0, hidden)


@listed
async def check_parts_behind_a_refusal(target: Target) -> None:
    """Parts that were in flight when their step was refused are dropped, and disturb no other step."""
    async with open_bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        pieces = [Part(start, hidden.data[start : start + 4]) for start in range(0, hidden.num_bytes, 4)]
        await wire.post(1, 0, hidden, parts=[Part(4, b"\0"), *pieces])
        await wire.refusal(1, "BAD_PART")
        await wire.post(5, 0, hidden, parts=pieces)
        await wire.refusal(5, "OUT_OF_ORDER")
        wide = TensorSpec(hidden.dtype, (1, 2, bench.info.hidden_size + 1))
        await wire.stream.send(Step(1, 0, 2, wide, None))
        for piece in pieces:
            await wire.stream.send(piece)
        await wire.refusal(1, "BAD_SHAPE")
        await wire.step(0, hidden, parts=pieces)
        await wire.step(2, wire.states(1))


@listed
async def check_step_before_the_last_part(target: Target) -> None:
    """A step that comes before the last part of the one before makes that one BAD_PART, and is OUT_OF_ORDER."""
    async with open_bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        await wire.post(1, 0, hidden, parts=[Part(0, hidden.data[:4])])
        await wire.post(2, 2, wire.states(1, at=2))
        await wire.refusal(1, "BAD_PART")
        await wire.refusal(2, "OUT_OF_ORDER")
        await wire.step(0, hidden)


@listed
async def check_part_before_any_step(target: Target) -> None:
    """A part before any step ends the stream with BAD_PART."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.stream.send(Part(0, b"\0\0\0\0"))
        equal((await wire.over(RequestError)).reason, "BAD_PART", "how the stream ends")


# -- draining


@listed
async def check_draining(target: Target) -> None:
    """A draining server says so on every stream, goes on with sessions it has, and takes no new ones."""
    start_draining = need(target.start_draining, "start_draining")
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        await start_draining(30.0)
        message = await wire.receive()
        require(isinstance(message, Draining) and message.deadline_s > 0, f"`draining` must come, got {message}")
        equal((await bench.channel.get_server_info()).state, ServerState.DRAINING, "the state")
        await bench.refused_opening(ServerDrainingError, "DRAINING")
        await bench.refused_opening(ServerDrainingError, "DRAINING", resume=True)
        await wire.step(2, wire.states(1))
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
