"""The wire contract as somebody else sees it: buf, a fresh protoc run, reflection, and clients made by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import grpc
import pytest
from block_targets import HIDDEN_SIZE, SPAN, Served, grpc_target, reference
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from petals_async.core.hidden import HiddenStates
from petals_async.testing.conformance import make_states

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")
GENERATOR = ROOT / ".venv-gen" / "bin" / "python"
GENERATED = ROOT / "petals_async" / "v1"
TIMEOUT_S = 5.0
HIDDEN = make_states("float32", 1, 0, 2, HIDDEN_SIZE)

RAW_CLIENT = '''
"""A client that knows nothing but the .proto files; runs on the generator's own grpcio and protobuf."""
import queue
import sys
import google.protobuf
import grpc
from petals_async.v1 import block_service_pb2 as pb
from petals_async.v1 import block_service_pb2_grpc as pb_grpc

address, data = sys.argv[1], bytes.fromhex(sys.argv[2])
with grpc.insecure_channel(address) as channel:
    stub = pb_grpc.BlockServiceStub(channel)
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5).server
    shape = [1, len(data) // 4 // server.hidden_size, server.hidden_size]
    messages = [
        pb.RunSessionRequest(open=pb.OpenSession(
            session_id=bytes(16), model_fingerprint=server.model_fingerprint, span=server.span,
            batch_size=1, max_tokens=8, data_type=server.data_type)),
        pb.RunSessionRequest(step=pb.Step(step_id=1, token_offset=0, num_tokens=shape[1])),
        pb.RunSessionRequest(close=pb.CloseStream()),
    ]
    messages[1].step.hidden_states.data_type = server.data_type
    messages[1].step.hidden_states.shape.extend(shape)
    messages[1].step.hidden_states.data = data
    outbox = queue.SimpleQueue()
    call = stub.RunSession(iter(outbox.get, None), timeout=5)
    outbox.put(messages[0])
    opened = next(call)
    outbox.put(messages[1])
    result = next(call)
    assert (opened.opened.position, opened.opened.next_step_id) == (0, 1), opened
    assert (result.result.step_id, result.result.position) == (1, shape[1]), result
    outbox.put(messages[2])
    assert next(call, None) is None, "close must end the stream"
    outbox.put(None)
    print(google.protobuf.__version__, result.result.hidden_states.data.hex())
'''


def absent(what):
    """Skip with a reason; on CI everything must be there."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}; CI must have it")
    pytest.skip(what)


@pytest.fixture
def buf():
    if not BUF.exists():
        absent("buf is not installed (PyPI: buf-bin)")

    def run(*arguments):
        return subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)

    return run


@pytest.fixture
def generated(tmp_path):
    """A folder with code from a fresh protoc run."""
    if not GENERATOR.exists():
        absent(".venv-gen is missing: `make generate` sets it up")
    sources = sorted(str(path.relative_to(ROOT / "protos")) for path in ROOT.glob("protos/petals_async/v1/*.proto"))
    outputs = [f"--{kind}_out={option}{tmp_path}" for kind, option in OUTPUTS.items()]
    subprocess.run(
        [GENERATOR, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *sources],
        env={**os.environ, "PATH": f"{GENERATOR.parent}:{os.environ['PATH']}"},
        timeout=50,
        check=True,
    )
    return tmp_path


OUTPUTS = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}


@pytest.fixture
async def target():
    async with grpc_target(Served()) as target:
        yield target


def test_buf_lint(buf):
    done = buf("lint")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_buf_format(buf):
    done = buf("format", "-d", "--exit-code")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_there_is_nothing_but_protos():
    assert {path.suffix for path in (ROOT / "protos").rglob("*") if path.is_file()} == {".proto"}


def test_the_committed_code_is_what_protoc_makes(generated):
    fresh = {path.name: path.read_text() for path in (generated / "petals_async" / "v1").iterdir() if path.is_file()}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2*.py*")}
    assert len(fresh) == 16
    assert sorted(committed) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make generate`"


async def test_a_client_from_a_fresh_protoc_run(generated, target):
    script = generated / "raw_client.py"
    script.write_text(RAW_CLIENT)
    done = await anyio.run_process(
        [str(GENERATOR), str(script), target.address, HIDDEN.data.hex()], cwd=generated, env={"PATH": "/usr/bin:/bin"}
    )
    version, outputs = done.stdout.decode().split()
    assert version == "6.33.6", "the generator's protobuf is another one than ours, which is the point"
    assert bytes.fromhex(outputs) == reference(HIDDEN, SPAN).data


async def files_of(channel, symbol):
    """Return the file descriptors behind a symbol, dependencies and all, by reflection."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=TIMEOUT_S)
    found, wanted = {}, [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]
    while wanted:
        await call.write(wanted.pop())
        answer = await call.read()
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            found[file.name] = file
            missing = [name for name in file.dependency if name not in found]
            wanted.extend(reflection_pb2.ServerReflectionRequest(file_by_filename=name) for name in missing)
    call.cancel()
    return found


def pool_of(files):
    """Put files into a pool of their own, dependencies first."""
    pool, done = descriptor_pool.DescriptorPool(), set()

    def add(name):
        if name not in done:
            done.add(name)
            for dependency in files[name].dependency:
                add(dependency)
            pool.Add(files[name])

    for name in files:
        add(name)
    return pool


async def test_a_client_from_reflection_alone(target):
    """Opens a session and runs a step with messages that are built from what the server says of itself."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        pool = pool_of(await files_of(channel, "petals_async.v1.BlockService"))
        method = pool.FindServiceByName("petals_async.v1.BlockService").methods_by_name["RunSession"]
        request, response = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        call = channel.stream_stream(
            "/petals_async.v1.BlockService/RunSession",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )(timeout=TIMEOUT_S)
        opening = request()
        opening.open.session_id = bytes(range(16))
        opening.open.model_fingerprint = "f" * 64
        opening.open.span.start, opening.open.span.end = SPAN.start, SPAN.end
        opening.open.batch_size, opening.open.max_tokens, opening.open.data_type = 1, 8, 1
        await call.write(opening)
        opened = await call.read()
        assert opened.WhichOneof("message") == "opened"
        assert (opened.opened.position, opened.opened.next_step_id) == (0, 1)
        assert (opened.opened.lease.seconds, opened.opened.progress_interval.nanos) == (30, 50_000_000)
        step = request()
        step.step.step_id, step.step.num_tokens, step.step.num_outputs = 1, 2, 1
        step.step.hidden_states.data_type, step.step.hidden_states.data = 1, HIDDEN.data
        step.step.hidden_states.shape.extend([1, 2, HIDDEN_SIZE])
        await call.write(step)
        result = (await call.read()).result
        outputs = result.hidden_states
        assert (result.step_id, result.token_offset, result.position) == (1, 0, 2)
        assert list(outputs.shape) == [1, 1, HIDDEN_SIZE]
        assert HiddenStates("float32", tuple(outputs.shape), outputs.data) == reference(HIDDEN, SPAN).slice_tokens(1, 2)
        goodbye = request()
        goodbye.close.SetInParent()
        await call.write(goodbye)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_the_fields_on_the_wire_are_those_of_the_contract(target):
    """Field numbers written out by hand: whoever changes one of them must change this line as well."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        files = await files_of(channel, "petals_async.v1.BlockService")
    messages = {message.name: message for file in files.values() for message in file.message_type}
    numbers = {
        name: {field.name: field.number for field in messages[name].field}
        for name in ("RunSessionRequest", "Step", "Part", "Tensor", "RunSessionResponse", "StepResult", "StepRefused")
    }
    assert numbers == {
        "RunSessionRequest": {"open": 1, "step": 2, "part": 3, "close": 4},
        "Step": {
            "step_id": 1,
            "token_offset": 2,
            "num_tokens": 3,
            "hidden_states": 4,
            "row_indices": 5,
            "num_outputs": 6,
            "chunk_tokens": 7,
        },
        "Part": {"byte_offset": 1, "data": 2},
        "Tensor": {"data_type": 1, "shape": 2, "data": 3},
        "RunSessionResponse": {"opened": 1, "result": 2, "part": 3, "progress": 4, "refused": 5, "draining": 6},
        "StepResult": {
            "step_id": 1,
            "token_offset": 2,
            "position": 3,
            "hidden_states": 4,
            "queue_time": 5,
            "compute_time": 6,
        },
        "StepRefused": {
            "step_id": 1,
            "reason": 2,
            "message": 3,
            "position": 4,
            "next_step_id": 5,
            "retry_after": 6,
        },
    }


async def test_a_step_byte_by_byte(target):
    """No protobuf library at all: the messages' bytes written out, and the reply's searched for the outputs."""

    def field(number, data):
        return bytes([number << 3 | 2, *varint(len(data))]) + data

    def varint(number):
        return [number] if number < 128 else [number & 127 | 128, *varint(number >> 7)]

    def plain(number, value):
        return bytes([number << 3, *varint(value)])

    span = plain(1, SPAN.start) + plain(2, SPAN.end)
    opening = (
        field(1, bytes(range(16))) + field(2, b"f" * 64) + field(3, span) + plain(4, 1) + plain(5, 8) + plain(7, 1)
    )
    shape = bytes([1, 2, HIDDEN_SIZE])
    tensor = plain(1, 1) + field(2, shape) + field(3, HIDDEN.data)
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = channel.stream_stream("/petals_async.v1.BlockService/RunSession")(timeout=TIMEOUT_S)
        await call.write(field(1, opening))
        assert (await call.read())[0] == 1 << 3 | 2
        await call.write(field(2, plain(1, 1) + plain(3, 2) + field(4, tensor)))
        result = await call.read()
        assert result[0] == 2 << 3 | 2
        assert field(3, reference(HIDDEN, SPAN).data) in result
        await call.write(field(4, b""))
        assert await call.read() is grpc.aio.EOF


@pytest.fixture
def curl(buf, target):
    async def run(method, request=""):
        arguments = ["curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", request]
        url = f"http://{target.address}/{method}"
        return json.loads((await anyio.run_process([str(BUF), *arguments, url], cwd=ROOT)).stdout)

    return run


async def test_buf_curl_finds_its_way_by_reflection(curl):
    info = (await curl("petals_async.v1.BlockService/GetServerInfo"))["server"]
    assert (info["span"], info["dataType"], info["state"]) == (
        {"start": SPAN.start, "end": SPAN.end},
        "DATA_TYPE_FLOAT32",
        "SERVER_STATE_SERVING",
    )
    assert await curl("petals_async.v1.BlockService/ListSessions") == {}
    health = await curl("grpc.health.v1.Health/Check", '{"service": "petals_async.v1.BlockService"}')
    assert health == {"status": health_pb2.HealthCheckResponse.ServingStatus.Name(1)}
