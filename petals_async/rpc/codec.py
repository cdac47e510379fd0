"""Values of `core/` to protobuf messages and back.

Decoding raises only for what can't be expressed as a value (an unknown enum, a message without its oneof, a
span that is none); all else is checked by whoever uses the value, so that both transports check alike.
"""

from __future__ import annotations

from google.protobuf import duration_pb2

from petals_async.core.hidden import TensorSpec
from petals_async.core.messages import (
    ClientMessage,
    CloseSession,
    Draining,
    ForkSource,
    Opened,
    OpenSession,
    Part,
    Progress,
    Refused,
    Result,
    ServerMessage,
    Step,
    StepState,
)
from petals_async.core.server_info import Limits, ServerInfo, ServerState, SessionInfo
from petals_async.core.span import Span
from petals_async.errors import RemoteProtocolError, RequestError
from petals_async.v1 import block_service_pb2 as block_pb
from petals_async.v1 import server_info_pb2 as info_pb
from petals_async.v1 import tensor_pb2 as tensor_pb

_TYPE_OF_NAME = {
    "float32": tensor_pb.DATA_TYPE_FLOAT32,
    "float16": tensor_pb.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb.DATA_TYPE_BFLOAT16,
}
_NAME_OF_TYPE = {number: name for name, number in _TYPE_OF_NAME.items()}
_STATE_TO_PROTO = {
    ServerState.JOINING: info_pb.SERVER_STATE_JOINING,
    ServerState.SERVING: info_pb.SERVER_STATE_SERVING,
    ServerState.DRAINING: info_pb.SERVER_STATE_DRAINING,
}
_STATE_FROM_PROTO = {number: state for state, number in _STATE_TO_PROTO.items()}
_STEP_STATE_TO_PROTO = {
    StepState.RECEIVING: block_pb.STEP_STATE_RECEIVING,
    StepState.QUEUED: block_pb.STEP_STATE_QUEUED,
    StepState.RUNNING: block_pb.STEP_STATE_RUNNING,
}
_STEP_STATE_FROM_PROTO = {number: state for state, number in _STEP_STATE_TO_PROTO.items()}


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


def _dtype_number(name: str) -> tensor_pb.DataType.ValueType:
    return _TYPE_OF_NAME.get(name, tensor_pb.DATA_TYPE_UNSPECIFIED)


def span_to_proto(span: Span) -> info_pb.Span:
    """Return a span's message."""
    return info_pb.Span(start=span.start, end=span.end)


def span_from_proto(message: info_pb.Span) -> Span:
    """Return a message's span. Raises RequestError (BAD_SPAN)."""
    return Span(message.start, message.end)


def _tensor_to_proto(spec: TensorSpec, data: bytes | None) -> tensor_pb.Tensor:
    return tensor_pb.Tensor(data_type=_dtype_number(spec.dtype), shape=spec.shape, data=data)


def _tensor_from_proto(message: tensor_pb.Tensor) -> tuple[TensorSpec, bytes | None]:
    spec = TensorSpec(dtype_name(message.data_type), tuple(message.shape))
    return spec, message.data if message.HasField("data") else None


def request_to_proto(message: ClientMessage) -> block_pb.RunSessionRequest:
    """Return a client message's protobuf."""
    match message:
        case Step():
            return block_pb.RunSessionRequest(step=_step_to_proto(message))
        case Part(byte_offset, data):
            return block_pb.RunSessionRequest(part=tensor_pb.Part(byte_offset=byte_offset, data=data))
        case OpenSession():
            return block_pb.RunSessionRequest(open=_open_to_proto(message))
        case CloseSession():
            return block_pb.RunSessionRequest(close=block_pb.CloseStream())


def _step_to_proto(step: Step) -> block_pb.Step:
    message = block_pb.Step(
        step_id=step.step_id,
        token_offset=step.token_offset,
        num_tokens=step.num_tokens,
        row_indices=step.row_indices,
        num_outputs=step.num_outputs,
    )
    if step.tensor is not None:
        message.hidden_states.CopyFrom(_tensor_to_proto(step.tensor, step.data))
    return message


def _open_to_proto(message: OpenSession) -> block_pb.OpenSession:
    fork = message.fork
    return block_pb.OpenSession(
        session_id=message.session_id,
        model_fingerprint=message.model_fingerprint,
        span=span_to_proto(message.span),
        batch_size=message.batch_size,
        max_tokens=message.max_tokens,
        adapter=message.adapter,
        data_type=_dtype_number(message.wire_dtype),
        resume=message.resume,
        fork_source=None
        if fork is None
        else block_pb.ForkSource(session_id=fork.session_id, max_tokens=fork.max_tokens),
    )


def request_from_proto(message: block_pb.RunSessionRequest) -> ClientMessage:
    """Return a client message's value.

    Raises:
        RequestError: The message is empty or of a newer kind, or its span is none.
    """
    match message.WhichOneof("message"):
        case "step":
            return _step_from_proto(message.step)
        case "part":
            return Part(message.part.byte_offset, message.part.data)
        case "open":
            return _open_from_proto(message.open)
        case "close":
            return CloseSession()
        case _:
            raise RequestError("a message must be one of open, step, part, close")


def _step_from_proto(message: block_pb.Step) -> Step:
    tensor, data = None, None
    if message.HasField("hidden_states"):
        tensor, data = _tensor_from_proto(message.hidden_states)
    return Step(
        message.step_id,
        message.token_offset,
        message.num_tokens,
        tensor,
        data,
        tuple(message.row_indices),
        message.num_outputs if message.HasField("num_outputs") else None,
    )


def _open_from_proto(message: block_pb.OpenSession) -> OpenSession:
    fork = None
    if message.HasField("fork_source"):
        fork = ForkSource(message.fork_source.session_id, message.fork_source.max_tokens)
    return OpenSession(
        session_id=message.session_id,
        model_fingerprint=message.model_fingerprint,
        span=span_from_proto(message.span),
        batch_size=message.batch_size,
        max_tokens=message.max_tokens,
        wire_dtype=dtype_name(message.data_type),
        adapter=message.adapter,
        resume=message.resume,
        fork=fork,
    )


def response_to_proto(message: ServerMessage) -> block_pb.RunSessionResponse:
    """Return a server message's protobuf."""
    match message:
        case Result():
            return block_pb.RunSessionResponse(result=_result_to_proto(message))
        case Part(byte_offset, data):
            return block_pb.RunSessionResponse(part=tensor_pb.Part(byte_offset=byte_offset, data=data))
        case Opened():
            opened = block_pb.SessionOpened(
                position=message.position,
                next_step_id=message.next_step_id,
                lease=duration(message.lease_s),
                progress_interval=duration(message.progress_interval_s),
            )
            return block_pb.RunSessionResponse(opened=opened)
        case Progress(step_id, state, tokens_done):
            progress = block_pb.StepProgress(
                step_id=step_id, state=_STEP_STATE_TO_PROTO[state], tokens_done=tokens_done
            )
            return block_pb.RunSessionResponse(progress=progress)
        case Refused():
            return block_pb.RunSessionResponse(refused=_refused_to_proto(message))
        case Draining(deadline_s):
            draining = block_pb.ServerDraining(deadline=duration(deadline_s))
            return block_pb.RunSessionResponse(draining=draining)


def _result_to_proto(result: Result) -> block_pb.StepResult:
    message = block_pb.StepResult(
        step_id=result.step_id,
        token_offset=result.token_offset,
        position=result.position,
        queue_time=duration(result.queue_s),
        compute_time=duration(result.compute_s),
    )
    if result.tensor is not None:
        message.hidden_states.CopyFrom(_tensor_to_proto(result.tensor, result.data))
    return message


def _refused_to_proto(refused: Refused) -> block_pb.StepRefused:
    return block_pb.StepRefused(
        step_id=refused.step_id,
        reason=refused.reason,
        message=refused.message,
        position=refused.position,
        next_step_id=refused.next_step_id,
        retry_after=duration(refused.retry_after_s),
    )


def response_from_proto(message: block_pb.RunSessionResponse) -> ServerMessage:
    """Return a server message's value.

    Raises:
        RemoteProtocolError: The message is empty or of a newer kind.
    """
    match message.WhichOneof("message"):
        case "result":
            return _result_from_proto(message.result)
        case "part":
            return Part(message.part.byte_offset, message.part.data)
        case "progress":
            progress = message.progress
            state = _STEP_STATE_FROM_PROTO.get(progress.state, StepState.QUEUED)
            return Progress(progress.step_id, state, progress.tokens_done)
        case "refused":
            return _refused_from_proto(message.refused)
        case "opened":
            opened = message.opened
            return Opened(
                opened.position,
                opened.next_step_id,
                seconds(opened.lease),
                seconds(opened.progress_interval),
            )
        case "draining":
            return Draining(seconds(message.draining.deadline))
        case _:
            raise RemoteProtocolError("a message of an unknown kind")


def _result_from_proto(message: block_pb.StepResult) -> Result:
    tensor, data = None, None
    if message.HasField("hidden_states"):
        tensor, data = _tensor_from_proto(message.hidden_states)
    return Result(
        message.step_id,
        message.token_offset,
        message.position,
        tensor,
        data,
        seconds(message.queue_time),
        seconds(message.compute_time),
    )


def _refused_from_proto(message: block_pb.StepRefused) -> Refused:
    return Refused(
        message.step_id,
        message.reason,
        message.message,
        message.position,
        message.next_step_id,
        seconds(message.retry_after),
    )


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
        data_type=_dtype_number(info.dtype),
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
