"""safetensors files, read by hand: eight bytes of header length, a JSON header, raw bytes.

Only the standard library is used, so that a client or a command can look at a checkpoint without torch. Reading
by hand also bounds what is touched: exactly the bytes of the tensors that were asked for, never a memory map.
Source: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from petals_async.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Longest header that is read; the format's own limit."""

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""Bits of one number, for each dtype name of the format."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: file, dtype as the format names it ("F32"), shape, bytes `[start, end)` of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read which tensors a safetensors file holds.

    Args:
        path: The file.

    Returns:
        What is known of each tensor, by name, in the file's order.

    Raises:
        CheckpointError: The file is missing, cut short, or not a safetensors file; the message names it.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = _header_bytes(path, file, file_bytes)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, its header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: damaged, its header is not a JSON object")
    base = 8 + header_bytes
    return {
        name: _tensor_info(path, name, entry, base, file_bytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_bytes(info: TensorInfo, buffer: memoryview) -> None:
    """Fill a buffer with one tensor's bytes.

    Args:
        info: The tensor, from `read_header`.
        buffer: Writable, exactly `info.num_bytes` bytes.

    Raises:
        CheckpointError: The file is missing or was cut short since its header was read.
    """
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.start)
            done = 0
            while done < info.num_bytes:
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{info.file}: cut short at byte {info.start + done}")
                done += count
    except OSError as error:
        raise CheckpointError(f"{info.file}: can't be read ({error.strerror})") from error


def _header_bytes(path: Path, file: BinaryIO, file_bytes: int) -> int:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: damaged, {file_bytes} bytes is no safetensors file")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(
            f"{path}: damaged, its header should have {header_bytes} bytes and the file has {file_bytes}"
        )
    return header_bytes


def _tensor_info(path: Path, name: str, entry: Any, base: int, file_bytes: int) -> TensorInfo:
    damaged = CheckpointError(f"{path}: damaged, the header's entry of {name} is wrong")
    if not isinstance(entry, Mapping):
        raise damaged
    dtype = entry.get("dtype")
    shape, offsets = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise damaged
    start, end = offsets
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}, which is not known here")
    if (end - start) * 8 != math.prod(shape) * ITEM_BITS[dtype]:
        raise damaged
    if base + end > file_bytes:
        raise CheckpointError(f"{path}: cut short, {name} ends at byte {base + end} and the file has {file_bytes}")
    return TensorInfo(path, dtype, tuple(shape), base + start, base + end)


def _whole_numbers(value: Any) -> list[int] | None:
    """Return a list of numbers that are not negative, or None if it is anything else."""
    return value if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value) else None
