"""How our own processes run their event loop: on uvloop where it is installed, on asyncio's own elsewhere.

Most of what a step costs beside computing is turns of the event loop, and uvloop's are cheaper. A library in someone
else's process takes the loop that is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def run(main: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run an async function as the whole job of a process; raises what it raises."""
    return anyio.run(main, *arguments, backend_options={"use_uvloop": find_spec("uvloop") is not None})
