"""The one way to await a grpc.aio operation.

grpc.aio lets an untagged CancelledError out when another task cancels the call or closes the channel. In a
child task AnyIO takes that for a cancellation of its own, and the whole task group ends silently. So every
awaited operation goes through `guarded`, which tells our own cancellation from the end of the RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

T = TypeVar("T")


class RpcOverError(Exception):
    """The RPC was cancelled or finished underneath the operation; its status tells why."""


async def guarded(operation: Awaitable[T]) -> T:
    """Await a grpc.aio operation.

    Raises:
        RpcOverError: The RPC is over, and it was not this task that was cancelled.
        grpc.aio.AioRpcError: As the operation raised it.
    """
    try:
        return await operation
    except asyncio.CancelledError:
        await checkpoint_if_cancelled()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RpcOverError from None
    except asyncio.InvalidStateError:
        raise RpcOverError from None
