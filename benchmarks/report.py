"""What every benchmark prints: one JSON object, with the machine, the medians, and ratios taken pair by pair."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any


def quantiles(times_s: Sequence[float]) -> dict[str, float]:
    """Return p10, p50, p90 and the count of times in seconds, as milliseconds."""
    cuts = statistics.quantiles(times_s, n=10)
    return {
        "p10_ms": round(cuts[0] * 1e3, 4),
        "p50_ms": round(statistics.median(times_s) * 1e3, 4),
        "p90_ms": round(cuts[-1] * 1e3, 4),
        "count": len(times_s),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of some figures."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "count": len(values),
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


class Report:
    """Collects the figures of one run.

    Args:
        name: The benchmark.
        settings: What it was run with.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._rows: dict[str, Any] = {}
        self._ratios: dict[str, Any] = {}
        self._head = {
            "benchmark": name,
            "settings": settings,
            "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
            "versions": {package: version(package) for package in ("grpcio", "torch", "transformers", "anyio")},
        }

    def add(self, name: str, figures: Any) -> None:
        """Add one row."""
        self._rows[name] = figures

    def ratio(
        self,
        name: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        group: int,
        *,
        limit: float | None,
        at_least: bool = False,
    ) -> None:
        """Add the ratio of medians, round by round: its median and range, against the limit it should keep if any."""
        rounds = [
            statistics.median(ours[start : start + group]) / statistics.median(theirs[start : start + group])
            for start in range(0, min(len(ours), len(theirs)), group)
        ]
        middle = statistics.median(rounds)
        row: dict[str, Any] = {**spread(rounds)}
        if limit is not None:
            row["should_be"] = f"{'>=' if at_least else '<='} {limit}"
            row["held"] = middle >= limit if at_least else middle <= limit
        self._ratios[name] = row

    def print(self) -> None:
        """Print the JSON object."""
        print(json.dumps({**self._head, "figures": self._rows, "ratios": self._ratios}, indent=2))
