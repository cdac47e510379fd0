"""What importing costs: torch, transformers and gRPC come in when they are needed, and core needs nothing.

Each check runs in a fresh interpreter and looks at `sys.modules`, so that indirect imports count as well.
"""

import json
import pkgutil
import subprocess
import sys

import pytest

import petals_async.cli
import petals_async.core

HEAVY = {"torch", "transformers", "grpc", "google.protobuf", "numpy"}
IMPURE = HEAVY | {"asyncio", "anyio", "trio", "logging"}
"""Fewer than the contract in pyproject.toml forbids: `importlib.metadata`, which tells our version, brings the rest."""

CORE = [f"petals_async.core.{module.name}" for module in pkgutil.iter_modules(petals_async.core.__path__)]
CLI = [f"petals_async.cli.{module.name}" for module in pkgutil.iter_modules(petals_async.cli.__path__)]

REPORT = """
import json, sys
before = set(sys.modules)
{code}
print()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_after(code):
    """The modules that a fresh interpreter has loaded for some code, beyond those it starts with."""
    script = REPORT.format(code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def run_command(*arguments):
    """Code that runs the command and goes on when it exits."""
    return f"""
sys.argv = ["petals-async", *{arguments!r}]
from petals_async.cli.main import main
try:
    main()
except SystemExit as done:
    print("exit", done.code)
"""


@pytest.mark.parametrize("module", ["petals_async", "petals_async.errors", "petals_async.version"])
def test_the_package_alone_is_light(module):
    assert modules_after(f"import {module}") & HEAVY == set()


def test_core_is_pure():
    loaded = modules_after("\n".join(f"import {module}" for module in [*CORE, "petals_async.errors"]))
    assert set(CORE) <= loaded
    assert loaded & IMPURE == set()


def test_public_names_are_loaded_when_asked_for():
    loaded = modules_after("import petals_async\npetals_async.Span")
    assert "petals_async.core.span" in loaded
    assert loaded & HEAVY == set()


def test_every_public_name_can_be_had():
    for name in petals_async.__all__:
        assert getattr(petals_async, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Clientt'"):
        petals_async.Clientt  # noqa: B018


@pytest.mark.parametrize("module", CLI)
def test_the_files_of_the_command_are_light(module):
    assert modules_after(f"import {module}") & {"torch", "transformers"} == set()


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("generate", "--help"), ("--version",)])
def test_help_is_light(arguments):
    assert modules_after(run_command(*arguments)) & HEAVY == set()


def test_a_wrong_option_is_told_without_loading_anything():
    assert modules_after(run_command("serve", "--no-such-option")) & HEAVY == set()


@pytest.mark.parametrize(
    "module", ["petals_async.registry.embedded", "petals_async.registry.address", "petals_async.client.swarm"]
)
def test_registry_and_routes_need_no_torch(module):
    assert modules_after(f"import {module}") & {"torch", "transformers"} == set()


@pytest.mark.parametrize(
    "arguments", [("status", "--registry", "127.0.0.1:1"), ("registry", "--listen", "192.0.2.1:1")]
)
def test_status_and_registry_run_without_torch(arguments):
    """Neither gets far: nobody answers there, and nobody can listen there. What they need is loaded by then."""
    loaded = modules_after(run_command(*arguments))
    assert "grpc" in loaded
    assert loaded & {"torch", "transformers"} == set()


def test_embedding_a_registry_needs_no_torch():
    code = """
import anyio, petals_async
async def work():
    async with petals_async.Registry("127.0.0.1:0") as registry:
        print(registry.address)
anyio.run(work)
"""
    assert modules_after(code) & {"torch", "transformers"} == set()
