"""Rules 10 and 11: signs of life, and steps that fail in computing."""

from __future__ import annotations

import math

import anyio

from petals_async.core.hidden import ITEM_BYTES, HiddenStates
from petals_async.core.messages import (
    Part,
    StepState,
)
from petals_async.testing.conformance.target import (
    Target,
    equal,
    listed,
    need,
    pack,
    require,
)
from petals_async.testing.conformance.wire import open_bench, progress_until, two_rows

# -- rule 10: signs of life


@listed
async def check_progress_while_computing(target: Target) -> None:
    """Rule 10: each step without an answer gives a sign of life every interval: RUNNING, and QUEUED behind it."""
    hold = need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench, bench.stream(bench.opening()) as wire:
        interval_s = (await wire.open()).progress_interval_s
        first, second = wire.states(1), wire.states(1, at=1)
        async with hold():
            await wire.post(1, 0, first)
            await wire.post(2, 1, second)
            await progress_until(wire, 1, StepState.RUNNING)
            await progress_until(wire, 2, StepState.QUEUED)
            for _ in range(2):
                with anyio.fail_after(3 * interval_s):
                    await progress_until(wire, 1, StepState.RUNNING)
        await wire.result(0, first)
        await wire.result(1, second)
        require({sign.step_id for sign in wire.progress} == {1, 2}, f"signs of other steps: {wire.progress}")


@listed
async def check_progress_while_receiving(target: Target) -> None:
    """Rule 10: a step whose parts are still arriving is RECEIVING, and says how many tokens are there."""
    async with open_bench(target) as bench, bench.session() as wire:
        hidden = wire.states(4)
        half = hidden.num_bytes // 2
        await wire.post(1, 0, hidden, parts=[Part(0, hidden.data[:half])])
        sign = await progress_until(wire, 1, StepState.RECEIVING)
        while sign.tokens_done < 2:
            sign = await progress_until(wire, 1, StepState.RECEIVING)
        equal(sign.tokens_done, 2, "tokens received of 4, after half of the bytes")
        await wire.stream.send(Part(half, hidden.data[half:]))
        await wire.result(0, hidden)


# -- rule 11: steps that fail in computing


@listed
async def check_compute_failed(target: Target) -> None:
    """Rule 11: a step that fails in computing is COMPUTE_FAILED with the position as before, and may be sent again."""
    fail = need(target.fail_next_compute, "fail_next_compute")
    async with open_bench(target) as bench, bench.session() as wire:
        fail()
        await wire.post(1, 0, wire.states(2))
        await wire.refusal(1, "COMPUTE_FAILED")
        await wire.step(0, wire.states(3))
        for offset in (3, 1):
            fail()
            await wire.post(2, offset, wire.states(2, at=offset, salt=1))
            await wire.refusal(2, "COMPUTE_FAILED")
        await wire.step(3, wire.states(1))


@listed
async def check_compute_failed_with_rows(target: Target) -> None:
    """Rule 11: a permutation of a step that failed is put back as well."""
    fail = need(target.fail_next_compute, "fail_next_compute")
    async with open_bench(target) as bench, bench.session(batch_size=two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        fail()
        await wire.post(2, 2, wire.states(1, at=2), rows=(1, 1))
        await wire.refusal(2, "COMPUTE_FAILED")
        await wire.step(3, wire.states(1))
        await wire.step(2, wire.states(1, at=2, salt=1))


@listed
async def check_all_behind_a_failed_step_is_refused(target: Target) -> None:
    """Rules 1 and 11: what was in flight behind a failed step is OUT_OF_ORDER."""
    fail = need(target.fail_next_compute, "fail_next_compute")
    async with open_bench(target) as bench, bench.session() as wire:
        fail()
        await wire.post(1, 0, wire.states(1))
        await wire.post(2, 1, wire.states(1, at=1))
        await wire.refusal(1, "COMPUTE_FAILED")
        await wire.refusal(2, "OUT_OF_ORDER")
        await wire.step(0, wire.states(1))


@listed
async def check_not_a_number(target: Target) -> None:
    """Rule 11: inputs that aren't finite are refused, and nothing of them stays in the cache."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        sound = wire.states(1)
        size = ITEM_BYTES[sound.dtype]
        for number in (math.nan, math.inf, -math.inf):
            data = sound.data[:-size] + pack(sound.dtype, [number])
            await wire.post(2, 2, HiddenStates(sound.dtype, sound.shape, data))
            await wire.refusal(2, "NON_FINITE", "NON_FINITE_INPUT", "COMPUTE_FAILED")
        await wire.step(2, sound)
