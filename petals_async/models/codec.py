"""Between tensors and the plain bytes of `core.hidden`, bit for bit in every dtype.

`torch.frombuffer` would alias immutable bytes and refuses empty ones, and `bytes(storage)` is a thousand times
slower than numpy's `tobytes`; so bytes are copied once into a fresh, aligned tensor, and once out of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from petals_async.core.hidden import HiddenStates, TensorSpec
from petals_async.errors import ConfigurationError, RequestError

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""torch's dtype for each name that crosses the wire."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name of each torch dtype that may cross the wire."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a name.

    Raises:
        ConfigurationError: There is no such dtype here.
    """
    if name not in TORCH_DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {name!r}")
    return TORCH_DTYPES[name]


def to_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's numbers as bytes, little-endian, in C order.

    Args:
        tensor: Any shape, dtype, device and strides; may be empty.
    """
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def from_bytes(spec: TensorSpec, data: bytes, *, device: str = "cpu") -> Tensor:
    """Return a new tensor that owns its memory.

    Args:
        spec: Dtype and shape.
        data: Exactly `spec.num_bytes` bytes.
        device: Where the tensor shall lie.

    Raises:
        RequestError: The bytes don't fit the shape (BAD_SHAPE), or the dtype is unknown (BAD_DTYPE).
    """
    if len(data) != spec.num_bytes:
        raise RequestError(f"{spec.dtype} {spec.shape} is {spec.num_bytes} bytes, got {len(data)}", reason="BAD_SHAPE")
    tensor = torch.empty(math.prod(spec.shape), dtype=TORCH_DTYPES[spec.dtype])
    if data:
        memoryview(tensor.view(torch.uint8).numpy())[:] = data
    return tensor.reshape(spec.shape).to(device)


def to_hidden(tensor: Tensor) -> HiddenStates:
    """Return hidden states as a value of `core`.

    Args:
        tensor: (batch, tokens, hidden_size), float32, float16 or bfloat16.

    Raises:
        RequestError: The tensor has other axes (BAD_SHAPE) or another dtype (BAD_DTYPE).
    """
    if tensor.ndim != 3:
        raise RequestError(
            f"hidden states are (batch, tokens, hidden_size), got {tuple(tensor.shape)}", reason="BAD_SHAPE"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise RequestError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {tensor.dtype}", reason="BAD_DTYPE")
    batch, tokens, width = tensor.shape
    return HiddenStates(DTYPE_NAMES[tensor.dtype], (batch, tokens, width), to_bytes(tensor))


def from_hidden(hidden: HiddenStates, *, device: str = "cpu") -> Tensor:
    """Return a new tensor, (batch, tokens, hidden_size), in the states' own dtype."""
    return from_bytes(hidden.spec, hidden.data, device=device)
