"""RunSession against the rules of the wire contract: BlockHost over gRPC, and over the in-memory transport."""

import anyio
import grpc
import pytest
from block_targets import HIDDEN_SIZE, SPAN, Served, grpc_target, memory_target
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trio.testing import MockClock

from petals_async.core.messages import Refused, Result
from petals_async.errors import ConfigurationError, RemoteProtocolError, RequestError, ServerUnavailableError
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.rpc.block_servicer import BlockServicer
from petals_async.rpc.server import BLOCK_SERVICE, serve_blocks
from petals_async.testing.conformance import (
    CHECKS,
    FAMILIES,
    ConformanceError,
    NotOfferedError,
    Target,
    handle_of,
    memory_checks,
    step_checks,
)
from petals_async.testing.conformance.wire import open_bench
from petals_async.v1 import block_service_pb2 as pb
from petals_async.v1 import block_service_pb2_grpc as pb_grpc

TIMEOUT_S = 5.0
TRANSPORTS = {
    "grpc": (grpc_target, "asyncio"),
    "memory": (memory_target, "asyncio"),
    "memory-virtual": (memory_target, "trio"),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def anyio_backend(transport):
    if TRANSPORTS[transport][1] == "trio":
        return ("trio", {"clock": MockClock(autojump_threshold=0)})
    return "asyncio"


@pytest.fixture
def served():
    return Served()


@pytest.fixture
async def target(served, transport):
    async with TRANSPORTS[transport][0](served) as target:
        yield target


only_grpc = pytest.mark.parametrize("transport", ["grpc"], indirect=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_conformance(check, target, served):
    try:
        await check(target)
    except NotOfferedError as missing:
        pytest.fail(f"our own target must offer everything: {missing}")
    with anyio.fail_after(TIMEOUT_S):
        while served.host._streams:  # noqa: ASYNC110 the server notices a little later
            await anyio.sleep(0.01)
    assert served.host._receive_budget.used_bytes == 0
    assert not served.host.table.budget._pins


async def test_checks_without_a_reference_compare_with_a_fresh_session(target):
    plain = Target(target.connector, target.address)
    await step_checks.check_rollback(plain)
    await step_checks.check_row_permutations(plain)
    with pytest.raises(NotOfferedError, match="evict"):
        await memory_checks.check_evicted(plain)


async def test_a_wrong_output_is_found(target):
    wrong = Target(target.connector, target.address, reference=lambda hidden, span: hidden)
    with pytest.raises(ConformanceError, match="wrong outputs"):
        await step_checks.check_steps_in_order(wrong)


@pytest.mark.parametrize(
    ("name", "replacement", "found_by"),
    [
        ("_needs_old_rows", lambda self, token_offset: False, step_checks.check_rows_changed),
        ("drop_to", lambda self, position: None, memory_checks.check_evicted),
        ("fork", lambda self, max_tokens: type(self)(max_kept_replies=4), memory_checks.check_fork),
    ],
)
async def test_a_broken_rule_is_found(target, monkeypatch, name, replacement, found_by):
    monkeypatch.setattr(f"petals_async.core.ledger.StepLedger.{name}", replacement)
    with pytest.raises(ConformanceError):
        await found_by(target)


async def test_every_rule_has_a_check():
    documented = {check.__doc__.partition(":")[0] for check in CHECKS}
    for rule in range(1, 12):
        assert any(str(rule) in words.replace(",", " ").split() for words in documented), f"rule {rule}"
    assert len(CHECKS) == len({name for family in FAMILIES for name in vars(family) if name.startswith("check_")})


@only_grpc
async def test_an_error_that_is_none_of_ours_ends_the_stream(target, served):
    served.worker.failure = ZeroDivisionError("a bug of the backend")
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.post(1, 0, wire.states(1))
        await wire.over(RemoteProtocolError)


@only_grpc
async def test_messages_that_are_none(target):
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = pb_grpc.BlockServiceStub(channel)
        for request in (
            pb.RunSessionRequest(),
            pb.RunSessionRequest(open=pb.OpenSession()),
            pb.RunSessionRequest.FromString(b"\xfa\x01\x02ab"),  # field 31, of a newer version
        ):
            call = stub.RunSession(timeout=TIMEOUT_S)
            await call.write(request)
            assert await call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


@only_grpc
async def test_a_half_close_without_a_message(target):
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = pb_grpc.BlockServiceStub(channel).RunSession(timeout=TIMEOUT_S)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@only_grpc
async def test_get_session(target):
    async with open_bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        async with grpc.aio.insecure_channel(target.address) as channel:
            stub = pb_grpc.BlockServiceStub(channel)
            handle = handle_of(wire.session_id)
            found = (await stub.GetSession(pb.GetSessionRequest(handle=handle), timeout=TIMEOUT_S)).session
            assert (found.handle, found.position, found.span.start, found.span.end) == (handle, 3, SPAN.start, SPAN.end)
            assert wire.session_id not in found.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetSession(pb.GetSessionRequest(handle="00000000"), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@only_grpc
async def test_pages_of_sessions(target):
    async with open_bench(target) as bench, anyio.create_task_group() as tasks:
        opened, stop = [], anyio.Event()

        async def hold(*, task_status):
            async with bench.session() as wire:
                opened.append(handle_of(wire.session_id))
                task_status.started()
                await stop.wait()

        for _ in range(5):
            await tasks.start(hold)
        async with grpc.aio.insecure_channel(target.address) as channel:
            stub = pb_grpc.BlockServiceStub(channel)
            pages, token = [], ""
            while True:
                request = pb.ListSessionsRequest(page_size=2, page_token=token)
                page = await stub.ListSessions(request, timeout=TIMEOUT_S)
                pages.append([session.handle for session in page.sessions])
                token = page.next_page_token
                if not token:
                    break
            assert pages == [opened[:2], opened[2:4], opened[4:]]
            for request in (pb.ListSessionsRequest(page_size=-1), pb.ListSessionsRequest(page_token="x")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ListSessions(request, timeout=TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [session.handle for session in await bench.channel.list_sessions()] == opened
        stop.set()


@only_grpc
async def test_a_server_that_loads_is_not_serving(transport):
    servicer = BlockServicer()
    async with serve_blocks(servicer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.port}"
        async with GrpcConnector().connect(address) as channel, channel.open_stream() as stream:
            for call in (channel.get_server_info, channel.list_sessions, stream.receive):
                with pytest.raises(ServerUnavailableError) as caught:
                    await call()
                assert caught.value.reason == "NOT_SERVING"
            assert await health_of(address) == {"": "NOT_SERVING", BLOCK_SERVICE: "NOT_SERVING"}
            servicer.service = Served().host
            await server.set_serving(True)
            assert await health_of(address) == {"": "SERVING", BLOCK_SERVICE: "SERVING"}
            assert (await channel.get_server_info()).hidden_size == HIDDEN_SIZE
            await server.set_serving(False)
            assert await health_of(address) == {"": "NOT_SERVING", BLOCK_SERVICE: "NOT_SERVING"}


async def health_of(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = {}
        for name in ("", BLOCK_SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            found[name] = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return found


@only_grpc
async def test_a_port_in_use(transport):
    async with serve_blocks(BlockServicer(), "127.0.0.1", 0) as server:
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{server.port}"):
            async with serve_blocks(BlockServicer(), "127.0.0.1", server.port):
                pass
        assert (await health_of(f"127.0.0.1:{server.port}"))[BLOCK_SERVICE] == "NOT_SERVING"


@only_grpc
async def test_stopping_ends_idle_streams_within_its_bound(served):
    servicer = BlockServicer()
    servicer.service = served.host
    async with serve_blocks(servicer, "127.0.0.1", 0) as server:
        target = served.target(GrpcConnector(), f"127.0.0.1:{server.port}")
        async with open_bench(target) as bench, bench.session() as wire:
            with anyio.fail_after(1.5):
                await server.stop(0.05)
            await wire.over(ServerUnavailableError)
        await server.stop(0.05)


@pytest.mark.parametrize("transport", ["memory-virtual"], indirect=True)
async def test_a_stream_that_never_opens_is_ended(target):
    async with open_bench(target) as bench, bench.stream(bench.opening()) as wire:
        with anyio.fail_after(11.0), pytest.raises(RequestError, match="begins with `open`, within 10 s"):
            await wire.stream.receive()


@pytest.mark.parametrize("transport", ["memory-virtual"], indirect=True)
async def test_two_sessions_that_do_not_fit_together_take_turns(target):
    """Rule 8: the one that waits sees progress, and runs when the other's protection is over; neither starves."""
    async with open_bench(target) as bench:
        rows, tokens = memory_checks.more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as one:
            await one.step(0, one.states(2))
            await anyio.sleep(1.5)
            async with bench.session(batch_size=rows, max_tokens=tokens) as other:
                await other.step(0, other.states(2))
                one.model.truncate(0)
                began = anyio.current_time()
                await one.step(0, one.states(2))
                waited = anyio.current_time() - began
                assert 0.5 < waited < 2.0
                assert len(one.progress) > 5
                other.model.truncate(0)
                await other.post(2, 2, other.states(1, at=2))
                await other.refusal(2, "EVICTED")
                await other.step(0, other.states(2))


@pytest.mark.parametrize("transport", ["memory-virtual"], indirect=True)
async def test_a_step_that_finds_no_memory_is_refused_in_the_end(target, served):
    async with open_bench(target) as bench:
        rows, tokens = memory_checks.more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as one:
            await one.step(0, one.states(1))
            await anyio.sleep(1.5)
            async with bench.session(batch_size=rows, max_tokens=tokens) as other, served.hold_compute():
                await other.post(1, 0, other.states(1))
                one.model.truncate(0)
                await one.post(2, 0, one.states(1))
                with anyio.fail_after(12.0):
                    while not isinstance(message := await one.receive(), Refused | Result):
                        one.progress.append(message)
                assert (message.reason, message.position, message.next_step_id) == ("KV_EXHAUSTED", 0, 2)
                assert message.retry_after_s > 0


@pytest.mark.parametrize("transport", ["memory-virtual"], indirect=True)
async def test_leases_run_out_by_themselves(target, served):
    async with open_bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(1))
        await bench.until_left(wire.session_id)
        await anyio.sleep(28.0)
        assert await bench.find(wire.session_id) is not None
        await anyio.sleep(4.0)
        assert await bench.find(wire.session_id) is None
        assert served.host.table.budget.used_bytes == 0
