"""The command as users run it: real processes, their output, and the codes that they end with."""

import json
import os
import signal
import socket
import statistics
import sys
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path

import anyio
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from petals_async.cli import options as cli_options
from petals_async.cli.coverage import coverage_by_model
from petals_async.cli.local_swarm import split_evenly
from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.span import Span
from petals_async.errors import ConfigurationError
from petals_async.server.options import DTYPES, ServerOptions

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

COMMAND = str(Path(sys.executable).parent / "petals-async")
READY_S = 100
"""How long a start may take on a busy machine; it is 2 to 8 s on an idle one."""

END_S = 10
"""How long an end may take; it is under 1 s."""

HELP_CPU_S = 0.5
COMMANDS = ("", "registry", "serve", "up", "generate", "status")

PROBE = """
import resource, sys
from petals_async.cli.main import main
sys.argv = ["petals-async", *sys.argv[1:]]
try:
    main()
finally:
    heavy = [name for name in ("torch", "transformers", "grpc") if name in sys.modules]
    used = resource.getrusage(resource.RUSAGE_SELF)
    sys.stderr.write(f"\\nprobe {used.ru_utime + used.ru_stime} {heavy}")
"""
"""Runs a command in this process, and says on stderr what it cost and imported."""


async def run(*arguments, limit_s=READY_S, stdin=None):
    """Run the command to its end; return its code, stdout and stderr."""
    with anyio.fail_after(limit_s):
        done = await anyio.run_process([COMMAND, *map(str, arguments)], check=False, input=stdin)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def probe(*arguments):
    """Return a command's code, stdout, CPU seconds, and which heavy modules it imported."""
    done = await anyio.run_process([sys.executable, "-c", PROBE, *arguments], check=False)
    _, cpu_s, heavy = done.stderr.decode().splitlines()[-1].split(" ", 2)
    return done.returncode, done.stdout.decode(), float(cpu_s), heavy


class Running:
    """A command that runs until it is stopped."""

    def __init__(self, process):
        self.process = process
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def line(self):
        """Return the next line of stdout."""
        with anyio.fail_after(READY_S):
            return (await self._stdout.receive_until(b"\n", 10_000)).decode()

    async def event(self):
        return json.loads(await self.line())

    async def end(self, number):
        """Send a signal; return the exit code and the rest of stdout."""
        self.process.send_signal(number)
        with anyio.fail_after(END_S):
            code = await self.process.wait()
        rest = b"" + self._stdout.buffer
        try:
            while True:
                rest += await self.process.stdout.receive()
        except anyio.EndOfStream:
            return code, rest.decode()


@asynccontextmanager
async def running(*arguments):
    async with await anyio.open_process([COMMAND, *map(str, arguments)], stderr=None) as process:
        try:
            yield Running(process)
        finally:
            if process.returncode is None:
                process.kill()


# -- cheap from outside


async def test_help_is_quick_and_imports_nothing_heavy():
    costs = []
    for command in COMMANDS:
        code, text, cpu_s, heavy = await probe(*filter(None, [command, "--help"]))
        assert (code, heavy) == (0, "[]"), command
        assert "Usage: " in text
        costs.append(cpu_s)
    assert statistics.median(costs) < HELP_CPU_S


async def test_module_runs_the_command():
    done = await anyio.run_process([sys.executable, "-m", "petals_async", "--version"])
    assert done.stdout.startswith(b"petals-async ")


def test_defaults_in_help_are_those_of_the_server():
    defaults = {field.name: field.default for field in fields(ServerOptions)}
    assert defaults["listen"] == cli_options.DEFAULT_LISTEN
    assert defaults["dtype"] == cli_options.DEFAULT_DTYPE.value
    assert defaults["device"] == cli_options.DEFAULT_DEVICE
    assert defaults["kv_budget"] == cli_options.DEFAULT_KV_BUDGET
    assert defaults["drain_s"] == cli_options.DEFAULT_DRAIN_S
    assert [name.value for name in cli_options.DtypeName] == list(DTYPES)


# -- wrong input

WRONG_USAGE = [
    (["serve", "{model}", "--dtype", "float99"], "float99"),
    (["serve", "{model}", "--blocks", "five"], "blocks must be START:END"),
    (["serve", "{model}", "--kv-budget", "12parsecs"], "12parsecs"),
    (["serve", "{model}", "--listen", "nowhere"], "HOST:PORT"),
    (["serve", "{model}", "--registry", "etcd://127.0.0.1:2379"], "etcd is not implemented"),
    (["generate", "{model}", "hello", "--registry", "127.0.0.1:70000"], "70000"),
    (["chaos"], "No such command"),
    (["serve", "{model}", "--adapter", "x"], "No such option"),
]
"""Exit code 2."""

FAILURES = [
    (["serve", "/no/such/model"], "/no/such/model"),
    (["serve", "{model}", "--listen", "{taken}"], "the port is in use"),
    (["registry", "--listen", "{taken}"], "the port is in use"),
    (["up", "{model}", "--port", "{taken_port}"], "the port is in use"),
    (["serve", "{model}", "--blocks", "0:7"], "has blocks 0:6"),
    (["up", "{model}", "--servers", "7", "--port", "0"], "6 blocks"),
    (["status", "--registry", "{closed}"], "{closed}"),
    (["status", "--registry", "static:{closed}"], "{closed}"),
    (["generate", "{model}", "hello", "--registry", "{closed}"], "{closed}"),
    (["serve", "{model}", "--kv-budget", "100"], "the budget is 100 B"),
]
"""Exit code 1, with one line on stderr."""


@pytest.fixture
def places(tiny_model):
    """Words to put into arguments: the model, an address that is taken, and one where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        port, closed_port = taken.getsockname()[1], closed.getsockname()[1]
        closed.close()
        yield {
            "model": str(tiny_model),
            "taken": f"127.0.0.1:{port}",
            "taken_port": str(port),
            "closed": f"127.0.0.1:{closed_port}",
        }


async def run_all(cases, places):
    """Run commands, two at a time; return their arguments, the text wanted, code and stderr."""
    limiter, results = anyio.CapacityLimiter(2), []

    async def one(arguments, wanted):
        async with limiter:
            arguments = [argument.format(**places) for argument in arguments]
            code, out, err = await run(*arguments)
            assert out == "", arguments
            results.append((arguments, wanted.format(**places), code, err))

    async with anyio.create_task_group() as tasks:
        for case in cases:
            tasks.start_soon(one, *case)
    return results


async def test_wrong_usage_ends_with_2(places):
    for arguments, wanted, code, err in await run_all(WRONG_USAGE, places):
        assert code == 2, (arguments, err)
        assert wanted in err
        assert "Usage: " in err
        assert "Traceback" not in err


async def test_what_cannot_be_done_ends_with_1_and_one_line(places):
    for arguments, wanted, code, err in await run_all(FAILURES, places):
        lines = err.splitlines()
        assert code == 1, (arguments, err)
        assert lines[-1].startswith("error: "), err
        assert wanted in lines[-1]
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert "Traceback" not in err, arguments


# -- a swarm by hand


async def test_registry_server_status_and_generation(tiny_model, tmp_path):
    async with running("registry", "--listen", "127.0.0.1:0") as registry:
        word, kind, address = (await registry.line()).split()
        assert (word, kind) == ("ready", "registry")
        serve = ("serve", tiny_model, "--registry", address, "--name", "one", "--threads", 1)
        async with running(*serve, "--blocks", "0:6") as server:
            word, server_id, server_address, blocks = (await server.line()).split()
            assert (word, blocks) == ("ready", "blocks=0:6")
            code, out, _, heavy = await probe("status", "--registry", address, "--json")
            assert (code, heavy) == (0, "['grpc']")
            check_status(json.loads(out), server_id, server_address)
            code, out, _ = await run("status", "--registry", address)
            assert code == 0
            assert server_address in out
            assert "complete" in out
            await check_generation(tiny_model, address)
            assert await server.end(signal.SIGTERM) == (0, "")
        code, out, _ = await run("status", "--registry", address)
        assert "no servers" in out
        assert await registry.end(signal.SIGTERM) == (0, "")


def check_status(status, server_id, address):
    (server,) = status["servers"]
    assert (server["name"], server["server_id"], server["address"]) == ("one", server_id, address)
    assert (server["state"], server["reachable"], server["sessions"]) == ("serving", True, [])
    (model,) = status["models"]
    assert model["coverage"] == [{"blocks": "0:6", "servers": 1}]
    assert model["gaps"] == model["conflicts"] == []


async def check_generation(model, registry):
    """The same text, streamed and as JSON; and one that is interrupted, which leaves no session behind."""
    common = ("--registry", registry, "--max-new-tokens", 12)
    outputs = {}

    async def one(name, *arguments, **options):
        outputs[name] = await run("generate", model, *arguments, *common, **options)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, "text", "Hello")
        tasks.start_soon(lambda: one("json", "-", "--json", stdin=b"Hello\n"))
        tasks.start_soon(interrupt_generation, model, registry)
    code, text, err = outputs["text"]
    assert code == 0, err
    result = json.loads(outputs["json"][1])
    assert text == result["text"] + "\n"
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"] == 12
    assert (result["finish_reason"], result["recoveries"], result["exact"]) == ("length", [], True)
    assert result["tokens_per_s"] > 0


async def interrupt_generation(model, registry):
    async with running("generate", model, "Hi", "--registry", registry, "--max-new-tokens", 4000) as generation:
        with anyio.fail_after(READY_S):
            await generation.process.stdout.receive()
        code, _ = await generation.end(signal.SIGINT)
        assert code == 1
    _, out, _ = await run("status", "--registry", registry, "--json")
    (server,) = json.loads(out)["servers"]
    assert 4002 not in {session["max_tokens"] for session in server["sessions"]}


async def test_sigint_while_loading_stops_at_once(tiny_model):
    async with await anyio.open_process([COMMAND, "serve", str(tiny_model)]) as process:
        with anyio.fail_after(READY_S):
            await BufferedByteReceiveStream(process.stderr).receive_until(b"importing torch", 10_000)
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(END_S):
            assert await process.wait() == 0


# -- a swarm with one command


async def ready_events(up, count):
    return [await up.event() for _ in range(count)]


async def test_up_starts_a_dead_server_again_and_ends_all(tiny_model):
    async with running("up", tiny_model, "--servers", 2, "--port", 0, "--json") as up:
        ready = {event["blocks"]: event for event in await ready_events(up, 2)}
        assert set(ready) == {"0:3", "3:6"}
        complete = await up.event()
        assert complete["event"] == "up"
        assert complete["registry"] in complete["command"]
        os.kill(ready["3:6"]["pid"], signal.SIGKILL)
        again = await up.event()
        assert (again["name"], again["blocks"]) == (ready["3:6"]["name"], "3:6")
        assert again["server_id"] != ready["3:6"]["server_id"]
        code, _ = await up.end(signal.SIGTERM)
        assert code == 0
        await wait_until_gone({again["pid"], ready["0:3"]["pid"]})


async def test_nothing_is_left_when_up_is_killed(tiny_model):
    async with running("up", tiny_model, "--servers", 2, "--port", 0, "--json") as up:
        pids = {event["pid"] for event in await ready_events(up, 2)}
        assert (await up.event())["event"] == "up"
        children = {child.pid for child in psutil.Process(up.process.pid).children(recursive=True)}
        assert pids <= children
        await up.end(signal.SIGKILL)
        await wait_until_gone(children)


async def wait_until_gone(pids):
    with anyio.fail_after(END_S):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 - other processes tell nobody
            await anyio.sleep(0.05)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- what is shown, as values


def test_blocks_are_split_evenly():
    assert list(map(str, split_evenly(30, 3))) == ["0:10", "10:20", "20:30"]
    assert list(map(str, split_evenly(7, 3))) == ["0:3", "3:5", "5:7"]
    with pytest.raises(ConfigurationError, match="2 blocks"):
        split_evenly(2, 3)


def info(name, start, end, *digests, state=ServerState.SERVING):
    base = ServerInfo(name, name, f"{name}:1", "0", "m", "f" * 64, 6, 8, Span(start, end), "float32")
    return replace(base, state=state, block_digests=digests)


def test_coverage_counts_serving_servers_and_names_gaps_and_conflicts():
    servers = [
        info("a", 0, 2, "1", "2"),
        info("b", 1, 3, "X", "3"),
        info("c", 3, 5, state=ServerState.JOINING),
        info("d", 5, 6),
    ]
    (found,) = coverage_by_model(servers)
    assert [(str(span), count) for span, count in found.runs] == [
        ("0:1", 1),
        ("1:2", 2),
        ("2:3", 1),
        ("3:5", 0),
        ("5:6", 1),
    ]
    assert found.gaps == (Span(3, 5),)
    (conflict,) = found.conflicts
    assert conflict.startswith("block 1: a ")
