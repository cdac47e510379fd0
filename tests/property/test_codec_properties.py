"""Values to protobuf, through bytes, and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petals_async.core.hidden import TensorSpec
from petals_async.core.messages import (
    CloseSession,
    Draining,
    ForkSource,
    Opened,
    OpenSession,
    Part,
    Progress,
    Refused,
    Result,
    Step,
    StepState,
)
from petals_async.core.server_info import Limits, ServerInfo, ServerState, SessionInfo
from petals_async.core.span import Span
from petals_async.errors import RemoteProtocolError, RequestError
from petals_async.rpc import info_codec, scalars, session_codec
from petals_async.v1 import block_service_pb2 as pb
from petals_async.v1 import server_info_pb2 as info_pb

DTYPES = ("float32", "float16", "bfloat16")
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
blobs = st.binary(max_size=20)
words = st.text(max_size=12)
durations = st.integers(0, 10**6).map(lambda millis: millis / 1000)
specs = st.builds(TensorSpec, st.sampled_from(DTYPES), st.lists(int64, max_size=4).map(tuple))
spans = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))
tensors = st.one_of(
    st.tuples(st.none(), st.none()),
    st.tuples(specs, st.none()),
    st.tuples(specs, blobs),
    st.tuples(specs, st.just(b"")),
)
steps = st.builds(
    lambda tensor, *rest: Step(*rest[:3], *tensor, *rest[3:]),
    tensors,
    int64,
    int32,
    int32,
    st.lists(int32, max_size=4).map(tuple),
    st.one_of(st.none(), st.just(0), int32),
)
opens = st.builds(
    OpenSession,
    session_id=blobs,
    model_fingerprint=words,
    span=spans,
    batch_size=int32,
    max_tokens=int32,
    wire_dtype=st.sampled_from(DTYPES),
    adapter=words,
    resume=st.booleans(),
    fork=st.one_of(st.none(), st.builds(ForkSource, blobs, int32)),
)
parts = st.builds(Part, int64, blobs)
results = st.builds(
    lambda tensor, *rest: Result(*rest[:3], *tensor, *rest[3:]), tensors, int64, int32, int32, durations, durations
)
responses = st.one_of(
    results,
    parts,
    st.builds(Opened, int32, int64, durations, durations),
    st.builds(Progress, int64, st.sampled_from(StepState), int32),
    st.builds(Refused, int64, words, words, int32, int64, durations),
    st.builds(Draining, durations),
)
infos = st.builds(
    ServerInfo,
    server_id=words,
    name=words,
    address=words,
    version=words,
    model=words,
    model_fingerprint=words,
    num_blocks=int32,
    hidden_size=int32,
    span=spans,
    dtype=st.sampled_from(DTYPES),
    state=st.sampled_from(ServerState),
    block_digests=st.lists(words, max_size=3).map(tuple),
    numeric_fingerprint=words,
    exact=st.booleans(),
    limits=st.builds(Limits, int32, int32, int32, int32),
    kv_capacity_tokens=int64,
    kv_free_tokens=int64,
    block_step_s=st.floats(0, 1e6),
)
session_infos = st.builds(
    SessionInfo, words, spans, int32, int32, int32, int64, durations, durations, st.booleans(), words
)


def through(message):
    """The same message as another process reads it."""
    return type(message).FromString(message.SerializeToString())


@given(st.one_of(steps, opens, parts, st.just(CloseSession())))
def test_client_messages(message):
    assert session_codec.request_from_proto(through(session_codec.request_to_proto(message))) == message


@given(responses)
def test_server_messages(message):
    back = session_codec.response_from_proto(through(session_codec.response_to_proto(message)))
    assert type(back) is type(message)
    for name in message.__slots__:
        got, wanted = getattr(back, name), getattr(message, name)
        assert got == (pytest.approx(wanted, abs=1e-9) if name.endswith("_s") else wanted)


@given(infos)
def test_server_records(info):
    assert info_codec.server_info_from_proto(through(info_codec.server_info_to_proto(info))) == info


@settings(max_examples=50)
@given(session_infos)
def test_held_sessions(info):
    back = info_codec.session_info_from_proto(through(info_codec.session_info_to_proto(info)))
    assert (back.age_s, back.idle_s) == (pytest.approx(info.age_s), pytest.approx(info.idle_s))
    for name in set(info.__slots__) - {"age_s", "idle_s"}:
        assert getattr(back, name) == getattr(info, name)


@given(st.integers(0, 2**40))
def test_durations_have_sound_nanos(nanos):
    message = scalars.duration(nanos / 1e9)
    assert 0 <= message.nanos < 10**9
    assert scalars.seconds(message) == pytest.approx(nanos / 1e9, abs=1e-9)


@pytest.mark.parametrize("data", [b"", b"\xfa\x01\x02ab"])  # nothing; and field 31, of a newer version
def test_messages_that_are_none(data):
    with pytest.raises(RequestError, match="one of open, step, part, close"):
        session_codec.request_from_proto(pb.RunSessionRequest.FromString(data))
    with pytest.raises(RemoteProtocolError, match="unknown kind"):
        session_codec.response_from_proto(pb.RunSessionResponse.FromString(data))


def test_empty_messages_of_each_kind():
    """Everything left out: it becomes a value that the checks refuse, or an error; never a crash."""
    step = session_codec.request_from_proto(pb.RunSessionRequest(step=pb.Step()))
    assert step == Step(0, 0, 0)
    assert session_codec.request_from_proto(pb.RunSessionRequest(close=pb.CloseStream())) == CloseSession()
    with pytest.raises(RequestError) as caught:
        session_codec.request_from_proto(pb.RunSessionRequest(open=pb.OpenSession()))
    assert caught.value.reason == "BAD_SPAN"
    assert session_codec.response_from_proto(pb.RunSessionResponse(opened=pb.SessionOpened())) == Opened(0, 0, 0.0, 0.0)
    assert session_codec.response_from_proto(pb.RunSessionResponse(result=pb.StepResult())) == Result(0, 0, 0)
    assert session_codec.response_from_proto(pb.RunSessionResponse(refused=pb.StepRefused())) == Refused(
        0, "", "", 0, 0
    )
    assert session_codec.response_from_proto(pb.RunSessionResponse(draining=pb.ServerDraining())) == Draining(0.0)


def test_unknown_numbers_of_enums():
    message = pb.RunSessionRequest(step=pb.Step(step_id=1, num_tokens=1))
    message.step.hidden_states.data_type = 77
    assert session_codec.request_from_proto(message).tensor == TensorSpec("unknown(77)", ())
    with pytest.raises(RequestError):
        _ = session_codec.request_from_proto(message).tensor.num_bytes
    record = info_pb.ServerInfo(server_id="x", span=info_pb.Span(start=0, end=1))
    for state in (0, 77):
        record.state = state
        with pytest.raises(RequestError, match=f"unknown state {state}"):
            info_codec.server_info_from_proto(record)
    progress = pb.RunSessionResponse(progress=pb.StepProgress(step_id=3, state=77))
    assert session_codec.response_from_proto(progress) == Progress(3, StepState.QUEUED)


def test_absent_and_empty_are_told_apart():
    spec = TensorSpec("float32", (1, 0, 2))
    for step in (Step(1, 0, 0, spec, b""), Step(1, 0, 0, spec, None), Step(1, 0, 0), Step(1, 0, 0, num_outputs=0)):
        assert session_codec.request_from_proto(through(session_codec.request_to_proto(step))) == step
