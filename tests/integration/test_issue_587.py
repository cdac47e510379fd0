"""The forerunner's unending failure: a replacement begins at position 0 while the history has length t.

Its obvious repair, to copy the position into the new session without sending the history again, would give wrong
output and no error. It is planted here, at the client, in the server's ledger, and in the server's cache as well:
each layer behind it catches it, and where none is left, the outputs are seen to be wrong. Ours are right.
"""

import pytest
import torch
from in_process import in_process_swarm
from wire_tap import WireTap

import petals_async
from petals_async.core.ledger import StepLedger
from petals_async.core.messages import Step
from petals_async.engine.kv import KvCache
from petals_async.errors import NoRouteError

pytestmark = pytest.mark.processes

PROMPT = [65 + 3 * n % 26 for n in range(11)]
STEPS = 8
LOST_BEFORE = 5
"""The middle server goes before this step; the position is then `len(PROMPT) + LOST_BEFORE - 1`."""

SPANS = {"first": "0:2", "middle": "2:4", "last": "4:6"}


def replayed(tap):
    """Give (token offset, tokens, tokens of each chunk) of each step that joins chunks."""
    steps = [message for _, message in tap.sent if isinstance(message, Step)]
    return [(step.token_offset, step.num_tokens, step.chunk_tokens) for step in steps if step.chunk_tokens]


async def outputs_of_steps(client, swarm, lose_before=None):
    """Feed fixed tokens step by step; return the outputs of each step, and the session's recoveries."""
    outputs, edges = [], client.files.edges
    async with client.session(max_tokens=64) as session:
        for index in range(STEPS):
            if index == lose_before:
                await swarm.add("spare", "1:5")
                await swarm.lose("middle")
            tokens = PROMPT if index == 0 else [97 + 5 * index % 26]
            states = edges.embed_tensor(torch.tensor([tokens]), position=session.position)
            outputs.append(await session.step(states))
        return outputs, session.recoveries


async def run_disturbed(model, *, dtype="float32", **options):
    """Return the outputs of an undisturbed run and of one whose middle server is lost, and the recoveries."""
    async with (
        in_process_swarm(model, SPANS, dtype=dtype) as swarm,
        petals_async.Client(model, swarm.registry.address, dtype=dtype, timeout_s=20, **options) as client,
    ):
        expected, none = await outputs_of_steps(client, swarm)
        assert none == []
        outputs, recoveries = await outputs_of_steps(client, swarm, lose_before=LOST_BEFORE)
    return expected, outputs, recoveries


@pytest.fixture
def planted_at_the_client(monkeypatch):
    """A replacement is believed to hold the history, and nothing is sent again."""

    async def replay(links, end, *, merge_tokens, fast):
        for link in links:
            link.segment.position = end
        return end

    monkeypatch.setattr("petals_async.client.route.replay", replay)
    monkeypatch.setattr("petals_async.client.stage.replay", replay)


@pytest.fixture
def planted_in_the_ledger(monkeypatch):
    """The server believes what the client says of its position."""
    decide = StepLedger.decide

    def trusting(self, step_id, token_offset):
        self.position = max(self.position, token_offset)
        return decide(self, step_id, token_offset)

    monkeypatch.setattr(StepLedger, "decide", trusting)


@pytest.fixture
def planted_in_the_cache(monkeypatch):
    """The server's cache is taken to be as long as the offset says, whatever is in it."""

    def reach(self, offset):
        for layer in self.held:
            if layer.length < offset:
                layer.keys[:, :, layer.length : offset] = 0
                layer.values[:, :, layer.length : offset] = 0
            layer.length = offset

    monkeypatch.setattr(KvCache, "seek", reach)
    monkeypatch.setattr(KvCache, "length", property(lambda self: self.max_tokens))


async def test_the_failing_step_and_all_others_are_bitwise_equal(tiny_model):
    expected, outputs, recoveries = await run_disturbed(tiny_model)
    assert [recovery.at for recovery in recoveries] == [len(PROMPT) + LOST_BEFORE - 1]
    assert recoveries[0].replayed_tokens == recoveries[0].at
    for index in range(STEPS):
        assert torch.equal(outputs[index], expected[index]), index


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_was_decoded_is_replayed_in_one_step_and_bitwise_equal(tiny_model, dtype):
    tap = WireTap()
    expected, outputs, recoveries = await run_disturbed(tiny_model, dtype=dtype, connector=tap)
    at = len(PROMPT) + LOST_BEFORE - 1
    assert [recovery.at for recovery in recoveries] == [at]
    assert replayed(tap) == [(0, at, (len(PROMPT), *[1] * (LOST_BEFORE - 1)))]
    assert all(torch.equal(output, right) for output, right in zip(outputs, expected, strict=True))


async def test_a_server_that_is_not_exact_gets_the_chunks_as_they_were(tiny_model, monkeypatch):
    monkeypatch.setattr("petals_async.models.trials.gives_equal_bits", lambda _blocks: False)
    tap = WireTap()
    expected, outputs, recoveries = await run_disturbed(tiny_model, connector=tap)
    assert len(recoveries) == 1
    assert replayed(tap) == []
    assert all(torch.equal(output, right) for output, right in zip(outputs, expected, strict=True))


async def test_a_merged_replay_is_equal_to_rounding(tiny_model):
    expected, outputs, recoveries = await run_disturbed(tiny_model, replay="fast")
    assert len(recoveries) == 1
    for index in range(STEPS):
        torch.testing.assert_close(outputs[index], expected[index], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("planted_at_the_client")
async def test_planted_at_the_client_the_server_refuses_it(tiny_model):
    """Nothing is computed over the hole; the attempts are bounded, and say OFFSET_GAP."""
    with pytest.raises(NoRouteError) as caught:
        await run_disturbed(tiny_model, max_retries=4)
    reasons = [attempt.reason for attempt in caught.value.attempts]
    assert len(reasons) == 5
    assert reasons[0] == "STREAM_LOST"
    assert set(reasons[1:]) == {"OFFSET_GAP"}


async def test_planted_in_the_opening_only_it_heals(tiny_model, monkeypatch):
    """A client that merely believes too much is put right by the position that the server states."""

    async def replay(links, end, *, merge_tokens, fast):
        for link in links:
            link.segment.position = end
        return end

    monkeypatch.setattr("petals_async.client.route.replay", replay)
    expected, outputs, recoveries = await run_disturbed(tiny_model)
    assert [recovery.reason for recovery in recoveries][-1] == "OFFSET_GAP"
    assert all(torch.equal(output, right) for output, right in zip(outputs, expected, strict=True))


@pytest.mark.usefixtures("planted_at_the_client", "planted_in_the_ledger")
async def test_planted_in_the_ledger_the_cache_refuses_it(tiny_model):
    with pytest.raises(NoRouteError) as caught:
        await run_disturbed(tiny_model, max_retries=4)
    assert {attempt.reason for attempt in caught.value.attempts[1:]} == {"OFFSET_GAP"}


@pytest.mark.usefixtures("planted_at_the_client", "planted_in_the_ledger", "planted_in_the_cache")
async def test_planted_everywhere_the_outputs_are_seen_to_be_wrong(tiny_model):
    """This is what no layer may let through: no error, and other outputs from the failing step on."""
    expected, outputs, recoveries = await run_disturbed(tiny_model)
    assert len(recoveries) == 1
    for index in range(LOST_BEFORE):
        assert torch.equal(outputs[index], expected[index]), index
    for index in range(LOST_BEFORE, STEPS):
        assert (outputs[index] - expected[index]).abs().max() > 1e-2, index
