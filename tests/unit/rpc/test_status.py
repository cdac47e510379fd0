"""Each error of our tree through a real gRPC round trip, and back; and statuses that a hostile peer may send."""

import socket
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from petals_async import errors
from petals_async.core.messages import Part
from petals_async.core.reasons import ERROR_OF_REASON, error_from_reason
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.rpc.block_servicer import BlockServicer
from petals_async.rpc.server import serve_blocks
from petals_async.rpc.status import DETAILS_KEY, code_of
from petals_async.v1 import block_service_pb2_grpc as pb_grpc

CODES = grpc.StatusCode


class Raises:
    """A block service whose streams end with one error."""

    def __init__(self, error):
        self.error = error

    async def run_session(self, stream):
        raise self.error


class Aborts(pb_grpc.BlockServiceServicer):
    """Ends every stream with one bare status."""

    def __init__(self, code, message, trailing):
        self.status = (code, message, trailing)

    async def RunSession(self, request_iterator, context):
        await context.abort(*self.status)
        yield


@asynccontextmanager
async def stream_of(servicer):
    async with (
        serve_blocks(servicer, "127.0.0.1", 0) as server,
        GrpcConnector().connect(f"127.0.0.1:{server.port}") as channel,
        channel.open_stream() as stream,
    ):
        yield stream


async def round_trip(error):
    servicer = BlockServicer()
    servicer.service = Raises(error)
    async with stream_of(servicer) as stream:
        with pytest.raises(errors.PetalsAsyncError) as caught:
            await stream.receive()
    return caught.value


async def received(code, message="words", trailing=()):
    async with stream_of(Aborts(code, message, trailing)) as stream:
        with pytest.raises(errors.PetalsAsyncError) as caught:
            await stream.receive()
    return caught.value


@pytest.mark.parametrize("reason", sorted(ERROR_OF_REASON))
async def test_each_reason_comes_back_as_it_was(reason):
    sent = error_from_reason(
        reason, f"{reason}: ümläuts, 100 %", server="", position=17, next_step_id=2**40, retry_after_s=2.25
    )
    back = await round_trip(sent)
    assert type(back) is type(sent) is ERROR_OF_REASON[reason]
    assert (back.reason, back.message) == (reason, sent.message)
    for name in ("position", "next_step_id", "retry_after_s"):
        assert getattr(back, name, None) == getattr(sent, name, None)
    if isinstance(back, errors.PeerError):
        assert back.server.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ServerUnavailableError("", reason="NOT_SERVING"), CODES.UNAVAILABLE),
        (errors.ServerUnavailableError("", reason="SUPERSEDED"), CODES.ABORTED),
        (errors.ServerDrainingError(""), CODES.UNAVAILABLE),
        (errors.ServerOverloadedError("", reason="KV_EXHAUSTED"), CODES.RESOURCE_EXHAUSTED),
        (errors.ServerOverloadedError("", reason="QUEUE_FULL"), CODES.RESOURCE_EXHAUSTED),
        (errors.RequestError("", reason="BAD_SHAPE"), CODES.INVALID_ARGUMENT),
        (errors.RequestError("", reason="WRONG_MODEL"), CODES.FAILED_PRECONDITION),
        (errors.RequestError("", reason="BAD_SPAN"), CODES.OUT_OF_RANGE),
        (errors.RequestError("", reason="NOT_FOUND"), CODES.NOT_FOUND),
        (errors.LengthExceededError(""), CODES.OUT_OF_RANGE),
        (errors.AuthError(""), CODES.UNAUTHENTICATED),
        (errors.AuthError("", reason="PERMISSION_DENIED"), CODES.PERMISSION_DENIED),
    ],
)
def test_codes(error, code):
    """The protocol's table of errors."""
    assert code_of(error) is code


@pytest.mark.parametrize("letter", ["x", "é", "🦀"])
async def test_a_very_long_message_is_cut(letter):
    back = await round_trip(errors.RequestError(letter * 100_000, reason="BAD_SHAPE"))
    assert (type(back), back.reason) == (errors.RequestError, "BAD_SHAPE")
    assert back.message.startswith(letter * 100)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODES.UNAVAILABLE, errors.ServerUnavailableError),
        (CODES.CANCELLED, errors.ServerUnavailableError),
        (CODES.DEADLINE_EXCEEDED, errors.ServerUnavailableError),
        (CODES.ABORTED, errors.ServerUnavailableError),
        (CODES.RESOURCE_EXHAUSTED, errors.ServerUnavailableError),
        (CODES.UNKNOWN, errors.RemoteProtocolError),
        (CODES.UNIMPLEMENTED, errors.RemoteProtocolError),
        (CODES.INTERNAL, errors.RemoteProtocolError),
        (CODES.INVALID_ARGUMENT, errors.RequestError),
        (CODES.OUT_OF_RANGE, errors.LengthExceededError),
        (CODES.UNAUTHENTICATED, errors.AuthError),
        (CODES.PERMISSION_DENIED, errors.AuthError),
    ],
)
async def test_without_our_details_the_code_decides(code, kind):
    error = await received(code)
    assert type(error) is kind
    assert error.message == "words"


def details(*infos):
    status = status_pb2.Status(code=3, message="words")
    for info in infos:
        detail = any_pb2.Any()
        detail.Pack(info)
        status.details.append(detail)
    return ((DETAILS_KEY, status.SerializeToString()),)


def info(reason, domain="petals_async", **metadata):
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


async def test_somebody_elses_details_are_not_ours():
    trailing = details(error_details_pb2.RetryInfo(), info("EVICTED", domain="proxy"), info("BAD_ROWS"))
    assert (await received(CODES.INVALID_ARGUMENT, trailing=trailing)).reason == "BAD_ROWS"
    assert (
        await received(CODES.UNAVAILABLE, trailing=details(info("EVICTED", domain="proxy")))
    ).reason == "STREAM_LOST"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"position": "many", "next_step_id": "", "retry_after_s": "soon"},
        {"position": "-1", "next_step_id": "-5", "retry_after_s": "-0.5"},
        {"position": "1.5", "next_step_id": "9" * 5000, "retry_after_s": "nan"},
        {"position": "inf", "next_step_id": "1e3", "retry_after_s": "inf"},
    ],
)
async def test_numbers_that_are_none(metadata):
    gap = await received(CODES.FAILED_PRECONDITION, trailing=details(info("OFFSET_GAP", **metadata)))
    assert (type(gap), gap.position, gap.next_step_id) == (errors.OffsetGapError, 0, 1)
    full = await received(CODES.RESOURCE_EXHAUSTED, trailing=details(info("QUEUE_FULL", **metadata)))
    assert (type(full), full.retry_after_s) == (errors.ServerOverloadedError, 1.0)


async def test_details_that_are_no_message():
    error = await received(CODES.UNAVAILABLE, trailing=((DETAILS_KEY, b"\xff\xff\xff"),))
    assert (type(error), error.reason) == (errors.ServerUnavailableError, "STREAM_LOST")
    broken = status_pb2.Status()
    broken.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    error = await received(CODES.UNAVAILABLE, trailing=((DETAILS_KEY, broken.SerializeToString()),))
    assert error.reason == "STREAM_LOST"


async def test_a_reason_that_is_not_in_the_table_falls_back_to_the_code():
    error = await received(CODES.INVALID_ARGUMENT, trailing=details(info("WEATHER")))
    assert (type(error), error.reason) == (errors.RequestError, "BAD_REQUEST")


async def test_nobody_listens():
    with socket.socket() as bound:  # bound, so that nobody else gets the port, but not listening
        bound.bind(("127.0.0.1", 0))
        await fails_to_connect(f"127.0.0.1:{bound.getsockname()[1]}")


async def fails_to_connect(address):
    async with GrpcConnector().connect(address) as channel:
        with pytest.raises(errors.ServerUnavailableError):
            await channel.get_server_info()
        async with channel.open_stream() as stream:
            with pytest.raises(errors.ServerUnavailableError):
                await stream.receive()


async def test_a_stream_that_the_server_ended_well_is_lost():
    class Ends:
        async def run_session(self, stream):
            await stream.receive()

    servicer = BlockServicer()
    servicer.service = Ends()
    async with stream_of(servicer) as stream:
        await stream.send(Part(0, b"anything"))
        with pytest.raises(errors.ServerUnavailableError) as caught:
            await stream.receive()
        assert caught.value.reason == "STREAM_LOST"
        with pytest.raises(errors.ServerUnavailableError):
            await stream.send(Part(0, b"more"))
        with pytest.raises(errors.ServerUnavailableError):
            await stream.receive()
