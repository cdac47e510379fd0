"""Silence tells a stopped server from a slow one: TCP and HTTP/2 would tell neither."""

import signal
import threading

import anyio
import pytest
from in_process import in_process_swarm
from respawning import eventually
from wire_tap import WireTap

import petals_async
from petals_async.core.messages import Step
from petals_async.engine.backend import TorchBackend

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPT = [65 + 3 * n % 26 for n in range(7)]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


async def knows(client, name):
    return name in {server.name for server in client.servers}


async def test_a_stopped_server_is_lost_by_its_silence_and_serves_again_later(process_swarm, tiny_model):
    async with (
        process_swarm(tiny_model, first="0:2", middle="2:4", last="4:6") as swarm,
        petals_async.Client(tiny_model, swarm.registry.address, timeout_s=40) as client,
    ):
        expected = await client.generate(PROMPT, **OPTIONS)
        tokens = []
        async with client.stream(PROMPT, **OPTIONS) as stream:
            async for piece in stream:
                tokens += piece.token_ids
                if len(tokens) == 4:
                    await swarm.add("spare", "2:4")
                    await eventually(lambda: knows(client, "spare"))
                    swarm.processes["middle"].signal(signal.SIGSTOP)
        assert tuple(tokens) == expected.token_ids
        (recovery,) = stream.result.recoveries
        assert recovery.lost.startswith("middle ")
        assert recovery.reason in ("SILENT", "STREAM_LOST")  # our own signs of life, or HTTP/2's ping before them
        assert recovery.replacements[0].startswith("spare ")

        swarm.processes["middle"].signal(signal.SIGCONT)
        await swarm.kill("spare")
        again = await client.generate(PROMPT, **OPTIONS)
        assert again.token_ids == expected.token_ids
        async with client.session(max_tokens=8) as session:
            assert [server.name for _, server in session.route] == ["first", "middle", "last"]


async def test_a_slow_server_that_reports_is_never_lost(tiny_model, monkeypatch):
    """A step of three seconds, with signs of life every 0.1 s: ten times the silence that loses a server."""
    delays = iter([0, 0, 0, 3.0])
    run = TorchBackend.run

    def slow_run(self, steps):
        if self.span.start == 2 and (delay_s := next(delays, 0)):
            threading.Event().wait(delay_s)
        return run(self, steps)

    async with (
        in_process_swarm(tiny_model, progress_interval_s=0.1) as swarm,
        petals_async.Client(tiny_model, swarm.registry.address, timeout_s=20) as client,
    ):
        expected = await client.generate(PROMPT, **OPTIONS)
        monkeypatch.setattr(TorchBackend, "run", slow_run)
        started_at = anyio.current_time()
        result = await client.generate(PROMPT, **OPTIONS)
        assert anyio.current_time() - started_at >= 3.0
        assert result.token_ids == expected.token_ids
        assert result.recoveries == ()
        assert client._swarm.health.excluded(anyio.current_time()) == {}


async def test_a_client_that_slept_itself_blames_nobody(process_swarm, tiny_model):
    """The client's own event loop stands still while a step is pending: nobody was silent."""
    asleep = iter([True])

    async def sleep_after_a_step(_address, message):
        if isinstance(message, Step) and message.token_offset == len(PROMPT) + 3 and next(asleep, False):
            threading.Event().wait(3.0)

    async with (
        process_swarm(tiny_model, first="0:2", middle="2:4", last="4:6") as swarm,
        petals_async.Client(
            tiny_model, swarm.registry.address, timeout_s=20, connector=WireTap(after_send=sleep_after_a_step)
        ) as client,
    ):
        result = await client.generate(PROMPT, **OPTIONS)
        assert next(asleep, None) is None
        assert result.recoveries == ()
        assert client._swarm.health.excluded(anyio.current_time()) == {}
