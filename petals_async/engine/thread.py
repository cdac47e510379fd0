"""A thread of one's own for work that would block the event loop: a queue in, a wake-up out.

A `SimpleQueue` and `call_soon_threadsafe` cost 36 us there and back; `anyio.to_thread` costs 114 us, and when it
is abandoned its limiter is freed while the thread still runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import anyio

from petals_async.errors import ClosedError

JOIN_S = 1.0
"""How long the end of a context waits for its thread: a process that ends beside one in native code may crash."""

_JOIN_POLL_S = 0.002

T = TypeVar("T")


class Executor(Protocol):
    """Where blocking functions run, one after the other."""

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function and return what it returns, or raise what it raises."""


class Job:
    """Something to be done on the thread, and who waits for it on the loop."""

    __slots__ = ("future", "payload")

    def __init__(self, payload: Any, future: asyncio.Future[Any]) -> None:
        self.payload = payload
        self.future = future


class WorkerThread:
    """Runs functions on one thread, in the order of the calls.

    A call that is cancelled leaves at once; its function still runs, and the result is thrown away.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread.

        Raises:
            ClosedError: The thread has ended.
        """
        result: T = await self.submit(function)
        return result

    def submit(self, payload: Any) -> asyncio.Future[Any]:
        """Queue a job, and return the future of its outcome.

        Raises:
            ClosedError: The thread has ended.
        """
        if self._closed:
            raise ClosedError(f"the thread {self._thread.name} has ended")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put(Job(payload, future))
        return future

    @property
    def num_waiting(self) -> int:
        """Jobs that wait."""
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the job that is running; jobs that wait raise ClosedError."""
        self._closed = True
        self._queue.put(None)

    async def aclose(self) -> None:
        """End the thread, and wait `JOIN_S` at most until it has ended; a job that takes longer is left behind."""
        self.close()
        with anyio.move_on_after(JOIN_S, shield=True):
            while self.alive:  # noqa: ASYNC110 - the end of a thread sets no event
                await anyio.sleep(_JOIN_POLL_S)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._closed:
                self.settle(job, error=ClosedError("the thread has ended"))
            elif not job.future.cancelled():
                self.execute(job)
            del job

    def execute(self, job: Job) -> None:
        """Do one job, on the thread."""
        try:
            result = job.payload()
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            self.settle(job, error=error)
        else:
            self.settle(job, result)

    def settle(self, job: Job, result: Any = None, error: BaseException | None = None) -> None:
        """Hand an outcome to the loop, from the thread."""
        try:
            self._loop.call_soon_threadsafe(_settle, job.future, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if not self._loop.is_closed():
                raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


@asynccontextmanager
async def worker_thread(name: str) -> AsyncIterator[WorkerThread]:
    """Run a thread for as long as the context is open; a function that still runs then is left behind."""
    thread = WorkerThread(name)
    try:
        yield thread
    finally:
        await thread.aclose()
