"""Cancelling at any point leaves nothing behind: no KV page, no task, no socket, no moved position."""

import asyncio
import random

import anyio
import psutil
import pytest
import torch
from in_process import in_process_swarm
from respawning import eventually
from wire_tap import WireTap

import petals_async
from petals_async.core.messages import Step

pytestmark = pytest.mark.processes

PROMPT = [65 + 3 * n % 26 for n in range(20)]
NEW_TOKENS = 8
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
NUM_POINTS = 100
FREE_WITHIN_S = 1.0
"""All remote KV is free so long after a cancelled call has returned."""


class Countdown:
    """Cancels a scope at the n-th message on the wire, in either direction; the hooks of a tap."""

    def __init__(self):
        self.left = -1
        self.scope = None
        self.seen = 0
        self.tap = WireTap(before_send=self._count, after_send=self._count, on_receive=self._count)

    def start(self, scope, at):
        self.scope, self.left = scope, at

    async def _count(self, _address, _message):
        self.seen += 1
        self.left -= 1
        if self.left == 0 and self.scope is not None:
            self.scope.cancel()


def tasks_now():
    """Return the tasks of this loop, but for those in which a gRPC server waits for the next call."""
    running = {task for task in asyncio.all_tasks() if not task.done()}
    return {task for task in running if not task.get_coro().__qualname__.startswith("AioServer._request_")}


def sockets_now():
    """Return the TCP connections of this process, both ends of those to itself."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(end.laddr, end.raddr) for end in found if end.status == psutil.CONN_ESTABLISHED}


async def test_cancelling_at_a_hundred_points_leaves_nothing(tiny_model):
    countdown = Countdown()
    async with in_process_swarm(tiny_model) as swarm:

        async def nothing_held():
            return not swarm.sessions() and swarm.kv_bytes() == 0

        sockets, tasks = sockets_now(), tasks_now()
        async with petals_async.Client(
            tiny_model, swarm.registry.address, connector=countdown.tap, chunk_tokens=8
        ) as client:
            expected = await client.generate(PROMPT, **OPTIONS)
            await eventually(nothing_held, FREE_WITHIN_S)
            total, rest = countdown.seen, tasks_now()
            points = sorted(random.Random(587).choices(range(1, total), k=NUM_POINTS))
            num_cancelled = 0

            for point in points:
                with anyio.CancelScope() as scope:
                    countdown.start(scope, point)
                    await client.generate(PROMPT, **OPTIONS)
                num_cancelled += scope.cancelled_caught
                await eventually(nothing_held, FREE_WITHIN_S)
                await eventually(lambda: _is(lambda: tasks_now() <= rest), FREE_WITHIN_S)
            assert num_cancelled >= NUM_POINTS * 0.9
            assert not client._swarm.health.excluded(anyio.current_time())
            assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected.token_ids
        await eventually(lambda: _is(lambda: sockets_now() <= sockets), 5.0)
        await eventually(lambda: _is(lambda: tasks_now() <= tasks), FREE_WITHIN_S)


async def _is(condition):
    return condition()


async def test_a_cancelled_step_moves_no_position_and_the_session_goes_on(tiny_model):
    """At every message of one step: the position stays, and the same step then gives the same outputs."""
    countdown = Countdown()
    async with (
        in_process_swarm(tiny_model) as swarm,
        petals_async.Client(tiny_model, swarm.registry.address, connector=countdown.tap, chunk_tokens=8) as client,
    ):
        prompt = client.files.edges.embed_tensor(torch.tensor([PROMPT]), position=0)
        token = client.files.edges.embed_tensor(torch.tensor([[99]]), position=len(PROMPT))
        async with client.session(max_tokens=32) as session:
            expected = [await session.step(prompt), await session.step(token)]
        for index, states in enumerate((prompt, token)):
            for point in range(1, 19):
                async with client.session(max_tokens=32) as session:
                    if index:
                        await session.step(prompt)
                    position = session.position
                    with anyio.CancelScope() as scope:
                        countdown.start(scope, point)
                        await session.step(states)
                    if not scope.cancelled_caught:
                        continue
                    assert session.position == position
                    assert torch.equal(await session.step(states), expected[index]), (index, point)
                    assert session.position == position + states.shape[1]
                    assert not session.recoveries


async def test_a_cancelled_step_after_a_hole_was_shared_leaves_the_session_usable(tiny_model):
    """A hole is filled by two servers, and the very step that did it is cancelled: both keep what they hold."""
    armed = None
    tap = WireTap()
    async with (
        in_process_swarm(tiny_model) as swarm,
        petals_async.Client(tiny_model, swarm.registry.address, connector=tap) as client,
    ):
        states = [
            client.files.edges.embed_tensor(torch.tensor([tokens]), position=0) for tokens in (PROMPT, [99], [98], [97])
        ]
        async with client.session(max_tokens=32) as session:
            expected = [await session.step(hidden) for hidden in states]
        async with client.session(max_tokens=32) as session:
            outputs = [await session.step(states[0]), await session.step(states[1])]
            await swarm.add("left", "1:3")
            await swarm.add("right", "3:5")
            await swarm.lose("middle")
            last = next(server.address for span, server in session.route if 4 in span)

            async def cancel_at_the_last_span(address, message):
                if address == last and isinstance(message, Step) and armed is not None:
                    armed.cancel()

            tap.before_send = cancel_at_the_last_span
            with anyio.CancelScope() as armed:
                await session.step(states[2])
            assert armed.cancelled_caught
            armed = None
            assert [server.name for _, server in session.route] == ["first", "left", "right", "last"]
            assert session.position == len(PROMPT) + 1
            outputs += [await session.step(states[2]), await session.step(states[3])]
            assert len(session.recoveries) == 1
            await swarm.add("again", "2:4")
            await swarm.lose("left")
            await session.rollback(len(PROMPT) + 2)
            assert torch.equal(await session.step(states[3]), expected[3])
        assert all(torch.equal(output, right) for output, right in zip(outputs, expected, strict=True))


async def test_a_timeout_in_a_gap_frees_everything(tiny_model):
    """No server for a hole, and the caller gives up: the survivors hold nothing afterwards."""
    async with (
        in_process_swarm(tiny_model) as swarm,
        petals_async.Client(tiny_model, swarm.registry.address) as client,
    ):
        async with client.stream(PROMPT, **OPTIONS) as stream:
            with anyio.move_on_after(1.0) as scope:
                async for _piece in stream:
                    if "middle" in swarm.servers:
                        await swarm.lose("middle")
        assert scope.cancelled_caught
        await eventually(lambda: _is(lambda: not swarm.sessions() and swarm.kv_bytes() == 0), FREE_WITHIN_S)
        await swarm.add("middle", "2:4")
        assert len((await client.generate(PROMPT, **OPTIONS)).token_ids) == NEW_TOKENS
