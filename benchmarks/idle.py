"""What an idle core costs: one decode step of a tiny block in this process, back to back and after pauses.

No server, no wire, one thread: the same step with the same inputs, after the thread has slept. A server's thread sleeps
between the tokens of a generation while the other servers and the client compute, so this much of a hop is the
machine's, and no code of ours runs in it.

    python -m benchmarks.idle         # prints JSON
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.report import Report, quantiles
from petals_async.abc import BackendStep
from petals_async.core.hidden import HiddenStates
from petals_async.engine.backend import TorchBackend
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.span import BlockSpan
from petals_async.testing.tiny import make_tiny_llama

PAUSES_S = (0.0, 0.0005, 0.002, 0.01)


def load(path: Path) -> TorchBackend:
    torch.set_num_threads(1)
    return TorchBackend(BlockSpan.load(Checkpoint.open(make_tiny_llama(path, max_position=8192)), 0, 1))


def time_steps(backend: TorchBackend, calls: int, pause_s: float) -> list[float]:
    """Return the seconds of each step alone, pauses left out."""
    hidden = HiddenStates("float32", (1, 1, backend.hidden_size), bytes(4 * backend.hidden_size))
    cache = backend.allocate(backend.span, 1, calls)
    times = []
    for offset in range(calls):
        if pause_s:
            time.sleep(pause_s)
        started_at = time.perf_counter()
        backend.run([BackendStep(cache, backend.span, offset, hidden)])
        times.append(time.perf_counter() - started_at)
    return times


def main(rounds: int, calls: int) -> None:
    report = Report("idle", {"rounds": rounds, "calls": calls, "pauses_s": PAUSES_S})
    with TemporaryDirectory() as folder:
        backend = load(Path(folder) / "model")
        times: dict[float, list[float]] = {pause_s: [] for pause_s in PAUSES_S}
        for turn in range(rounds + 1):
            for pause_s in PAUSES_S:
                measured = time_steps(backend, calls, pause_s)
                if turn:
                    times[pause_s] += measured
    for pause_s in PAUSES_S:
        report.add(f"step after {pause_s * 1e3:g} ms asleep", quantiles(times[pause_s]))
    for pause_s in PAUSES_S[1:]:
        report.ratio(f"after {pause_s * 1e3:g} ms asleep / back to back", times[pause_s], times[0.0], calls, limit=None)
    report.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--calls", type=int, default=200, help="steps of each kind in one round")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.calls)
