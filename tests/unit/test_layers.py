"""Who may import what, checked on the source; and that grpc is awaited in one way only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "petals_async"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)
RPC = sorted((PACKAGE / "rpc").glob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


def imports_of(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def within(imported, package):
    return imported == package or imported.startswith(package + ".")


def test_the_sources_are_found():
    assert len(SOURCES) > 40
    assert len(RPC) > 8


@pytest.mark.parametrize("path", [path for path in SOURCES if path not in RPC], ids=name_of)
def test_only_rpc_imports_grpc_and_protobuf(path):
    wire = ("grpc", "grpc_health", "grpc_reflection", "google", "petals_async.v1")
    assert not {name for name in imports_of(path) if any(within(name, package) for package in wire)}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parent.name == "core" or path.name == "errors.py"], ids=name_of
)
def test_core_is_pure(path):
    impure = {
        "asyncio",
        "anyio",
        "grpc",
        "torch",
        "numpy",
        "time",
        "random",
        "secrets",
        "socket",
        "threading",
        "logging",
        "os",
    }
    assert not {name for name in imports_of(path) if name.partition(".")[0] in impure}


def test_core_and_the_client_need_no_torch():
    """Importing torch takes seconds: whoever only asks for a status must not pay for it."""
    names = ", ".join(
        f"petals_async.{name}" for name in ("abc", "core.replay", "client.session", "server.host", "rpc.block_channel")
    )
    code = f"import sys, {names}; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


GRPC_METHODS = {
    "abort", "close", "code", "debug_error_string", "details", "done_writing", "initial_metadata", "read",
    "send_initial_metadata", "start", "stop", "trailing_metadata", "wait_for_connection", "wait_for_termination",
    "write",
}  # fmt: skip
GRPC_OBJECTS = {"_call", "call", "channel", "_channel", "context", "_context", "server", "_server", "_stub", "stub"}


def operand_name(node):
    """The last name of `a.b.c`, or of what `c()` is called on."""
    if isinstance(node, ast.Call):
        return operand_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_grpc_operation(call):
    """A heuristic: a method of something that is named like a call, channel, context, server or stub."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner, method = operand_name(call.func.value), call.func.attr
    if owner in {"_stub", "stub"}:
        return True
    return owner in GRPC_OBJECTS and method in GRPC_METHODS


def unguarded(source):
    """Line numbers of awaits of a grpc operation that don't go through `guarded`."""
    tree = ast.parse(source)
    awaited = [node.value for node in ast.walk(tree) if isinstance(node, ast.Await)]
    loops = [node.iter for node in ast.walk(tree) if isinstance(node, ast.AsyncFor)]
    return sorted(
        node.lineno for node in [*awaited, *loops] if is_grpc_operation(node) or operand_name(node) == "_call"
    )


@pytest.mark.parametrize("path", RPC, ids=name_of)
def test_every_grpc_operation_is_guarded(path):
    assert unguarded(path.read_text()) == []


def test_the_heuristic_finds_what_it_should():
    bad = """
async def f(self, context, server):
    await self._call.read()
    await context.abort(1, "no")
    await server.stop(0)
    await self._stub.GetServerInfo(1, timeout=2)
    await self._call
    async for message in self._call:
        pass
    await guarded(self._call.read())
    await self._restub.read()
"""
    assert unguarded(bad) == [3, 4, 5, 6, 7, 8]


def test_guarded_is_used():
    assert sum("guarded(" in path.read_text() for path in RPC) >= 5


def test_the_layers_hold():
    """import-linter's contracts, as pyproject.toml states them."""
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed (dependency group lint)")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, timeout=50, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
