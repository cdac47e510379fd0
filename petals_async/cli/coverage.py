"""Which blocks of a model are served, and how often: what `status` shows for each model. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petals_async.core.route import conflicting_holders
from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.span import Span


@dataclass(frozen=True, slots=True)
class ModelCoverage:
    """One model's blocks.

    Attributes:
        model: The model's name, for people.
        fingerprint: What tells models apart.
        num_blocks: Blocks of the whole model.
        runs: Consecutive blocks with the same number of serving servers, in order; together all blocks.
        conflicts: Servers that hold different weights under this one fingerprint, a line for each pair.
    """

    model: str
    fingerprint: str
    num_blocks: int
    runs: tuple[tuple[Span, int], ...]
    conflicts: tuple[str, ...]

    @property
    def gaps(self) -> tuple[Span, ...]:
        """The blocks that nobody serves."""
        return tuple(span for span, count in self.runs if count == 0)


def coverage_by_model(servers: Sequence[ServerInfo]) -> list[ModelCoverage]:
    """Return the coverage of each model, by name; only servers that are SERVING count."""
    groups: dict[str, list[ServerInfo]] = {}
    for server in servers:
        groups.setdefault(server.model_fingerprint, []).append(server)
    return sorted((_coverage(group) for group in groups.values()), key=lambda found: (found.model, found.fingerprint))


def _coverage(servers: Sequence[ServerInfo]) -> ModelCoverage:
    first = servers[0]
    serving = [server for server in servers if server.state is ServerState.SERVING]
    return ModelCoverage(
        model=first.model,
        fingerprint=first.model_fingerprint,
        num_blocks=first.num_blocks,
        runs=_runs([sum(block in server.span for server in serving) for block in range(first.num_blocks)]),
        conflicts=tuple(map(str, conflicting_holders(serving))),
    )


def _runs(counts: Sequence[int]) -> tuple[tuple[Span, int], ...]:
    """Return equal neighbours as spans."""
    starts = [block for block in range(len(counts)) if block == 0 or counts[block] != counts[block - 1]]
    ends = [*starts[1:], len(counts)]
    return tuple((Span(start, end), counts[start]) for start, end in zip(starts, ends, strict=True))
