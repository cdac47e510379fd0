"""A GGUF file, converted once into a directory in Hugging Face format: float32 safetensors and the tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from petals_async.errors import CheckpointError
from petals_async.models.cache_dir import Report, make_once

CONVERTER_VERSION = 1
"""Goes into the names of converted directories; raise it when the conversion changes."""

MIB = 1024 * 1024


def converted(file: Path, *, progress: Report | None = None) -> Path:
    """Return the directory that a GGUF file was converted to; the conversion is done once, in the cache directory.

    Args:
        file: The GGUF file. It is known again by size, time of change, and its first and last MiB.
        progress: Takes lines about progress.

    Raises:
        CheckpointError: The file can't be read or converted (damaged, or an architecture that transformers can't
            read from GGUF), or the packages for it are not installed.
    """
    try:
        key = _key(file)
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read ({error.strerror})") from error
    name = f"{file.stem}-{key[:16]}-c{CONVERTER_VERSION}"
    return make_once(name, lambda target: convert(file, target, progress=progress))


def convert(file: Path, target: Path, *, progress: Report | None = None) -> None:
    """Write a GGUF file's model and tokenizer into an existing directory, dequantised to float32.

    Raises:
        CheckpointError: As `converted`.
    """
    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise CheckpointError(
            f"{file}: reading GGUF files needs {' and '.join(lacking)}; pip install 'petals-async[gguf]'"
        )
    with file.open("rb") as start:
        if start.read(4) != b"GGUF":
            raise CheckpointError(f"{file}: is not a GGUF file")
    say = progress or (lambda _line: None)
    say(f"converting {file.name} to safetensors, once (about half a minute for a small model)")
    _convert(file, target)
    say(f"converted {file.name}")


def _convert(file: Path, target: Path) -> None:
    """Load with transformers, and save a fresh model: one that was loaded from GGUF counts as quantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from petals_async.models.loading import quiet_transformers

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its bars know no off switch
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
            loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
        except (OSError, ValueError, LookupError, RuntimeError) as error:  # what transformers' GGUF reader raises
            raise CheckpointError(f"{file}: can't be converted ({type(error).__name__}: {error})") from error
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.name_or_path = file.stem
        fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config = loaded.generation_config
        fresh.to(torch.float32).save_pretrained(target)
        tokenizer.save_pretrained(target)


def _key(file: Path) -> str:
    found = file.stat()
    total = hashlib.sha256(f"{found.st_size} {found.st_mtime_ns}".encode())
    with file.open("rb") as stream:
        total.update(stream.read(MIB))
        stream.seek(max(0, found.st_size - MIB))
        total.update(stream.read(MIB))
    return total.hexdigest()
