"""The one compute worker: a thread that owns the backend, takes turns of steps, and hands the outcomes back.

At each turn it gives the backend those of the waiting steps that `core.schedule` chooses, as one list.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import Empty

from petals_async.abc import BackendOutcome, BackendStep, BlockBackend
from petals_async.core.schedule import StepClass, WaitingStep, choose
from petals_async.engine.thread import Job, WorkerThread
from petals_async.errors import ClosedError, ServerOverloadedError

MAX_QUEUED_STEPS = 1024
"""Steps that wait for the worker; more are refused as QUEUE_FULL."""


@dataclass(slots=True)
class _WaitingJob:
    job: Job
    step: WaitingStep


class ComputeThread(WorkerThread):
    """Runs a backend's steps, in turns, and its short functions between them."""

    def __init__(self) -> None:
        self._backend: BlockBackend | None = None
        self._waiting: list[_WaitingJob] = []
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

    @property
    def num_waiting(self) -> int:
        """Jobs that wait, steps that were passed over included."""
        return super().num_waiting + len(self._waiting)

    def execute(self, job: Job) -> None:
        """Do one job, or take turns until no step waits, on the thread."""
        self._admit(job)
        while self._waiting:
            self._admit_all()
            if self._closed:
                self._refuse_all()
                return
            if self._waiting:
                self._take_turn()

    def _admit(self, job: Job) -> None:
        """Let a step wait; do anything else at once."""
        if isinstance(job.payload, BackendStep):
            self._waiting.append(_WaitingJob(job, _waiting_step(job.payload)))
        else:
            super().execute(job)

    def _admit_all(self) -> None:
        """Take all that has come meanwhile, and drop the steps that nobody waits for any more."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                break
            if job is None:
                self._queue.put(None)  # the thread's own loop ends by it
                break
            if not job.future.cancelled():
                self._admit(job)
        self._waiting = [waiting for waiting in self._waiting if not waiting.job.future.cancelled()]

    def _refuse_all(self) -> None:
        for waiting in self._waiting:
            self.settle(waiting.job, error=ClosedError("the thread has ended"))
        self._waiting = []

    def _take_turn(self) -> None:
        chosen = set(choose([waiting.step for waiting in self._waiting]))
        turn = [waiting.job for index, waiting in enumerate(self._waiting) if index in chosen]
        self._waiting = [waiting for index, waiting in enumerate(self._waiting) if index not in chosen]
        for waiting in self._waiting:
            waiting.step.passed_over += 1
        self._run(turn)

    def _run(self, turn: list[Job]) -> None:
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


def _waiting_step(step: BackendStep) -> WaitingStep:
    if step.hidden is None:
        return WaitingStep(StepClass.DECODE, 0)
    rows, tokens, _width = step.hidden.shape
    kind = StepClass.REPLAY if step.num_outputs == 0 else StepClass.PREFILL
    return WaitingStep(StepClass.DECODE if tokens == 1 else kind, rows * tokens)


@asynccontextmanager
async def compute_thread() -> AsyncIterator[ComputeThread]:
    """Run a compute worker for as long as the context is open; a step that still runs then is left behind."""
    worker = ComputeThread()
    try:
        yield worker
    finally:
        await worker.aclose()
