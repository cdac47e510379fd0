"""Every recipe of clients/README.md does what it says, against a real server."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import petals_async
from petals_async.testing.tiny import make_tiny_llama

README = Path(__file__).parents[2] / "clients" / "README.md"
HIDDEN_SIZE = 64

RECIPES = re.findall(r"^```sh( grpcurl)?\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_blocks=2, hidden_size=HIDDEN_SIZE)


async def run_recipe(text, **environment):
    """Run one recipe as a person would, with the tools of this environment first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with anyio.fail_after(30):
        done = await anyio.run_process(
            ["bash", "-euo", "pipefail", "-c", text],
            env={**os.environ, "PATH": path, **environment},
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()


def objects(text):
    """Read JSON values that follow each other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_each_recipe_runs_and_the_session_leaves_nothing_behind(model):
    outputs = {}
    async with (
        petals_async.Registry("127.0.0.1:0") as registry,
        petals_async.BlockServer(str(model), registry=registry.address, threads=1, name="by-hand") as server,
    ):
        info = server.info
        variables = {
            "ADDRESS": server.address,
            "REGISTRY": registry.address,
            "FINGERPRINT": info.model_fingerprint,
            "HIDDEN_SIZE": str(info.hidden_size),
            "START": str(info.span.start),
            "END": str(info.span.end),
        }
        for grpcurl, text in RECIPES:
            if not grpcurl or shutil.which("grpcurl"):
                outputs[text] = await run_recipe(text, **variables)
        assert server.host.list_sessions() == []
    check(outputs, info)


def check(outputs, info):
    by_method = {method: out for text, out in outputs.items() for method in re.findall(r"/([A-Z]\w+)\"", text)}
    lists = "".join(out for text, out in outputs.items() if "--list" in text)
    assert "petals_async.v1.BlockService" in lists
    assert "petals_async.v1.BlockService/RunSession" in lists
    assert objects(by_method["Check"]) == [{"status": "SERVING"}]
    (described,) = objects(by_method["GetServerInfo"])
    assert described["server"]["serverId"] == info.server_id
    assert objects(by_method["ListSessions"]) == [{}]
    (listed,) = objects(by_method["ListServers"])
    assert [server["name"] for server in listed["servers"]] == ["by-hand"]
    check_session(objects(by_method["RunSession"]))


def check_session(messages):
    opened, result = (message for message in messages if "progress" not in message)
    assert opened["opened"]["nextStepId"] == "1"
    assert result["result"]["stepId"] == "1"
    assert result["result"]["position"] == 1
    hidden = result["result"]["hiddenStates"]
    assert hidden["shape"] == ["1", "1", str(HIDDEN_SIZE)]
    assert len(base64.b64decode(hidden["data"])) == 4 * HIDDEN_SIZE


def test_there_are_recipes_for_both_tools():
    assert [bool(grpcurl) for grpcurl, _ in RECIPES].count(False) == 7
    assert [bool(grpcurl) for grpcurl, _ in RECIPES].count(True) == 5
