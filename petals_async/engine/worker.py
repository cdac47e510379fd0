"""The one compute worker: a thread that owns the backend, takes lists of steps, and hands the outcomes back.

At each turn it takes the steps that are waiting, up to `MAX_STEPS_A_TURN`, and gives them to the backend as one
list. Which steps go together is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import Empty

from petals_async.abc import BackendOutcome, BackendStep, BlockBackend
from petals_async.engine.thread import Job, WorkerThread
from petals_async.errors import ClosedError, ServerOverloadedError

MAX_QUEUED_STEPS = 1024
"""Steps that wait for the worker; more are refused as QUEUE_FULL."""

MAX_STEPS_A_TURN = 1
"""Steps given to the backend at once: one, until the backend fuses sessions (their results come out together)."""


class ComputeThread(WorkerThread):
    """Runs a backend's steps, in turns, and its short functions between them."""

    def __init__(self) -> None:
        self._backend: BlockBackend | None = None
        super().__init__("petals-async compute")

    def adopt(self, backend: BlockBackend) -> None:
        """Take the backend that steps are for; it was made on this thread, and lives there."""
        self._backend = backend

    async def run(self, step: BackendStep) -> BackendOutcome:
        """Queue a step, and return its outcome.

        Raises:
            ServerOverloadedError: `MAX_QUEUED_STEPS` are waiting (QUEUE_FULL).
            ClosedError: The worker has stopped.
        """
        if self.num_waiting >= MAX_QUEUED_STEPS:
            raise ServerOverloadedError(f"{MAX_QUEUED_STEPS} steps wait already", reason="QUEUE_FULL")
        outcome: BackendOutcome = await self.submit(step)
        return outcome

    def execute(self, job: Job) -> None:
        """Do one job, or take a turn with it and the steps behind it, on the thread."""
        if not isinstance(job.payload, BackendStep):
            super().execute(job)
            return
        turn = [job]
        behind = self._next_if_step(turn)
        self._take_turn(turn)
        if behind is not None:
            super().execute(behind)

    def _next_if_step(self, turn: list[Job]) -> Job | None:
        """Collect the steps behind the first; returns the first job that is none."""
        while len(turn) < MAX_STEPS_A_TURN:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return None
            if job is None:
                self._queue.put(None)
                return None
            if not isinstance(job.payload, BackendStep):
                return job
            turn.append(job)
        return None

    def _take_turn(self, turn: list[Job]) -> None:
        if self._backend is None:
            raise ClosedError("a step came before the backend was loaded")
        try:
            outcomes = self._backend.run([job.payload for job in turn])
        except BaseException as error:  # noqa: BLE001 - carried to the callers, who raise it
            for job in turn:
                self.settle(job, error=error)
            return
        for job, outcome in zip(turn, outcomes, strict=True):
            self.settle(job, outcome)


@asynccontextmanager
async def compute_thread() -> AsyncIterator[ComputeThread]:
    """Run a compute worker for as long as the context is open; a step that still runs then is left behind."""
    worker = ComputeThread()
    try:
        yield worker
    finally:
        worker.close()
