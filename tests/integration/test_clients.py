"""The programs in clients/ do what they say."""

import sys
from pathlib import Path

import anyio
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CLIENTS = Path(__file__).parents[2] / "clients"
LIMIT_S = 150


async def run(program, *arguments):
    with anyio.fail_after(LIMIT_S):
        done = await anyio.run_process([sys.executable, CLIENTS / program, *map(str, arguments)], check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_the_embedded_swarm_generates():
    code, out, err = await run("embedded.py", "--max-new-tokens", 8)
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[2] for line in lines[:2]] == ["0:2", "2:4"]
    assert lines[-1] == "8 tokens, ended by length"
    assert err == ""


async def test_the_demo_recovers_with_the_same_tokens(tiny_model):
    code, out, err = await run("demo.py", tiny_model, "--max-new-tokens", 40)
    assert code == 0, out + err
    assert "kill -9 server middle" in out
    assert "recovered: blocks 2:4 lost with middle" in out
    assert "all 40 tokens are equal" in out
    assert err == ""


async def test_the_demo_refuses_a_text_that_is_too_short(tiny_model):
    code, _, err = await run("demo.py", tiny_model, "--max-new-tokens", 5)
    assert code == 2
    assert "--max-new-tokens" in err
