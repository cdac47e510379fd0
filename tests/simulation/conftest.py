"""Virtual time: every test here runs on trio's mock clock, which jumps ahead whenever all tasks wait.

Nothing here may wait on a thread, since the clock jumps meanwhile. Fixtures that are async must be function-scoped:
AnyIO runs every test on the backend of an open async fixture of a wider scope, whatever the test's label says.

The order in which tasks take their turns is drawn from PETALS_ASYNC_SIM_ORDER (0 if it isn't set), so that a test which
passes passes again.
"""

import os

import pytest
import trio
from trio.testing import MockClock

from petals_async.testing.virtual_time import fixed_task_order


@pytest.fixture
def anyio_backend():
    with fixed_task_order(int(os.environ.get("PETALS_ASYNC_SIM_ORDER", "0"))):
        yield "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture(autouse=True)
async def in_virtual_time(anyio_backend):
    """Fail, rather than wait in real time, when AnyIO runs the test on another backend."""
    assert trio.lowlevel.in_trio_run(), "this test runs in real time; see the head of this file"
