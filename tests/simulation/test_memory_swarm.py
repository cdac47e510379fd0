"""The real client over the in-memory swarm: what happens when something goes wrong, and that nothing shows."""

from dataclasses import replace

import anyio
import pytest
from virtual import (
    EDGES,
    LEASE_S,
    NUM_BLOCKS,
    PROMPT,
    assert_all_free,
    cancelled_at,
    expected,
    feed,
    generate,
    roll_back_behind_a_permutation,
    roll_back_in_a_hole_that_two_fill,
    step_rows,
    with_spares,
)

from petals_async.core.hidden import HiddenStates
from petals_async.core.server_info import Limits
from petals_async.errors import LengthExceededError, NoRouteError, RequestError
from petals_async.testing.faults import Fault, FaultKind, FaultPlan, Moment
from petals_async.testing.swarm import MemorySwarm, NodeSpec, three_nodes
from petals_async.testing.toy import ToyEdges, toy_generate, toy_reference, toy_vectors


async def test_undisturbed_run_equals_reference():
    async with MemorySwarm(three_nodes()) as swarm:
        async with swarm.session() as session:
            assert await generate(session, PROMPT, 24) == expected(24)
            assert session.position == len(PROMPT) + 23
            assert [server.name for _, server in session.route] == ["a", "b", "c"]
            assert session.recoveries == []
            assert swarm.kv_in_use() > 0
        await assert_all_free(swarm)


async def test_long_input_is_cut_into_chunks_and_pipelined():
    prompt = [token % 64 for token in range(50)]
    async with MemorySwarm(three_nodes(step_s=0.1)) as swarm, swarm.session(chunk_tokens=5) as session:
        started_at = anyio.current_time()
        outputs = await feed(session, prompt)
        assert toy_vectors(outputs)[0] == toy_reference(prompt, NUM_BLOCKS)
        assert anyio.current_time() - started_at < 1.5  # 10 chunks on 3 servers: 1.2 s, not 3 s


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("at", [0, 1, 5, 23])
async def test_case_01_killed_span(name, at):
    async with MemorySwarm(with_spares()) as swarm:
        async with swarm.session() as session:
            victim = {server.name[0]: server.name for _, server in session.route}[name]
            tokens = await generate(session, PROMPT, 24, before=lambda i: swarm.kill(victim) if i == at else None)
            assert tokens == expected(24)
            assert len(session.recoveries) == 1
            recovery = session.recoveries[0]
            assert recovery.at == recovery.replayed_tokens == (0 if at == 0 else len(PROMPT) + at - 1)
            assert recovery.lost.startswith(victim)
        await assert_all_free(swarm)


async def test_survivors_get_new_tokens_only():
    async with MemorySwarm(with_spares()) as swarm, swarm.session() as session:
        first, victim, last = [server.name for _, server in session.route]
        await generate(session, PROMPT, 8, before=lambda i: swarm.kill(victim) if i == 6 else None)
        assert swarm.node(first).worker.num_tokens == swarm.node(last).worker.num_tokens == len(PROMPT) + 7
        spare = session.route[1][1].name
        assert swarm.node(spare).worker.num_tokens == len(PROMPT) + 7
        assert session.recoveries[0].replayed_tokens == len(PROMPT) + 5


async def test_stopped_server_is_lost_after_three_intervals():
    async with MemorySwarm(with_spares()) as swarm, swarm.session() as session:
        victim = session.route[1][1].name
        await generate(session, PROMPT, 3)
        swarm.pause(victim)
        started_at = anyio.current_time()
        await feed(session, [7])
        assert session.recoveries[0].reason == "SILENT"
        assert 1.5 <= anyio.current_time() - started_at <= 2.5
        swarm.resume(victim)
        await assert_position_and_outputs(session)


async def assert_position_and_outputs(session):
    """Start over within a session: what it gives is right from the first token on."""
    await session.rollback(0)
    assert await generate(session, PROMPT, 6) == expected(6)


async def test_black_holed_server_is_lost_after_three_intervals():
    async with MemorySwarm(with_spares()) as swarm:
        async with swarm.session() as session:
            victim = session.route[2][1].name
            await generate(session, PROMPT, 3)
            swarm.black_hole(victim)
            await feed(session, [7])
            assert session.recoveries[0].reason == "SILENT"
        swarm.reconnect(victim)
        await assert_all_free(swarm, after_s=LEASE_S)


async def test_slow_server_is_never_lost():
    async with MemorySwarm(three_nodes(step_s=30.0)) as swarm, swarm.session() as session:
        assert await generate(session, PROMPT, 4) == expected(4)
        assert session.recoveries == []
        assert anyio.current_time() > 300


@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_evicted_session_is_replayed_on_the_same_server(name):
    async with MemorySwarm(three_nodes()) as swarm, swarm.session() as session:
        evicted = []
        tokens = await generate(session, PROMPT, 9, before=lambda i: i == 5 and evicted.append(swarm.evict(name)))
        assert tokens == expected(9)
        assert evicted == [1]
        recovery = session.recoveries[0]
        assert (recovery.reason, recovery.replayed_tokens) == ("EVICTED", len(PROMPT) + 4)
        assert [server.server_id for _, server in session.route] == ["a-1", "b-1", "c-1"]
        assert session.exact


async def test_two_sessions_that_do_not_fit_together_take_turns():
    budget = 2 * 40 * 16 + 16  # 40 tokens of 2 blocks, and not twice that
    async with MemorySwarm(three_nodes(kv_budget_bytes=budget)) as swarm, swarm.client() as client:
        results = {}

        async def run(number):
            async with swarm.session(client, max_tokens=40) as session:
                results[number] = await generate(session, [number], 20)

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                for number in range(2):
                    tasks.start_soon(run, number)
        assert results == {number: toy_generate([number], 20, NUM_BLOCKS) for number in range(2)}
        await assert_all_free(swarm)


async def test_rollback():
    async with MemorySwarm(three_nodes()) as swarm, swarm.session() as session:
        outputs = toy_vectors(await feed(session, list(range(12))))[0]
        for position in (12, 7, 3, 3, 0):
            await session.rollback(position)
            assert session.position == position
            again = toy_vectors(await feed(session, list(range(position, 12))) if position < 12 else toy_empty())[0]
            assert again == outputs[position:]
        assert session.recoveries == []
        with pytest.raises(RequestError):
            await session.rollback(13)
        assert session.position == 12


def toy_empty():
    return HiddenStates("float32", (1, 0, 8), b"")


@pytest.mark.parametrize("killed", ["a", "b", "c"])
async def test_rollback_then_kill(killed):
    async with MemorySwarm(with_spares()) as swarm, swarm.session() as session:
        victim = {server.name[0]: server.name for _, server in session.route}[killed]
        await feed(session, list(range(12)))
        await session.rollback(5)
        swarm.kill(victim)
        outputs = await feed(session, [40, 41])
        assert toy_vectors(outputs)[0] == toy_reference([*range(5), 40, 41], NUM_BLOCKS)[5:]


@pytest.mark.parametrize("disturb", ["nothing", "kill", "evict", "kill twice"])
async def test_permuted_rows(disturb):
    async with MemorySwarm(with_spares(respawn_s=1.0)) as swarm, swarm.session(batch_size=3) as session:
        histories = await step_rows(session, [[], [], []], [1, 2, 3])
        orders = [None, (2, 0, 1), None, (0, 0, 2), (1, 2, 0), None, (2, 2, 2), None, (0, 1, 2), None]
        for number, rows in enumerate(orders):
            if number in {"kill": {5}, "kill twice": {4, 7}}.get(disturb, ()):
                swarm.kill(session.route[1][1].name)
            if disturb == "evict" and number % 2:
                swarm.evict(session.route[number % 3][1].name)
            histories = await step_rows(session, histories, [number, number + 20, number + 40], rows)


@pytest.mark.parametrize("lost", [None, "before", "after"])
async def test_rollback_behind_a_permutation(lost):
    await roll_back_behind_a_permutation(lost)


@pytest.mark.parametrize("position", [1, 2, 3, 4])
async def test_rollback_behind_a_permutation_in_a_hole_that_two_fill(position):
    await roll_back_in_a_hole_that_two_fill(position)


async def test_two_segments_fill_one_hole():
    nodes = [*three_nodes(), NodeSpec("d", "2:3"), NodeSpec("e", "3:4")]
    async with MemorySwarm(nodes) as swarm:
        async with swarm.session() as session:

            def before(number):
                if number == 4:
                    swarm.kill("b")
                if number == 7:
                    swarm.kill("e")
                    swarm.add(NodeSpec("f", "3:4"))
                if number == 9:
                    swarm.kill("d")
                    swarm.add(NodeSpec("g", "2:4"))

            assert await generate(session, PROMPT, 12, before=before) == expected(12)
            assert [server.name for _, server in session.route] == ["a", "g", "f", "c"]
            assert [recovery.replayed_tokens for recovery in session.recoveries] == [8, 11, 13]
        await assert_all_free(swarm)


async def test_failed_call_after_a_hole_was_filled_by_two():
    """The second segment's log was made by the replay, and stays when the call that caused it fails."""
    nodes = [*three_nodes(), NodeSpec("d", "2:3"), NodeSpec("e", "3:4")]
    async with MemorySwarm(nodes) as swarm, swarm.session(timeout_s=3.0) as session:
        token_ids = await generate(session, PROMPT, 4)
        swarm.kill("b")
        swarm.kill("c")
        with pytest.raises(NoRouteError):
            await feed(session, token_ids[-1:])
        assert session.position == len(PROMPT) + 3
        swarm.add(NodeSpec("c", "4:6"))
        swarm.kill("e")
        swarm.add(NodeSpec("f", "3:4"))
        assert await generate(session, token_ids[-1:], 4) == expected(8)[4:]
        assert [str(recovery.span) for recovery in session.recoveries] == ["2:4", "3:4", "4:6"]


async def test_case_07_larger_replacement_runs_the_hole_only():
    nodes = [
        NodeSpec("a", "0:8"),
        NodeSpec("b", "8:14"),
        NodeSpec("c", "14:24"),
        NodeSpec("spare", "6:24", block_step_s=0.02),
    ]
    async with MemorySwarm(nodes) as swarm, swarm.session() as session:
        await seed_91(swarm, session)


async def test_seed_91():
    """24 blocks on three servers; the middle one leaves, and seconds later one joins that holds more than the gap."""
    nodes = [NodeSpec("a", "0:8"), NodeSpec("b", "8:14"), NodeSpec("c", "14:24")]
    async with MemorySwarm(nodes) as swarm, swarm.session() as session:

        async def join():
            await anyio.sleep(7.0)
            swarm.add(NodeSpec("spare", "6:24"))

        async with anyio.create_task_group() as tasks:
            await seed_91(swarm, session, lambda: tasks.start_soon(join))
        assert session.recoveries[0].duration_s > 7.0


async def seed_91(swarm, session, after_kill=lambda: None):
    edges = ToyEdges(24)
    tokens = await generate(session, PROMPT, 10, edges=edges)
    victim = session.route[1][1].name
    swarm.kill(victim)
    after_kill()
    tokens += await generate(session, tokens[-1:], 10, edges=edges)
    assert tokens == expected(20, num_blocks=24)
    assert len(session.recoveries) == 1
    assert session.recoveries[0].replayed_tokens == len(PROMPT) + 9
    assert [str(span) for span, _ in session.route] == ["0:8", "8:14", "14:24"]
    assert [server.name for _, server in session.route] == ["a", "spare", "c"]
    assert {info.span for info in swarm.sessions()["spare"]} == {session.route[1][0]}
    assert swarm.node("a").worker.num_tokens == swarm.node("c").worker.num_tokens == len(PROMPT) + 19


async def test_restarted_server_is_used_again():
    async with MemorySwarm(three_nodes(respawn_s=2.0)) as swarm, swarm.session() as session:
        tokens = await generate(session, PROMPT, 30, before=lambda i: swarm.kill("abc"[i % 3]) if i % 4 == 3 else None)
        assert tokens == expected(30)
        assert len(session.recoveries) == 7


async def test_registry_away():
    """Nothing on the data path waits for the registry."""
    async with MemorySwarm(with_spares()) as swarm, swarm.client() as client, swarm.session(client) as session:
        tokens = await generate(session, PROMPT, 3)
        swarm.stop_registry()
        await anyio.sleep(20)
        swarm.kill(session.route[1][1].name)
        assert await generate(session, tokens[-1:], 3) == expected(6)[3:]


async def test_draining_server_is_left_without_penalty():
    async with MemorySwarm(with_spares()) as swarm, swarm.client() as client:
        async with swarm.session(client) as session:
            tokens = await generate(session, PROMPT, 3)
            leaving = session.route[1][1]
            swarm.drain(leaving.name)
            await anyio.sleep(0.1)
            tokens += await generate(session, tokens[-1:], 3)
            assert tokens == expected(6)
            assert leaving not in [server for _, server in session.route]
            assert [recovery.reason for recovery in session.recoveries] == ["DRAINING"]
            assert client.health.excluded(anyio.current_time()) == {}
            await anyio.sleep(5)
            assert leaving.name not in swarm.alive
            assert leaving.server_id not in [server.server_id for server in client.servers()]
        await assert_all_free(swarm)


async def test_draining_server_stays_while_there_is_no_other():
    async with MemorySwarm(three_nodes()) as swarm, swarm.session() as session:
        tokens = await generate(session, PROMPT, 3)
        swarm.drain("b", deadline_s=60)
        await anyio.sleep(1)
        tokens += await generate(session, tokens[-1:], 5)
        assert tokens == expected(8)
        assert session.recoveries == []


async def test_case_14_bounded_retries_list_each_attempt():
    async with MemorySwarm(three_nodes()) as swarm, swarm.session(max_retries=2, timeout_s=30.0) as session:
        await generate(session, PROMPT, 3)
        swarm.kill("b")
        with anyio.fail_after(31), pytest.raises(NoRouteError) as caught:
            await feed(session, [1])
        assert {attempt.span for attempt in caught.value.attempts} == {"2:4"}
        assert 1 <= len(caught.value.attempts) <= 3
        assert "b (b-1) at b.memory:1" in str(caught.value)
        assert session.position == len(PROMPT) + 2
        swarm.add(NodeSpec("b", "2:4"))
        assert await generate(session, expected(3)[-1:], 3) == expected(6)[3:]


async def test_case_14_all_dead_and_the_time_is_bounded():
    async with MemorySwarm(three_nodes()) as swarm, swarm.session(timeout_s=10.0) as session:
        await generate(session, PROMPT, 3)
        for name in "abc":
            swarm.kill(name)
        started_at = anyio.current_time()
        with pytest.raises(NoRouteError, match="0:2"):
            await feed(session, [1])
        assert anyio.current_time() - started_at < 12


async def test_case_10_callers_faults_exclude_nobody():
    async with MemorySwarm(three_nodes()) as swarm, swarm.client() as client, swarm.session(client) as session:
        tokens = await generate(session, PROMPT, 2)
        bad = [
            HiddenStates("float32", (1, 1, 9), bytes(36)),
            HiddenStates("float32", (2, 1, 8), bytes(64)),
            HiddenStates("bfloat16", (1, 1, 8), bytes(16)),
            HiddenStates("float32", (1, 1, 8), b"\0\0\xc0\x7f" * 8),  # NaN
            HiddenStates("float32", (1, 400, 8), bytes(400 * 32)),
        ]
        for hidden in bad:
            with pytest.raises(RequestError):
                await session.step(hidden)
        with pytest.raises(RequestError):
            await session.step(EDGES.embed([1], position=0), row_indices=(1,))
        assert client.health.excluded(anyio.current_time()) == {}
        assert session.recoveries == []
        assert await generate(session, tokens[-1:], 3) == expected(5)[2:]
        assert [server.server_id for _, server in session.route] == ["a-1", "b-1", "c-1"]


async def test_opening_for_too_many_tokens_is_the_callers_fault():
    nodes = three_nodes(limits=Limits(max_session_tokens=32))
    async with MemorySwarm(nodes) as swarm, swarm.client() as client:
        with pytest.raises((LengthExceededError, NoRouteError)):
            async with swarm.session(client, max_tokens=33, timeout_s=5.0):
                pass
        assert client.health.excluded(anyio.current_time()) == {}


async def test_case_15_a_better_server_joins():
    async with MemorySwarm(three_nodes()) as swarm, swarm.session() as session:
        join = NodeSpec("big", "0:6", step_s=0.0)
        tokens = await generate(session, PROMPT, 20, before=lambda i: swarm.add(join) if i == 10 else None)
        assert tokens == expected(20)
        assert [server.name for _, server in session.route] == ["a", "b", "c"]


async def test_case_16_killed_server_gets_no_further_step():
    async with MemorySwarm(with_spares()) as swarm, swarm.session() as session:
        tokens = await generate(session, PROMPT, 3)
        victim = session.route[1][1].name
        swarm.kill(victim)
        started_at = anyio.current_time()
        tokens += await generate(session, tokens[-1:], 1)
        assert anyio.current_time() - started_at < 0.1
        assert tokens == expected(4)


async def test_concurrent_sessions_do_not_mix():
    async with MemorySwarm(with_spares()) as swarm, swarm.client() as client:
        results = {}

        async def run(number):
            async with swarm.session(client) as session:
                results[number] = await generate(session, [number, *PROMPT[: number % 5]], 12)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(run, number)
            await anyio.sleep(0.02)
            swarm.kill("b")
            swarm.kill("c2")
        prompts = {number: [number, *PROMPT[: number % 5]] for number in range(16)}
        assert results == {number: expected(12, prompt) for number, prompt in prompts.items()}
        await assert_all_free(swarm)


async def test_busy_session_refuses_a_second_call():
    async with MemorySwarm(three_nodes(step_s=1.0)) as swarm, swarm.session() as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, session, PROMPT)
            await anyio.sleep(0.5)
            with pytest.raises(anyio.BusyResourceError):
                await feed(session, [1])
            with pytest.raises(anyio.BusyResourceError):
                await session.rollback(0)
        assert session.position == len(PROMPT)


# -- cancelling


async def until_not_cancelled(run_once):
    """Cancel at the first wake-up, at the second, ..., until nothing was left to cancel."""
    countdown = 1
    while await run_once(countdown):
        countdown += 1
    assert countdown > 10
    return countdown


@pytest.mark.parametrize("tokens", [[7], [7, 8, 9, 10, 11]], ids=["decode", "chunks"])
@pytest.mark.parametrize("killed", [False, True])
async def test_cancelled_step_changes_nothing(tokens, killed):
    async def run_once(countdown):
        async with MemorySwarm(with_spares(step_s=0.002)) as swarm:
            async with swarm.session(chunk_tokens=2) as session:
                await feed(session, PROMPT)
                if killed:
                    swarm.kill(session.route[1][1].name)
                was_cancelled = await cancelled_at(countdown, feed, session, tokens)
                assert session.position == len(PROMPT) + (0 if was_cancelled else len(tokens))
                if was_cancelled:
                    outputs = await feed(session, [20, 21, 22])
                    assert toy_vectors(outputs)[0] == toy_reference([*PROMPT, 20, 21, 22], NUM_BLOCKS)[5:]
            await assert_all_free(swarm)
        return was_cancelled

    await until_not_cancelled(run_once)


async def test_cancelled_step_with_permuted_rows_changes_nothing():
    async def permute(session):
        await session.step(EDGES.embed_rows([[9, 8, 7], [6, 5, 4]]), row_indices=(1, 1))

    async def run_once(countdown):
        async with MemorySwarm(with_spares(step_s=0.002)) as swarm:
            async with swarm.session(chunk_tokens=2, batch_size=2) as session:
                histories = await step_rows(session, [[], []], [1, 2])
                histories = await step_rows(session, histories, [3, 4], (1, 0))
                swarm.kill(session.route[2][1].name)
                was_cancelled = await cancelled_at(countdown, permute, session)
                if was_cancelled:
                    histories = await step_rows(session, histories, [9, 10])
                    await step_rows(session, histories, [11, 12], (1, 0))
            await assert_all_free(swarm)
        return was_cancelled

    await until_not_cancelled(run_once)


async def test_cancelled_rollback_leaves_the_session_usable():
    async def run_once(countdown):
        async with MemorySwarm(three_nodes()) as swarm:
            async with swarm.session() as session:
                await feed(session, PROMPT)
                was_cancelled = await cancelled_at(countdown, session.rollback, 2)
                position = session.position
                assert position in ((2, 5) if was_cancelled else (2,))
                outputs = await feed(session, [20, 21])
                assert toy_vectors(outputs)[0] == toy_reference([*PROMPT[:position], 20, 21], NUM_BLOCKS)[position:]
                swarm.evict("b")
                outputs = await feed(session, [22])
                assert toy_vectors(outputs)[0] == toy_reference([*PROMPT[:position], 20, 21, 22], NUM_BLOCKS)[-1:]
            await assert_all_free(swarm)
        return was_cancelled

    await until_not_cancelled(run_once)


async def test_cancelled_opening_leaves_nothing():
    async def open_one(swarm, client):
        async with swarm.session(client):
            pass

    async def run_once(countdown):
        async with MemorySwarm(three_nodes()) as swarm, swarm.client() as client:
            was_cancelled = await cancelled_at(countdown, open_one, swarm, client)
            await assert_all_free(swarm)
        return was_cancelled

    await until_not_cancelled(run_once)


async def test_case_37_cancelled_generation_frees_within_one_step():
    async with MemorySwarm(three_nodes(step_s=5.0)) as swarm:
        with anyio.move_on_after(31):
            async with swarm.session() as session:
                await generate(session, PROMPT, 24)
        assert swarm.num_sessions() <= 1
        await anyio.sleep(5.0)
        await assert_all_free(swarm)
        steps = [swarm.node(name).worker.num_steps for name in "abc"]
        await anyio.sleep(60.0)
        assert steps == [swarm.node(name).worker.num_steps for name in "abc"]


# -- the faults of a plan


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.RESTART, FaultKind.PAUSE, FaultKind.BLACK_HOLE])
async def test_each_moment_comes_true(moment, kind):
    first = Fault(Moment.RECEIVING, 6, "b", FaultKind.EVICT)
    fault = Fault(moment, 3, "b", kind, 4.0)
    async with MemorySwarm([*three_nodes(), NodeSpec("spare", "2:4")], plan=FaultPlan(0, (first, fault))) as swarm:
        async with swarm.session() as session:
            tokens = await generate(session, PROMPT, 8)
        assert tokens == expected(8)
        assert fault in swarm.faults.fired
        await assert_all_free(swarm, after_s=LEASE_S)


@pytest.mark.parametrize("kind", [FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.LOSE_REPLY, FaultKind.EVICT])
@pytest.mark.parametrize("seconds", [0.1, 5.0])
async def test_each_kind_changes_nothing(kind, seconds):
    moment = Moment.REPLYING if kind is FaultKind.LOSE_REPLY else Moment.RECEIVING
    fault = Fault(moment, 6, "b", kind, seconds)
    async with MemorySwarm(with_spares(), plan=FaultPlan(0, (fault, replace(fault, token=8, node="b2")))) as swarm:
        async with swarm.session() as session:
            assert await generate(session, PROMPT, 8) == expected(8)
        assert swarm.faults.fired
        await assert_all_free(swarm, after_s=LEASE_S)


def test_plan_prints_as_three_lines_that_bring_it_back():
    for seed in range(50):
        plan = FaultPlan.random(seed, ["a", "b"], num_tokens=20)
        assert plan == FaultPlan.random(seed, ["a", "b"], num_tokens=20)
        assert len(str(plan).splitlines()) == 3
        assert FaultPlan.parse(str(plan)) == plan
