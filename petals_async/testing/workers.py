"""Where backends and edges run in the in-memory swarm: inline, since nothing in virtual time may wait on a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

from petals_async.abc import BackendOutcome, BackendStep, BlockBackend
from petals_async.errors import ClosedError

T = TypeVar("T")

DuringStep = Callable[[BackendStep], Awaitable[None]]
"""Called in the middle of computing a step."""


class InlineWorker:
    """A `ComputeWorker` that runs the backend on the event loop, one step after the other.

    Args:
        backend: The blocks.
        step_s: Virtual seconds that a step takes, or a function that says so.
        during: Called half-way through that time: the moment for faults.
    """

    def __init__(
        self,
        backend: BlockBackend,
        *,
        step_s: float | Callable[[BackendStep], float] = 0.0,
        during: DuringStep | None = None,
    ) -> None:
        self._backend = backend
        self._step_s = step_s
        self._during = during
        self._turn = anyio.Lock()
        self._stopped = anyio.Event()
        self.num_steps = 0
        self.num_tokens = 0

    def stop(self) -> None:
        """End the step that runs now and all that wait, as the death of the process does."""
        self._stopped.set()

    async def run(self, step: BackendStep) -> BackendOutcome:
        """Compute a step when its turn comes.

        Raises:
            ClosedError: The worker was stopped.
        """
        async with self._turn:
            seconds = self._step_s(step) if callable(self._step_s) else self._step_s
            await self._spend(seconds / 2)
            if self._during is not None:
                await self._during(step)
            await self._spend(seconds / 2)
            self.num_steps += 1
            self.num_tokens += step.hidden.num_tokens if step.hidden else 0
            return self._backend.run([step])[0]

    async def call(self, function: Callable[[], T]) -> T:
        """Run a short function of the backend."""
        await self._spend(0.0)
        return function()

    async def _spend(self, seconds: float) -> None:
        """Let time pass; a stopped worker wakes at once."""
        if seconds > 0:
            with anyio.move_on_after(seconds):
                await self._stopped.wait()
        await anyio.lowlevel.checkpoint()
        if self._stopped.is_set():
            raise ClosedError("the compute worker has stopped")


class InlineExecutor:
    """Runs the client's edges inline: what a client takes as its `executor`."""

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function and return its result."""
        await anyio.lowlevel.checkpoint()
        return function()
