"""From what a user calls a model to a directory with its files: fetched or converted if need be."""

from __future__ import annotations

import re
from pathlib import Path

from petals_async.core.span import Span
from petals_async.errors import CheckpointError
from petals_async.models.cache_dir import Report
from petals_async.models.checkpoint import INDEX_FILE, Checkpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""What is fetched of a Hub repository beside the weights: configuration and tokenizer."""


def resolve(model: str, *, blocks: Span | None = None, edges: bool = False, progress: Report | None = None) -> Path:
    """Return the local directory of a model.

    Args:
        model: "demo", a directory in Hugging Face format, a .gguf file, or a Hub id "org/name".
        blocks: Blocks whose weights will be needed; of a Hub repository only their shards are fetched.
        edges: Whether embeddings and head will be needed. With neither, all shards are fetched.
        progress: Takes lines about progress.

    Raises:
        CheckpointError: There is no such model, or it can't be fetched or converted; one line says why.
    """
    if model == "demo":
        from petals_async.models.demo import demo_path

        return demo_path(progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        from petals_async.models.gguf import converted

        return converted(path.resolve(), progress=progress)
    if (model and path.exists()) or model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"no such model: {model!r} is neither a directory, a .gguf file, a Hub id (org/name), nor 'demo'"
        )
    return _from_hub(model, blocks, edges, progress or (lambda _line: None))


def _from_hub(repository: str, blocks: Span | None, edges: bool, say: Report) -> Path:
    """Fetch configuration, tokenizer and index, then only the shards whose tensors are wanted."""
    say(f"looking up {repository} on the Hub")
    path = _snapshot(repository, [*SMALL_FILES])
    if not (path / INDEX_FILE).is_file():
        say(f"fetching the weights of {repository}")
        return _snapshot(repository, [*SMALL_FILES, "model.safetensors"])
    checkpoint = Checkpoint.open(path)
    names: list[str] = []
    for block in range(blocks.start, min(blocks.end, checkpoint.num_blocks)) if blocks else ():
        names += checkpoint.block_tensors(block)
    if edges:
        names += checkpoint.edge_tensors
    shards = checkpoint.shards(names if blocks or edges else checkpoint.weight_map)
    say(f"fetching {len(shards)} of {len(set(checkpoint.weight_map.values()))} weight files of {repository}")
    return _snapshot(repository, [*SMALL_FILES, *shards])


def _snapshot(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{repository}: the Hub can't be reached, and the files are not in its local cache"
        ) from error
    except HfHubHTTPError as error:  # not found, gated, no permission, server errors
        status = getattr(error.response, "status_code", None)
        raise CheckpointError(f"{repository}: the Hub answers {status}: {_first_line(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{repository}: can't be fetched from the Hub ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
