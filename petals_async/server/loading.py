"""From a model's name to a backend: resolve, open, cut, load, measure. Runs on the compute thread; imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from petals_async.abc import BackendResult, BackendStep, BlockBackend
from petals_async.core.hidden import ITEM_BYTES, HiddenStates
from petals_async.core.span import Span
from petals_async.errors import ConfigurationError, PetalsAsyncError
from petals_async.server.options import ServerOptions

Report = Callable[[str], None]
"""Takes a line for a person about how far the loading is."""

PROBE_STEPS = 3
"""Steps of one token that are run to measure the speed; the fastest counts."""


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """A backend that is ready, and what was measured on the way."""

    backend: BlockBackend
    block_digests: tuple[str, ...]
    numeric_fingerprint: str
    exact: bool
    block_step_s: float


def load_blocks(checkpoint: Any, span: Span, options: ServerOptions, report: Report) -> LoadedBlocks:
    """Load the blocks of a span, touch their weights, and measure a step.

    Args:
        checkpoint: The open checkpoint.
        span: The blocks.
        options: dtype, device, threads.
        report: Takes lines about progress.

    Raises:
        CheckpointError: A needed file is missing or damaged; names it.
        UnsupportedModelError: The architecture can't be cut; says why.
        ConfigurationError: The device isn't there.
    """
    report("importing torch and transformers")
    started_at = time.perf_counter()
    import torch

    from petals_async.engine.backend import TorchBackend
    from petals_async.models.architecture import Architecture
    from petals_async.models.numerics import numeric_fingerprint
    from petals_async.models.span import BlockSpan

    Architecture.of(checkpoint)  # imports the model's own module
    report(f"imported in {time.perf_counter() - started_at:.2f} s")
    _check_device(torch, options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    started_at = time.perf_counter()
    blocks = BlockSpan.load(
        checkpoint,
        span.start,
        span.end,
        dtype=options.dtype,
        device=options.device,
        progress=lambda done, total: report(f"loading weights: block {done} of {total}"),
    )
    backend = TorchBackend(blocks)
    digests = blocks.block_digests
    step_s = _measure(backend)
    report(f"loaded in {time.perf_counter() - started_at:.2f} s, {step_s * 1e3:.2f} ms a token and block")
    report(f"{'all sessions in one pass' if blocks.fused else 'one session at a time'}; {blocks.kernels}")
    fingerprint = numeric_fingerprint(options.dtype, options.device, blocks.kernels)
    return LoadedBlocks(backend, digests, fingerprint, blocks.exact, step_s)


def _check_device(torch: Any, device: str) -> None:
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {device!r} was asked for, and torch sees no CUDA device")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError(f"device {device!r} was asked for, and torch sees no MPS device")


def _measure(backend: BlockBackend) -> float:
    """Return the seconds of one token through one block, after a warm-up that touches every weight."""
    cache = backend.allocate(backend.span, 1, PROBE_STEPS + 1)
    data = bytes(backend.hidden_size * ITEM_BYTES[backend.dtype])
    hidden = HiddenStates(backend.dtype, (1, 1, backend.hidden_size), data)
    times = []
    for offset in range(PROBE_STEPS + 1):
        (outcome,) = backend.run([BackendStep(cache, backend.span, offset, hidden)])
        if not isinstance(outcome, BackendResult):
            raise _probe_failed(outcome)
        times.append(outcome.compute_s)
    return min(times[1:]) / len(backend.span)


def _probe_failed(error: PetalsAsyncError) -> PetalsAsyncError:
    return ConfigurationError(f"a trial step on loading failed: {error.message}")
