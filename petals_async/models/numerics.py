"""What this machine computes, as a hash: two servers give each other's bits only if these are equal."""

from __future__ import annotations

import hashlib

import torch

from petals_async.models.codec import to_bytes, torch_dtype

_SIZES = ((1, 64), (5, 192), (48, 256))


def numeric_fingerprint(dtype: str, device: str = "cpu", kernels: str = "") -> str:
    """Hash the outputs of small synthetic layers, with torch's version, thread count, and how the blocks compute.

    Args:
        dtype: The dtype that the server computes in.
        device: Where it computes.
        kernels: How each kind of layer is computed, `BlockSpan.kernels`.

    Returns:
        16 hex digits. Equal ones on two machines mean that these layers gave equal bits on both.
    """
    digest = hashlib.sha256(
        f"{torch.__version__} {torch.get_num_threads()} {device.partition(':')[0]} {kernels}".encode()
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for rows, width in _SIZES:
            states = torch.randn(rows, width, generator=generator).to(torch_dtype(dtype)).to(device)
            weight = torch.randn(3 * width, width, generator=generator).to(torch_dtype(dtype)).to(device)
            outputs = torch.nn.functional.linear(states, weight)
            keys, values = outputs[:, :width], outputs[:, width : 2 * width]
            mixed = torch.softmax(states @ keys.T, dim=-1) @ values
            digest.update(to_bytes(outputs) + to_bytes(mixed))
    return digest.hexdigest()[:16]
