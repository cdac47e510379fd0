"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from petals_async.errors import ConfigurationError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str | int) -> int:
    """Read a size such as 512MiB, 2GiB or 1000000.

    Raises:
        ConfigurationError: It is not a size, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise ConfigurationError(f"a size is a number and a unit, such as 512MiB or 2GiB, got {text!r}")
    size = int(float(match.group(1)) * _UNITS[unit])
    if size < 1:
        raise ConfigurationError(f"a size must be above 0, got {text!r}")
    return size


def format_bytes(size: float) -> str:
    """Write a size for a person, such as 512.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
