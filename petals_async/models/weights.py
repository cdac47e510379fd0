"""Reading named tensors of a checkpoint into memory of their own: no memory map, no other tensor's bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from petals_async.errors import CheckpointError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.tensors import TensorInfo, read_bytes

STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""torch's dtype for the dtype names of safetensors files."""


def read_tensors(
    checkpoint: Checkpoint, names: Iterable[str], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Read the named tensors.

    Args:
        checkpoint: Where they lie.
        names: As in the checkpoint.
        dtype: Floating tensors are converted to it one by one; None leaves them as they are stored.

    Returns:
        Tensors that own their memory, by name.

    Raises:
        CheckpointError: A shard is missing or damaged; the message names the file.
    """
    tensors = {}
    for name in names:
        tensor = _read(name, checkpoint.tensor(name))
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[name] = tensor
    return tensors


def digest(module: nn.Module) -> str:
    """Return the SHA-256, in hex, over a module's parameters and buffers as they lie in memory.

    Names (relative to the module), dtypes, shapes and bytes go in, in the order of names.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            total.update(memoryview(flat.view(torch.uint8).numpy()))
    return total.hexdigest()


def _read(name: str, info: TensorInfo) -> Tensor:
    if info.dtype not in STORED_DTYPES:
        raise CheckpointError(f"{info.file}: {name} has dtype {info.dtype}, which torch can't hold")
    raw = torch.empty(info.num_bytes, dtype=torch.uint8)
    if info.num_bytes == 0:
        return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
    read_bytes(info, memoryview(raw.numpy()))
    return raw.view(STORED_DTYPES[info.dtype]).reshape(info.shape)
