"""The small values that every message is made of: durations, data types, spans."""

from __future__ import annotations

from google.protobuf import duration_pb2

from petals_async.core.span import Span
from petals_async.v1 import server_info_pb2 as info_pb
from petals_async.v1 import tensor_pb2 as tensor_pb

_TYPE_OF_NAME = {
    "float32": tensor_pb.DATA_TYPE_FLOAT32,
    "float16": tensor_pb.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb.DATA_TYPE_BFLOAT16,
}
_NAME_OF_TYPE = {number: name for name, number in _TYPE_OF_NAME.items()}


def duration(seconds: float) -> duration_pb2.Duration:
    """Return seconds as a Duration."""
    nanos = round(seconds * 1e9)
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds(value: duration_pb2.Duration) -> float:
    """Return a Duration in seconds."""
    return value.seconds + value.nanos * 1e-9


def dtype_name(number: int) -> str:
    """Return a data type's name; an unknown one as `unknown(N)`, which every check refuses."""
    return _NAME_OF_TYPE.get(number, f"unknown({number})")  # type: ignore[call-overload,no-any-return]


def dtype_number(name: str) -> tensor_pb.DataType.ValueType:
    """Return the number of a data type's name; 0, which is never valid, for an unknown one."""
    return _TYPE_OF_NAME.get(name, tensor_pb.DATA_TYPE_UNSPECIFIED)


def span_to_proto(span: Span) -> info_pb.Span:
    """Return a span's message."""
    return info_pb.Span(start=span.start, end=span.end)


def span_from_proto(message: info_pb.Span) -> Span:
    """Return a message's span. Raises RequestError (BAD_SPAN)."""
    return Span(message.start, message.end)
