"""What the simulations share: a greedy loop over the toy model, and cancelling at every point where a task waits."""

import anyio
import trio

from petals_async.testing.swarm import MemorySwarm, NodeSpec, three_nodes
from petals_async.testing.toy import ToyEdges, toy_generate, toy_reference, toy_vectors

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


async def step_rows(session, histories, new, rows=None):
    """Run one token for each row, on rows that go on from others; check the outputs; return the new histories."""
    if rows is not None:
        histories = [histories[row] for row in rows]
    histories = [[*history, token] for history, token in zip(histories, new, strict=True)]
    outputs = await session.step(EDGES.embed_rows([[token] for token in new]), row_indices=rows or ())
    got = [row[-1] for row in toy_vectors(outputs)]
    assert got == [toy_reference(history, NUM_BLOCKS)[-1] for history in histories]
    return histories


async def roll_back_behind_a_permutation(lost):
    """The rows have their old order again, also where a replacement was filled with rows in the new one."""
    async with MemorySwarm(with_spares()) as swarm, swarm.session(batch_size=2) as session:
        histories = await step_rows(session, [[], []], [1, 2])
        histories = old = await step_rows(session, histories, [3, 4])
        histories = await step_rows(session, histories, [5, 6], (1, 0))
        if lost == "before":
            swarm.kill(session.route[1][1].name)
        histories = await step_rows(session, histories, [7, 8])
        if lost == "after":
            swarm.kill(session.route[1][1].name)
        await session.rollback(2)
        histories = await step_rows(session, old, [9, 10])
        await step_rows(session, histories, [11, 12])


async def roll_back_in_a_hole_that_two_fill(position):
    """The second one's log was made by a replay, with gathered rows: nothing in it tells their old order."""
    nodes = [*three_nodes(), NodeSpec("d", "2:3"), NodeSpec("e", "3:4")]
    async with MemorySwarm(nodes) as swarm:
        async with swarm.session(batch_size=2) as session:
            versions = [[[], []]]
            for number, rows in enumerate([None, None, (0, 0), None, (1, 0)]):
                if number == 4:
                    swarm.kill("b")
                versions.append(await step_rows(session, versions[-1], [number, number + 10], rows))
            await session.rollback(position)
            histories = await step_rows(session, versions[position], [20, 21])
            swarm.evict("e")
            histories = await step_rows(session, histories, [22, 23], (1, 1))
            swarm.kill("d")
            swarm.add(NodeSpec("f", "2:3"))
            await step_rows(session, histories, [24, 25])
        await assert_all_free(swarm)


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
