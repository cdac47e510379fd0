"""What the simulations share: a greedy loop over the toy model, and cancelling at every point where a task waits."""

import anyio
import trio

from petals_async.testing.swarm import MemorySwarm, NodeSpec, three_nodes
from petals_async.testing.toy import ToyEdges, toy_generate

NUM_BLOCKS = 6
EDGES = ToyEdges(NUM_BLOCKS)
PROMPT = [3, 1, 4, 1, 5]
SETTLE_S = 1.0  # goodbyes take up to 0.5 s
LEASE_S = 32.0  # what a server keeps that no goodbye has reached


async def generate(session, prompt, num_tokens, *, before=None, edges=EDGES):
    """Return the greedy continuation of a prompt, or of what the session holds; `before(i)` comes before each step."""
    token_ids, new = list(prompt), []
    for number in range(num_tokens):
        if before is not None:
            before(number)
        outputs = await session.step(edges.embed(token_ids, position=session.position), num_outputs=1)
        token_ids = [edges.next_token(outputs)]
        new += token_ids
    return new


async def feed(session, token_ids, edges=EDGES):
    """Run tokens and return the outputs."""
    return await session.step(edges.embed(token_ids, position=session.position))


def expected(num_tokens, prompt=PROMPT, num_blocks=NUM_BLOCKS):
    return toy_generate(prompt, num_tokens, num_blocks)


def with_spares(**fields):
    """Three nodes, and one more of each kind: more costly, so that the route at the start is a, b, c."""
    spares = [NodeSpec(f"{node.name}2", node.blocks, **fields) for node in three_nodes(NUM_BLOCKS)]
    return [*three_nodes(NUM_BLOCKS, **fields), *spares]


async def assert_all_free(swarm: MemorySwarm, *, after_s=SETTLE_S):
    """Nothing is left on any server, and no stream is open."""
    await anyio.sleep(after_s)
    assert (swarm.num_sessions(), swarm.kv_in_use(), swarm.num_streams()) == (0, 0, 0), swarm.sessions()


SERVER_TASKS = ("petals_async.server", "petals_async.testing", "petals_async.registry")


class CancelAt(trio.abc.Instrument):
    """Cancels a scope when the client's tasks together have been woken so many times."""

    def __init__(self, scope, countdown):
        self.scope = scope
        self.countdown = countdown

    def before_task_step(self, task):
        if task.name.startswith(SERVER_TASKS):
            return
        self.countdown -= 1
        if self.countdown == 0:
            self.scope.cancel()


async def cancelled_at(countdown, function, *args):
    """Run a coroutine function and cancel it at a wake-up; return whether it was cancelled."""
    with anyio.CancelScope() as scope:
        instrument = CancelAt(scope, countdown)
        trio.lowlevel.add_instrument(instrument)
        try:
            await function(*args)
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return scope.cancelled_caught
