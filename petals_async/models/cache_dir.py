"""The cache directory: converted models, each made once, whoever asks first, and whole or not there at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from petals_async.errors import CheckpointError

Report = Callable[[str], None]
"""Takes one line about progress, for a person."""


def cache_dir() -> Path:
    """Return the cache directory: `$PETALS_ASYNC_CACHE`, or `~/.cache/petals_async`. It may not exist yet."""
    named = os.environ.get("PETALS_ASYNC_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "petals_async"


def make_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return a directory of the cache, built if it isn't there.

    It is built in a temporary directory beside it, which is then renamed: nobody ever sees half of one. Of several
    processes one builds, and the others wait for it.

    Args:
        name: The directory's name; holds all that the contents depend on.
        build: Fills the empty directory that it is given.

    Raises:
        CheckpointError: The cache directory can't be written to.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir() / f"{name}.lock"):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be made ({error})") from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        build(work)
        umask = os.umask(0)
        os.umask(umask)
        for file in work.rglob("*"):  # writers leave 0600 on some, and mkdtemp 0700
            file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
        work.chmod(0o777 & ~umask)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file; it ends with the process, so none is ever left behind."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
