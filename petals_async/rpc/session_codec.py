"""Values of `core/` to protobuf messages and back.

Decoding raises only for what can't be expressed as a value (an unknown enum, a message without its oneof, a
span that is none); all else is checked by whoever uses the value, so that both transports check alike.
"""

from __future__ import annotations

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
from petals_async.errors import RemoteProtocolError, RequestError
from petals_async.rpc.scalars import dtype_name, dtype_number, duration, seconds, span_from_proto, span_to_proto
from petals_async.v1 import block_service_pb2 as block_pb
from petals_async.v1 import tensor_pb2 as tensor_pb

_STEP_STATE_TO_PROTO = {
    StepState.RECEIVING: block_pb.STEP_STATE_RECEIVING,
    StepState.QUEUED: block_pb.STEP_STATE_QUEUED,
    StepState.RUNNING: block_pb.STEP_STATE_RUNNING,
}
_STEP_STATE_FROM_PROTO = {number: state for state, number in _STEP_STATE_TO_PROTO.items()}


def _fill_tensor(message: tensor_pb.Tensor, spec: TensorSpec, data: bytes | None) -> None:
    message.data_type = dtype_number(spec.dtype)
    message.shape.extend(spec.shape)
    if data is not None:
        message.data = data


def _tensor_from_proto(message: tensor_pb.Tensor) -> tuple[TensorSpec, bytes | None]:
    spec = TensorSpec(dtype_name(message.data_type), tuple(message.shape))
    return spec, message.data if message.HasField("data") else None


def request_to_proto(message: ClientMessage) -> block_pb.RunSessionRequest:
    """Return a client message's protobuf."""
    match message:
        case Step():
            request = block_pb.RunSessionRequest()
            _fill_step(request.step, message)
            return request
        case Part(byte_offset, data):
            return block_pb.RunSessionRequest(part=tensor_pb.Part(byte_offset=byte_offset, data=data))
        case OpenSession():
            return block_pb.RunSessionRequest(open=_open_to_proto(message))
        case CloseSession():
            return block_pb.RunSessionRequest(close=block_pb.CloseStream())


def _fill_step(message: block_pb.Step, step: Step) -> None:
    message.step_id = step.step_id
    message.token_offset = step.token_offset
    message.num_tokens = step.num_tokens
    if step.row_indices:
        message.row_indices.extend(step.row_indices)
    if step.num_outputs is not None:
        message.num_outputs = step.num_outputs
    if step.chunk_tokens:
        message.chunk_tokens.extend(step.chunk_tokens)
    if step.tensor is not None:
        _fill_tensor(message.hidden_states, step.tensor, step.data)


def _open_to_proto(message: OpenSession) -> block_pb.OpenSession:
    fork = message.fork
    return block_pb.OpenSession(
        session_id=message.session_id,
        model_fingerprint=message.model_fingerprint,
        span=span_to_proto(message.span),
        batch_size=message.batch_size,
        max_tokens=message.max_tokens,
        adapter=message.adapter,
        data_type=dtype_number(message.wire_dtype),
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
        tuple(message.chunk_tokens),
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
            response = block_pb.RunSessionResponse()
            _fill_result(response.result, message)
            return response
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


def _fill_result(message: block_pb.StepResult, result: Result) -> None:
    message.step_id = result.step_id
    message.token_offset = result.token_offset
    message.position = result.position
    message.queue_time.FromNanoseconds(round(result.queue_s * 1e9))
    message.compute_time.FromNanoseconds(round(result.compute_s * 1e9))
    if result.tensor is not None:
        _fill_tensor(message.hidden_states, result.tensor, result.data)


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
