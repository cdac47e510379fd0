"""What the repository says about itself is so: commands and files that its texts name, units, what the wheel holds."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import anyio
import pytest
import typer.main

import petals_async
from petals_async.cli.main import app
from petals_async.testing.tiny import make_tiny_llama

ROOT = Path(__file__).parents[2]
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "servers/*/*.md", "clients/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
UNITS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("servers/*/*.service"))
CONTAINERS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("servers/*/Containerfile"))

RUN_BY = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make generate": "Makefile",  # the same protoc call as in `make lint`, which CI runs
    "make bench": "Makefile",
    # parts of `make test`
    ".venv/bin/pytest tests/unit tests/property": ".ci/run",
    '.venv/bin/pytest -m "not slow and not processes" -n 2': ".ci/run",
    ".venv/bin/pytest tests/simulation": ".ci/run",
}
"""Commands of the texts that aren't `petals-async`, and what runs them."""

CLI_TESTS = "tests/integration/test_cli.py"
RUN_IN_CLI_TESTS = {
    "up": "test_up_starts_a_dead_server_again_and_ends_all",
    "registry": "test_registry_server_status_and_generation",
    "serve": "test_registry_server_status_and_generation",
    "generate": "check_generation",
    "status": "test_registry_server_status_and_generation",
}
"""Commands of `petals-async`, and what really runs each in those tests; here their arguments are only parsed."""

IMAGES = {"petals-async-block-server": "servers/block_server", "petals-async-registry": "servers/registry"}
"""Images by name, and where they are made."""


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shell_commands(*names):
    return [
        (name, line)
        for name in names
        for block in fenced(read(name), "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def check_command_line(words):
    """Parse the arguments of `petals-async` as it would, without running it."""
    main = typer.main.get_command(app)
    name, *arguments = words
    assert name in main.commands, f"no command {name}"
    command = main.commands[name]
    command.make_context(name, arguments, resilient_parsing=False)


# -- commands


# the recipes in clients/ are run by tests/interop/test_recipes.py
@pytest.mark.parametrize(("name", "line"), shell_commands(*(name for name in TEXTS if not name.startswith("clients/"))))
def test_every_command_of_a_text_can_be_typed(name, line):
    words = shlex.split(line)
    if words[0] == "petals-async":
        check_command_line(words[1:])
    elif words[0] == "podman":
        image = next(word for word in words if word in IMAGES)
        check_command_line([entry_point(f"{IMAGES[image]}/Containerfile")[1], *words[words.index(image) + 1 :]])
    else:
        assert line in RUN_BY, f"{name} shows {line!r}: nothing runs it"


def test_ci_runs_what_it_is_said_to_run():
    script = read(".ci/run")
    for command, where in RUN_BY.items():
        if where == ".ci/run" and command.startswith("make "):
            assert re.search(rf"make (--\S+ )?{command.removeprefix('make ')}\b", script), command
        if command.startswith("make "):
            assert re.search(rf"^{command.removeprefix('make ')}:", read("Makefile"), re.MULTILINE), command


def test_the_readme_lists_the_commands_that_there_are():
    listed = re.findall(r"^\| `petals-async (\w+)", read("README.md"), re.MULTILINE)
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_readmes_program_runs(tmp_path, capsys):
    (program,) = fenced(read("README.md"), "python")
    model = make_tiny_llama(tmp_path / "tiny", num_blocks=4)
    async with (
        petals_async.Registry("127.0.0.1:0") as registry,
        petals_async.BlockServer(str(model), "0:2", registry=registry.address),
        petals_async.BlockServer(str(model), "2:4", registry=registry.address),
    ):
        program = program.replace('"demo"', repr(str(model))).replace("127.0.0.1:7600", registry.address)
        assert program.count("asyncio.run(main())\n") == 1
        names = {}
        exec(program.replace("asyncio.run(main())\n", ""), names)
        await names["main"]()
    assert capsys.readouterr().out.strip()


def test_every_command_is_run_somewhere():
    assert RUN_IN_CLI_TESTS.keys() == typer.main.get_command(app).commands.keys()
    tests = read(CLI_TESTS)
    for command, test in RUN_IN_CLI_TESTS.items():
        (body,) = re.findall(rf"^async def {test}\(.*?(?=^\S)", tests, re.MULTILINE | re.DOTALL)
        assert f'"{command}"' in body, f"{test} doesn't run {command}"


# -- what one deploys


def entry_point(name):
    (words,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", read(name), re.MULTILINE)
    return [word.strip().strip('"') for word in words.split(",")]


def settings(unit):
    """The values of a unit's Environment= lines."""
    lines = re.findall(r"^Environment=(.*)$", read(unit), re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


@pytest.mark.parametrize("unit", UNITS)
def test_a_units_command_line_is_valid(unit):
    (line,) = re.findall(r"^ExecStart=(.*)$", read(unit), re.MULTILINE)
    given = settings(unit)
    words = [re.sub(r"\$\{(\w+)\}", lambda match: given[match[1]], word) for word in line.split()]
    assert words[0].endswith("/bin/petals-async")
    check_command_line(words[1:])


@pytest.mark.parametrize("unit", UNITS)
def test_the_settings_that_a_readme_shows_are_those_of_the_unit(unit):
    shown = [
        line.split("=")[0] for block in fenced(read(f"{Path(unit).parent}/README.md"), "ini") for line in block.split()
    ]
    assert set(shown) <= set(settings(unit))


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_the_unit(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    copy = tmp_path / Path(unit).name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", read(unit), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_stopping_waits_longer_than_draining():
    unit = read("servers/block_server/petals-async-block-server.service")
    drain_s = float(re.search(r"--drain-timeout (\S+)", unit)[1])
    stop_s = float(re.search(r"^TimeoutStopSec=(\S+)$", unit, re.MULTILINE)[1])
    assert stop_s >= drain_s + 10
    assert "KillSignal=SIGTERM" in unit


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_containers_command_line_is_valid(container):
    text = read(container)
    (words,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    program, *command = entry_point(container)
    assert program == "petals-async"
    check_command_line([*command, *(word.strip().strip('"') for word in words.split(","))])
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert users
    assert "0" not in users


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_copies_what_there_is(container):
    for line in re.findall(r"^COPY (?!--from)(.*)$", read(container), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


async def test_the_containers_health_check_knows_serving_from_not_serving():
    async with petals_async.Registry("127.0.0.1:0") as registry:
        address = registry.address
        assert await health("servers/registry/Containerfile", address) == 0
        assert await health("servers/block_server/Containerfile", address) != 0  # no such service there
    assert await health("servers/registry/Containerfile", address) != 0


async def health(container, address):
    """Run a Containerfile's health check against an address, and return its exit code."""
    text = read(container).replace("\\\n", "")
    program = re.search(r'^HEALTHCHECK .*CMD \["python", "-c", "(.*)"\]$', text, re.MULTILINE)[1]
    program = re.sub(r"127\.0\.0\.1:\d+", address, program)
    return (await anyio.run_process([sys.executable, "-c", program], check=False)).returncode


# -- texts


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(name)):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_tests_that_a_text_names_are_there(name):
    for path, item in re.findall(r"`((?:tests|petals_async)/[\w/]+\.py)(?:::(\w+))?", read(name)):
        assert (ROOT / path).is_file(), f"{name} names {path}"
        if item:
            assert re.search(rf"^(async def|def|class) {item}\b|^{item} = ", read(path), re.MULTILINE), (
                f"{path}::{item}"
            )


def test_the_changelog_keeps_its_form():
    text = read("CHANGELOG.md")
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[0] == "Unreleased"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_set_up_never_leaves_bytecode_out():
    """Without it torch and transformers would be compiled at every start."""
    assert "--no-compile" not in read("Makefile") + read(".ci/run")


def test_pins_are_for_developers_only():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    pinned = [line for group in groups for line in group if "==" in line]
    assert pinned == []


# -- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target], cwd=ROOT, check=True)
    (path,) = target.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"petals_async", wheel.name.split("-py3")[0] + ".dist-info"}
    assert "petals_async/v1/block_service_pb2.py" in names
    classifiers = tomllib.loads(read("pyproject.toml"))["project"]["classifiers"]
    assert ("petals_async/py.typed" in names) == ("Typing :: Typed" in classifiers)
    assert not [name for name in names if name.endswith((".proto", ".pyc"))]


@pytest.mark.slow
def test_the_wheel_brings_the_command(wheel, tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path,
        wheel,
    ]
    subprocess.run(install, check=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import petals_async
assert petals_async.__file__.startswith({str(tmp_path)!r}), petals_async.__file__
from importlib.metadata import distribution
(entry,) = distribution("petals-async").entry_points.select(group="console_scripts")
sys.argv = [entry.name, "--help"]
entry.load()()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
