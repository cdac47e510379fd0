"""Rules 1 to 4: step ids, offsets, the same id again, row permutations."""

from __future__ import annotations

from petals_async.core.hidden import HiddenStates
from petals_async.testing.conformance.target import (
    NotOfferedError,
    Target,
    equal,
    listed,
    need,
    require,
)
from petals_async.testing.conformance.wire import old_order_wanted, open_bench, two_rows

# -- rule 1: step ids


@listed
async def check_steps_in_order(target: Target) -> None:
    """Rule 1: steps 1, 2, 3 run, each appended at the position, and give their outputs."""
    async with open_bench(target) as bench, bench.session() as wire:
        for num_tokens in (4, 1, 2, 1):
            await wire.step(wire.model.position, wire.states(num_tokens))


@listed
async def check_sessions_do_not_mix(target: Target) -> None:
    """Rule 1: sessions have their own ids, positions and tokens, however their steps interleave."""
    async with open_bench(target) as bench, bench.session() as first, bench.session() as second:
        for number in range(3):
            await first.step(first.model.position, first.states(2, salt=1))
            await second.step(second.model.position, second.states(1 + number, salt=2))


@listed
async def check_only_the_next_id_runs(target: Target) -> None:
    """Rule 1: a higher id is OUT_OF_ORDER, a lower one that was never a step is STALE_STEP; neither advances."""
    async with open_bench(target) as bench, bench.session() as wire:
        for step_id in (2, 3, 2**40):
            await wire.post(step_id, 0, wire.states(2))
            await wire.refusal(step_id, "OUT_OF_ORDER")
        for step_id in (0, -1):
            await wire.post(step_id, 0, wire.states(2))
            await wire.refusal(step_id, "STALE_STEP")
        await wire.step(0, wire.states(2))


@listed
async def check_all_behind_a_refusal_is_refused(target: Target) -> None:
    """Rule 1: steps in flight behind a refused one are refused, and the stated id at the stated position runs."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        in_flight = min(3, bench.info.limits.max_in_flight_steps)
        for number in range(in_flight):
            await wire.post(2 + number, 5 + number, wire.states(1, at=5 + number))
        await wire.refusal(2, "OFFSET_GAP")
        for number in range(1, in_flight):
            await wire.refusal(2 + number, "OUT_OF_ORDER")
        await wire.step(2, wire.states(1))


@listed
async def check_steps_in_flight(target: Target) -> None:
    """Rule 1: `max_in_flight_steps` may be sent before the first answer; answers come in their order."""
    async with open_bench(target) as bench, bench.session() as wire:
        count = min(bench.info.limits.max_in_flight_steps, wire.opening.max_tokens)
        sent = [wire.states(1, at=offset) for offset in range(count)]
        for offset, hidden in enumerate(sent):
            await wire.post(1 + offset, offset, hidden)
        for offset, hidden in enumerate(sent):
            await wire.result(offset, hidden)


@listed
async def check_too_many_in_flight(target: Target) -> None:
    """Rule 1: one more than `max_in_flight_steps` is refused QUEUE_FULL; those before it run."""
    hold = need(target.hold_compute, "hold_compute")
    async with open_bench(target) as bench, bench.session() as wire:
        count = bench.info.limits.max_in_flight_steps
        sent = [wire.states(1, at=offset) for offset in range(count + 1)]
        async with hold():
            for offset, hidden in enumerate(sent):
                await wire.post(1 + offset, offset, hidden)
            refused = await wire.refusal(1 + count, "QUEUE_FULL")
            require(str(count) in refused.message, f"the message must name {count}: {refused.message}")
        for offset, hidden in enumerate(sent[:-1]):
            await wire.result(offset, hidden)
        await wire.step(count, sent[-1])


@listed
async def check_a_new_opening_counts_anew(target: Target) -> None:
    """Rule 1: an `open` that is no resume begins a new incarnation, at 0 with id 1, under a held id as well."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        async with bench.session(session_id=wire.session_id) as again:
            await again.step(0, again.states(2, salt=5))


# -- rule 2: offsets


@listed
async def check_offset_gap(target: Target) -> None:
    """Rule 2: an offset above the position is OFFSET_GAP; a hole is never computed over."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.post(1, 1, wire.states(1, at=1))
        await wire.refusal(1, "OFFSET_GAP")
        await wire.step(0, wire.states(2))
        for offset in (3, wire.opening.max_tokens - 1):
            await wire.post(2, offset, wire.states(1, at=offset))
            await wire.refusal(2, "OFFSET_GAP")
        await wire.post(2, 3, None)
        await wire.refusal(2, "OFFSET_GAP")
        await wire.step(2, wire.states(1))


@listed
async def check_rollback(target: Target) -> None:
    """Rule 2: an offset below the position truncates to it, then appends; 0 begins again."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(5))
        await wire.step(5, wire.states(1))
        await wire.step(3, wire.states(2, at=3, salt=1))
        await wire.step(5, wire.states(1, salt=2))
        await wire.step(0, wire.states(3, at=0, salt=3))
        await wire.step(3, wire.states(1, salt=4))


@listed
async def check_truncation_only(target: Target) -> None:
    """Rule 2: a step of zero tokens only truncates."""
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(5))
        await wire.step(2, None)
        await wire.step(2, wire.states(1, salt=1))
        await wire.step(3, None)
        await wire.step(0, None)
        await wire.step(0, wire.states(1, salt=2))


@listed
async def check_wanted_outputs(target: Target) -> None:
    """The result holds the outputs that were wanted: all, the last m, or none; the tokens are held anyway."""
    async with open_bench(target) as bench, bench.session() as wire:
        for num_outputs in (None, 0, 1, 2, 3):
            await wire.step(wire.model.position, wire.states(3), num_outputs=num_outputs)
        for num_outputs in (-1, 4):
            await wire.post(6, 15, wire.states(3), num_outputs=num_outputs)
            await wire.refusal(6, "BAD_REQUEST")
        await wire.step(15, wire.states(1))


# -- rule 3: the same id again


@listed
async def check_same_id_again(target: Target) -> None:
    """Rule 3: the same id again gets the same reply, without computing, and nothing is appended twice."""
    async with open_bench(target) as bench, bench.session() as wire:
        first = await wire.step(0, wire.states(3))
        second = await wire.step(3, wire.states(1))
        computed = target.num_computed() if target.num_computed else 0
        for step_id, offset, reply in ((2, 3, second), (1, 0, first), (2, 3, second)):
            await wire.post(step_id, offset, wire.states(1, at=offset, salt=9))
            equal(await wire.answer(), reply, "the reply to an id that was run before")
        if target.num_computed:
            equal(target.num_computed(), computed, "steps computed after the same ids again")
        await wire.step(4, wire.states(1))


@listed
async def check_stale_step(target: Target) -> None:
    """Rule 3: the last `max_in_flight_steps` replies are kept; an older id is STALE_STEP."""
    async with open_bench(target) as bench, bench.session() as wire:
        kept = bench.info.limits.max_in_flight_steps
        if kept + 2 > wire.opening.max_tokens:
            raise NotOfferedError("sessions are too short for so many steps")
        replies = [await wire.step(offset, wire.states(1)) for offset in range(kept + 2)]
        for step_id in (1, 2):
            await wire.post(step_id, step_id - 1, wire.states(1, at=step_id - 1))
            await wire.refusal(step_id, "STALE_STEP")
        for step_id in (3, kept + 2):
            await wire.post(step_id, step_id - 1, wire.states(1, at=step_id - 1))
            equal(await wire.answer(), replies[step_id - 1], "a reply that is still kept")


@listed
async def check_kept_reply_after_a_resume(target: Target) -> None:
    """Rule 3: after a resume the kept replies are still there: a lost reply is had without computing."""
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            reply = await wire.step(0, wire.states(3))
        computed = target.num_computed() if target.num_computed else 0
        async with bench.resumed(wire) as again:
            await again.post(1, 0, again.states(3, at=0))
            equal(await again.answer(), reply, "the kept reply after a resume")
            if target.num_computed:
                equal(target.num_computed(), computed, "steps computed after the same id again")
            await again.step(3, again.states(1))


# -- rule 4: row permutations


@listed
async def check_row_permutations(target: Target) -> None:
    """Rule 4: `row_indices` names for each row the one it goes on from, before the append."""
    async with open_bench(target) as bench, bench.session(batch_size=two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        for rows in ((1, 0), (1, 1), (0, 1), (0, 0)):
            await wire.step(wire.model.position, wire.states(1), rows=rows)
        await wire.step(wire.model.position, wire.states(1))


@listed
async def check_rows_changed(target: Target) -> None:
    """Rule 4: a step at or before the last permutation is ROWS_CHANGED with position 0; above it all is well."""
    async with open_bench(target) as bench:
        for offset in (3, 2):
            async with bench.session(batch_size=two_rows(bench)) as wire:
                await wire.step(0, wire.states(3))
                before = wire.model.copy()
                await wire.step(3, wire.states(2), rows=(1, 0))
                await wire.step(5, wire.states(1))
                await wire.step(4, wire.states(2, at=4, salt=1))
                await old_order_wanted(wire, offset, before)
                await wire.step(0, wire.states(4, at=0, salt=2))
                await wire.step(2, wire.states(1, at=2, salt=3))


@listed
async def check_position_0_needs_no_old_rows(target: Target) -> None:
    """Rule 4: a step at offset 0 after a permutation runs: a replay sends rows already gathered."""
    async with open_bench(target) as bench, bench.session(batch_size=two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        await wire.step(3, wire.states(1), rows=(1, 1))
        gathered = HiddenStates.concat_tokens(wire.model.chunks)
        await wire.step(0, gathered)
        await wire.step(2, wire.states(1, at=2, salt=1))
