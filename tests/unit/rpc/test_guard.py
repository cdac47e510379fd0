"""What grpc.aio does with cancellation, and that `guarded` tells ours from its own (facts.md, "anyio and grpc.aio")."""

import asyncio

import anyio
import grpc
import pytest

from petals_async.rpc.guard import RpcOverError, guarded

METHOD = "/test.Echo/Call"
LIMIT_S = 5.0


class Echo(grpc.GenericRpcHandler):
    """A unary method that never answers, and a bidi one that never says anything."""

    def service(self, details):
        if details.method == METHOD:
            return grpc.unary_unary_rpc_method_handler(self.silent)
        if details.method == METHOD + "s":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return None

    async def silent(self, request, context):
        await anyio.sleep_forever()

    async def stream(self, requests, context):
        async for _ in requests:
            pass
        yield b""


@pytest.fixture
async def channel():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


def unary(channel):
    return channel.unary_unary(METHOD)(b"")


def bidi(channel):
    return channel.stream_stream(METHOD + "s")()


async def test_a_value_and_an_error_pass():
    async def give():
        return 7

    async def fail():
        raise KeyError("mine")

    assert await guarded(give()) == 7
    with pytest.raises(KeyError, match="mine"):
        await guarded(fail())


@pytest.mark.parametrize("operation", [unary, lambda channel: bidi(channel).read()])
async def test_our_own_time_limit_is_ours(channel, operation):
    with anyio.fail_after(LIMIT_S):
        with anyio.move_on_after(0.05) as scope:
            await guarded(operation(channel))
        assert scope.cancelled_caught


async def test_our_own_scope_is_ours(channel):
    with anyio.fail_after(LIMIT_S), anyio.CancelScope() as scope:
        scope.cancel()
        await guarded(bidi(channel).read())
    assert scope.cancelled_caught


@pytest.mark.parametrize("end", ["call", "channel"])
async def test_a_call_that_another_task_ends_does_not_end_the_task_group(channel, end):
    """Without the guard the reader's CancelledError would take the whole group with it, silently."""
    call, events = bidi(channel), []

    async def read():
        try:
            await guarded(call.read())
        except RpcOverError:
            events.append("over")
        await anyio.sleep(0.01)
        events.append("reader went on")

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.02)
            if end == "call":
                call.cancel()
            else:
                await guarded(channel.close())
            await anyio.sleep(0.02)
            events.append("host went on")
    assert sorted(events) == ["host went on", "over", "reader went on"]


async def test_what_happens_without_the_guard(channel):
    """The very reason for it: if this fails, grpc.aio has changed, and the guard can go."""
    call, went_on = bidi(channel), []

    async def read():
        await call.read()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.02)
            call.cancel()
            await anyio.sleep(0.5)
            went_on.append("host")
    assert not went_on


async def test_a_native_cancellation_is_passed_on(channel):
    """asyncio's own `task.cancel()`: grpc.aio ends our server-side handlers in this way."""
    started = anyio.Event()

    async def read():
        started.set()
        await guarded(bidi(channel).read())

    task = asyncio.get_running_loop().create_task(read())
    await started.wait()
    await anyio.sleep(0.02)
    task.cancel()
    with anyio.fail_after(LIMIT_S):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_a_write_after_the_end_is_over(channel):
    call = bidi(channel)
    await guarded(call.write(b"1"))
    call.cancel()
    with pytest.raises(RpcOverError):
        await guarded(call.write(b"2"))


async def test_a_write_after_the_server_has_ended_it(channel):
    call = bidi(channel)
    await guarded(call.done_writing())
    with anyio.fail_after(LIMIT_S):
        assert await guarded(call.read()) == b""
        assert await guarded(call.read()) is grpc.aio.EOF
    with pytest.raises((RpcOverError, asyncio.InvalidStateError)) as caught:
        await guarded(call.write(b"2"))
    assert caught.type is RpcOverError
