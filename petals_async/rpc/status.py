"""Errors of our tree to gRPC status and back: the one table.

A status carries a `google.rpc.ErrorInfo` with the stable reason, the domain `petals_async` and metadata.
Source: AIP-193 (https://google.aip.dev/193), google/rpc/error_details.proto.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from petals_async.core.reasons import ERROR_OF_REASON, error_from_reason
from petals_async.errors import (
    AuthError,
    LengthExceededError,
    PetalsAsyncError,
    PositionError,
    RequestError,
    ServerOverloadedError,
    ServerUnavailableError,
)
from petals_async.rpc.guard import guarded

DOMAIN = "petals_async"
DETAILS_KEY = "grpc-status-details-bin"

MAX_MESSAGE_CHARS = 400
"""Longer messages are cut: a status travels in HTTP/2 headers of 8 KiB at most; else the RPC is just broken off."""

_CODE_OF_REASON = {
    "WRONG_MODEL": grpc.StatusCode.FAILED_PRECONDITION,
    "LENGTH_EXCEEDED": grpc.StatusCode.OUT_OF_RANGE,
    "BAD_SPAN": grpc.StatusCode.OUT_OF_RANGE,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "SUPERSEDED": grpc.StatusCode.ABORTED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
}

_CODE_OF_CLASS: list[tuple[type[PetalsAsyncError], grpc.StatusCode]] = [
    (LengthExceededError, grpc.StatusCode.OUT_OF_RANGE),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (AuthError, grpc.StatusCode.UNAUTHENTICATED),
    (ServerOverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PositionError, grpc.StatusCode.FAILED_PRECONDITION),
    (PetalsAsyncError, grpc.StatusCode.UNAVAILABLE),
]

_REASON_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: "BAD_REQUEST",
    grpc.StatusCode.OUT_OF_RANGE: "LENGTH_EXCEEDED",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.PERMISSION_DENIED: "PERMISSION_DENIED",
    grpc.StatusCode.UNIMPLEMENTED: "BAD_REPLY",
    grpc.StatusCode.UNKNOWN: "BAD_REPLY",
    grpc.StatusCode.INTERNAL: "BAD_REPLY",
}


_LOCAL_FAILURE = "Internal error from Core"
"""What grpc.aio says (as INTERNAL) of a write that met the end of its stream; it hides the server's status."""


def code_of(error: PetalsAsyncError) -> grpc.StatusCode:
    """Return the status code under which an error travels."""
    if error.reason in _CODE_OF_REASON:
        return _CODE_OF_REASON[error.reason]
    return next(code for kind, code in _CODE_OF_CLASS if isinstance(error, kind))


def _metadata_of(error: PetalsAsyncError) -> dict[str, str]:
    if isinstance(error, PositionError):
        return {"position": str(error.position), "next_step_id": str(error.next_step_id)}
    if isinstance(error, ServerOverloadedError):
        return {"retry_after_s": str(error.retry_after_s)}
    return {}


async def abort_with(context: Any, error: PetalsAsyncError) -> NoReturn:
    """End an RPC with the status of an error of our tree; never returns."""
    code, message = code_of(error), error.message[:MAX_MESSAGE_CHARS]
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_metadata_of(error))
    detail = any_pb2.Any()
    detail.Pack(info)
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[detail])
    await guarded(context.abort(code, message, ((DETAILS_KEY, status.SerializeToString()),)))
    raise AssertionError("abort returned")


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # a peer may have written anything
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return info
    return None


def error_from(error: grpc.aio.AioRpcError, *, server: str = "") -> PetalsAsyncError:
    """Return the error of our tree that a status stands for; without our details, the code decides."""
    message = error.details() or error.code().name
    if message == _LOCAL_FAILURE:
        return stream_over(server)
    info = _error_info(error)
    if info is None or info.reason not in ERROR_OF_REASON:
        reason = _REASON_OF_CODE.get(error.code(), "STREAM_LOST")
        return error_from_reason(reason, message, server=server)
    metadata = info.metadata
    return error_from_reason(
        info.reason,
        message,
        server=server,
        position=_number(metadata.get("position"), int, 0),
        next_step_id=_number(metadata.get("next_step_id"), int, 1),
        retry_after_s=_number(metadata.get("retry_after_s"), float, 1.0),
    )


def _number(text: str | None, kind: type[Any], default: Any) -> Any:
    try:
        number = default if text is None else kind(text)
    except ValueError:
        return default
    return number if 0 <= number < math.inf else default


def stream_over(server: str) -> ServerUnavailableError:
    """Return the error for an RPC that ended underneath an operation, without a status."""
    return ServerUnavailableError("the stream is over", reason="STREAM_LOST", server=server)
