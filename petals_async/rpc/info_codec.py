"""Server records and held sessions to protobuf messages and back."""

from __future__ import annotations

from petals_async.core.server_info import Limits, ServerInfo, ServerState, SessionInfo
from petals_async.errors import RequestError
from petals_async.rpc.scalars import dtype_name, dtype_number, duration, seconds, span_from_proto, span_to_proto
from petals_async.v1 import block_service_pb2 as block_pb
from petals_async.v1 import server_info_pb2 as info_pb

_STATE_TO_PROTO = {
    ServerState.JOINING: info_pb.SERVER_STATE_JOINING,
    ServerState.SERVING: info_pb.SERVER_STATE_SERVING,
    ServerState.DRAINING: info_pb.SERVER_STATE_DRAINING,
}
_STATE_FROM_PROTO = {number: state for state, number in _STATE_TO_PROTO.items()}


def server_info_to_proto(info: ServerInfo) -> info_pb.ServerInfo:
    """Return a server record's message."""
    return info_pb.ServerInfo(
        server_id=info.server_id,
        name=info.name,
        address=info.address,
        version=info.version,
        model=info.model,
        model_fingerprint=info.model_fingerprint,
        num_blocks=info.num_blocks,
        hidden_size=info.hidden_size,
        span=span_to_proto(info.span),
        data_type=dtype_number(info.dtype),
        state=_STATE_TO_PROTO[info.state],
        block_digests=info.block_digests,
        numeric_fingerprint=info.numeric_fingerprint,
        exact=info.exact,
        limits=info_pb.Limits(
            max_step_tokens=info.limits.max_step_tokens,
            max_session_tokens=info.limits.max_session_tokens,
            max_batch_size=info.limits.max_batch_size,
            max_in_flight_steps=info.limits.max_in_flight_steps,
        ),
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_free_tokens=info.kv_free_tokens,
        block_step_seconds=info.block_step_s,
    )


def server_info_from_proto(message: info_pb.ServerInfo) -> ServerInfo:
    """Return a server record's value.

    Raises:
        RequestError: Its span is none (BAD_SPAN), or its state is unknown.
    """
    state = _STATE_FROM_PROTO.get(message.state)
    if state is None:
        raise RequestError(f"server {message.server_id!r} has the unknown state {message.state}")
    limits = message.limits
    return ServerInfo(
        server_id=message.server_id,
        name=message.name,
        address=message.address,
        version=message.version,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        num_blocks=message.num_blocks,
        hidden_size=message.hidden_size,
        span=span_from_proto(message.span),
        dtype=dtype_name(message.data_type),
        state=state,
        block_digests=tuple(message.block_digests),
        numeric_fingerprint=message.numeric_fingerprint,
        exact=message.exact,
        limits=Limits(
            limits.max_step_tokens,
            limits.max_session_tokens,
            limits.max_batch_size,
            limits.max_in_flight_steps,
        ),
        kv_capacity_tokens=message.kv_capacity_tokens,
        kv_free_tokens=message.kv_free_tokens,
        block_step_s=message.block_step_seconds,
    )


def session_info_to_proto(info: SessionInfo) -> block_pb.Session:
    """Return a held session's message."""
    return block_pb.Session(
        handle=info.handle,
        span=span_to_proto(info.span),
        batch_size=info.batch_size,
        position=info.position,
        max_tokens=info.max_tokens,
        kv_bytes=info.kv_bytes,
        age=duration(info.age_s),
        idle_time=duration(info.idle_s),
        connected=info.connected,
        principal=info.principal,
    )


def session_info_from_proto(message: block_pb.Session) -> SessionInfo:
    """Return a held session's value. Raises RequestError (BAD_SPAN)."""
    return SessionInfo(
        handle=message.handle,
        span=span_from_proto(message.span),
        batch_size=message.batch_size,
        position=message.position,
        max_tokens=message.max_tokens,
        kv_bytes=message.kv_bytes,
        age_s=seconds(message.age),
        idle_s=seconds(message.idle_time),
        connected=message.connected,
        principal=message.principal,
    )
