"""Bad input is the caller's fault: a clear error, no retry, no server excluded, and the same client goes on."""

import secrets

import anyio
import pytest
import torch
from in_process import in_process_swarm
from respawning import eventually
from wire_tap import WireTap

import petals_async
from petals_async.core.hidden import TensorSpec
from petals_async.core.messages import CloseSession, Opened, OpenSession, Part, Refused, Result, Step
from petals_async.core.server_info import Limits
from petals_async.core.span import Span
from petals_async.errors import LengthExceededError, NoRouteError, RegistryUnavailableError, RequestError
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.testing.tiny import make_tiny_llama

pytestmark = pytest.mark.processes

PROMPT = [65 + 3 * n % 26 for n in range(7)]
OPTIONS = {"max_new_tokens": 6, "do_sample": False}
HIDDEN = 64
MAX_TOKENS = 48


class Bench:
    """A swarm, a client, and what went over the wire between them."""

    def __init__(self, swarm, client, tap, expected):
        self.swarm = swarm
        self.client = client
        self.tap = tap
        self.expected = expected

    def states(self, tokens, rows=1):
        return self.client.files.edges.embed_tensor(torch.tensor([tokens] * rows), position=0)

    def forget(self):
        self.tap.sent.clear()

    @property
    def num_steps(self):
        return sum(isinstance(message, Step) for _, message in self.tap.sent)

    @property
    def num_openings(self):
        return sum(isinstance(message, OpenSession) for _, message in self.tap.sent)


@pytest.fixture
async def bench(tiny_model):
    """A swarm and a client; at the end nobody is excluded, nothing is held, and the client still generates."""
    tap = WireTap()
    limits = Limits(max_session_tokens=MAX_TOKENS, max_batch_size=4)
    async with (
        in_process_swarm(tiny_model, limits=limits) as swarm,
        petals_async.Client(tiny_model, swarm.registry.address, connector=tap, timeout_s=20) as client,
    ):
        expected = await client.generate(PROMPT, **OPTIONS)
        tap.sent.clear()
        yield Bench(swarm, client, tap, expected)
        assert client._swarm.health.excluded(anyio.current_time()) == {}
        again = await client.generate(PROMPT, **OPTIONS)
        assert again.token_ids == expected.token_ids
        assert again.recoveries == ()


async def test_a_prompt_longer_than_the_limit(bench):
    with pytest.raises(LengthExceededError) as caught:
        await bench.client.generate([65] * 45, **OPTIONS)
    for number in ("45", "6", "51", str(MAX_TOKENS)):
        assert number in caught.value.message
    with pytest.raises(LengthExceededError):
        async with bench.client.session(max_tokens=MAX_TOKENS + 1):
            pass
    assert bench.tap.sent == []


async def test_a_step_longer_than_the_session(bench):
    async with bench.client.session(max_tokens=10) as session:
        await session.step(bench.states(PROMPT))
        before = bench.num_steps
        with pytest.raises(LengthExceededError) as caught:
            await session.step(bench.states([65] * 4))
        assert "10" in caught.value.message
        assert "4" in caught.value.message
        assert (session.position, bench.num_steps) == (7, before)
        await session.step(bench.states([65] * 3))
        assert session.position == 10


@pytest.mark.parametrize("prompt", ["", [], [PROMPT, []]], ids=["text", "ids", "one of two"])
async def test_an_empty_prompt(bench, prompt):
    with pytest.raises(RequestError, match="empty"):
        await bench.client.generate(prompt, **OPTIONS)
    assert bench.tap.sent == []


@pytest.mark.parametrize("token", [-1, 288, 10**12])
async def test_a_token_outside_the_vocabulary(bench, token):
    with pytest.raises(RequestError, match="vocabulary of 288") as caught:
        await bench.client.generate([65, token, 66], **OPTIONS)
    assert caught.value.reason == "BAD_TOKEN"
    assert str(token) in caught.value.message
    assert bench.tap.sent == []


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (torch.zeros(1, 2, HIDDEN + 1), "BAD_SHAPE"),
        (torch.zeros(2, 2, HIDDEN), "BAD_SHAPE"),
        (torch.zeros(1, 0, HIDDEN), "BAD_SHAPE"),
        (torch.zeros(2, HIDDEN), "BAD_SHAPE"),
        (torch.zeros(1, 2, HIDDEN, dtype=torch.bfloat16), "BAD_DTYPE"),
        (torch.zeros(1, 2, HIDDEN, dtype=torch.float64), "BAD_DTYPE"),
    ],
    ids=["width", "another batch size", "no tokens", "two dimensions", "bfloat16", "float64"],
)
async def test_wrong_hidden_states(bench, wrong, reason):
    """Refused before anything is sent; the session goes on."""
    async with bench.client.session(max_tokens=20) as session:
        first = await session.step(bench.states(PROMPT))
        before = bench.num_steps
        with pytest.raises(RequestError) as caught:
            await session.step(wrong)
        assert caught.value.reason == reason
        assert (session.position, bench.num_steps) == (7, before)
        await session.rollback(0)
        assert torch.equal(await session.step(bench.states(PROMPT)), first)
        assert session.recoveries == []


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_hidden_states_that_are_no_numbers(bench, number):
    """Found by the first server, blamed on the request, tried on one server only; the session goes on."""
    async with bench.client.session(max_tokens=20) as session:
        first = await session.step(bench.states(PROMPT))
        wrong = bench.states([65, 66])
        wrong[0, 1, 5] = number
        before = bench.num_steps
        with pytest.raises(RequestError, match="NaN or infinity") as caught:
            await session.step(wrong)
        assert caught.value.reason == "NON_FINITE_INPUT"
        assert (session.position, bench.num_steps, session.recoveries) == (7, before + 1, [])
        outputs = await session.step(bench.states([65]))
    async with bench.client.session(max_tokens=20) as session:
        assert torch.equal(await session.step(bench.states(PROMPT)), first)
        assert torch.equal(await session.step(bench.states([65])), outputs)


async def test_another_batch_size_in_the_next_session(bench):
    async with bench.client.session(max_tokens=20) as session:
        one = await session.step(bench.states(PROMPT))
    async with bench.client.session(max_tokens=20, batch_size=3) as session:
        three = await session.step(bench.states(PROMPT, rows=3))
    assert three.shape == (3, 7, HIDDEN)
    torch.testing.assert_close(three, one.expand(3, -1, -1), rtol=1e-4, atol=1e-4)
    with pytest.raises((RequestError, NoRouteError), match="5 rows"):
        async with bench.client.session(max_tokens=20, batch_size=5):
            pass


async def test_a_registry_that_is_not_there(bench, tiny_model):
    nowhere = "127.0.0.1:1"
    for registry in (nowhere, f"static:{nowhere}"):
        with pytest.raises(RegistryUnavailableError, match=nowhere):
            async with petals_async.Client(tiny_model, registry):
                pass


async def knows(client, name, wanted):
    return wanted == (name in {server.name for server in client.servers})


async def test_two_servers_with_different_weights_are_named(bench, tiny_model, tmp_path):
    """Same configuration, other weights: nobody can know who is right, so both are named and nothing is computed."""
    other = make_tiny_llama(tmp_path / "tiny", num_blocks=6, seed=1)
    await bench.swarm.add("impostor", "2:4", model=other)
    await eventually(lambda: knows(bench.client, "impostor", True))
    bench.forget()
    with pytest.raises(NoRouteError, match="different weights") as caught:
        await bench.client.generate(PROMPT, timeout_s=0.5, **OPTIONS)
    assert caught.value.reason == "CONFLICTING_WEIGHTS"
    assert "impostor" in caught.value.message
    assert "middle" in caught.value.message
    assert bench.tap.sent == []
    await bench.swarm.lose("impostor")
    await eventually(lambda: knows(bench.client, "impostor", False))


# -- messages made by hand


def opening(server, **changes):
    fields = {
        "session_id": secrets.token_bytes(16),
        "model_fingerprint": server.info.model_fingerprint,
        "span": Span(2, 4),
        "batch_size": 1,
        "max_tokens": 20,
        "wire_dtype": "float32",
        **changes,
    }
    return OpenSession(**fields)


def step(step_id, num_tokens, data, offset=0):
    return Step(step_id, offset, num_tokens, TensorSpec("float32", (1, num_tokens, HIDDEN)), data)


async def answer_to(stream, *messages):
    """Send messages, and return the first reply that is no sign of life."""
    for message in messages:
        await stream.send(message)
    with anyio.fail_after(10):
        while True:
            reply = await stream.receive()
            if isinstance(reply, Opened | Result | Refused):
                return reply


async def test_messages_made_by_hand(bench):
    """A wrong length and a part out of order are refused with the position; the stream lives on."""
    server, right = bench.swarm.servers["middle"], bytes(4 * HIDDEN)
    async with GrpcConnector().connect(server.address) as channel, channel.open_stream() as stream:
        assert isinstance(await answer_to(stream, opening(server)), Opened)

        refused = await answer_to(stream, step(1, 1, right[:-4]))
        assert (refused.reason, refused.position, refused.next_step_id) == ("BAD_SHAPE", 0, 1)
        assert "256 bytes" in refused.message
        assert "252" in refused.message

        refused = await answer_to(stream, step(1, 1, None), Part(64, right[64:]))
        assert (refused.reason, refused.position, refused.next_step_id) == ("BAD_PART", 0, 1)
        assert "byte 64" in refused.message

        refused = await answer_to(stream, step(1, 1, right, offset=3))
        assert (refused.reason, refused.position) == ("OFFSET_GAP", 0)

        result = await answer_to(stream, step(1, 1, None), Part(0, right[:100]), Part(100, right[100:]))
        assert isinstance(result, Result)
        assert result.position == 1
        await stream.send(CloseSession())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_fingerprint": "0" * 64}, "WRONG_MODEL"),
        ({"span": Span(1, 4)}, "BAD_SPAN"),
        ({"wire_dtype": "bfloat16"}, "BAD_DTYPE"),
        ({"batch_size": 5}, "BAD_SHAPE"),
        ({"max_tokens": MAX_TOKENS + 1}, "LENGTH_EXCEEDED"),
        ({"session_id": b"short"}, "BAD_REQUEST"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_openings_made_by_hand(bench, changes, reason):
    server = bench.swarm.servers["middle"]
    async with GrpcConnector().connect(server.address) as channel, channel.open_stream() as stream:
        with pytest.raises(RequestError) as caught:
            await answer_to(stream, opening(server, **changes))
        assert caught.value.reason == reason
    assert bench.swarm.sessions() == []


async def test_a_client_whose_model_is_another(bench, tmp_path):
    """A client of another model finds no server of its own; it sends nothing to those that there are."""
    other = make_tiny_llama(tmp_path / "tiny", num_blocks=4)
    tap = WireTap()
    with pytest.raises(NoRouteError, match="no server of this model"):
        async with petals_async.Client(other, bench.swarm.registry.address, connector=tap, timeout_s=0.5):
            pass
    assert tap.sent == []
