"""The fault campaign: seeded random swarms, traffic and faults, each compared with a naive model.

One seed is one run: some nodes, a few sessions at once with random calls, a fault plan. Whatever dies, every output
must be that of the whole model run from scratch, and in the end nothing may be left on any server.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import anyio

from petals_async.client.swarm import Swarm
from petals_async.errors import PetalsAsyncError
from petals_async.scopes import open_tasks
from petals_async.testing.faults import MAX_SECONDS, Fault, FaultPlan
from petals_async.testing.node import NodeSpec
from petals_async.testing.swarm import MemorySwarm, three_nodes
from petals_async.testing.toy import TOY_KV_BYTES, ToyEdges
from petals_async.testing.traffic import Traffic, WrongOutputError, problem_of
from petals_async.testing.virtual_time import run_in_virtual_time

NUM_BLOCKS = 6
"""Blocks of the model."""

MAX_TOKENS = 48
"""Tokens of a session."""

MAX_SESSIONS = 3
"""Sessions at once, at most."""

MAX_CALLS = 16
"""Calls of a session, at most."""

MAX_FAULTS_A_RUN = 12
"""Faults planned for one run, at most."""

MAX_ROWS = 3
"""Rows of a session, at most."""

SESSION_BLOCK_BYTES = MAX_ROWS * MAX_TOKENS * TOY_KV_BYTES
"""KV of the largest session in one block."""

LEASE_S = 3.0
"""What a server keeps of a session without a stream; short, since in the end all must be free."""

TIME_LIMIT_S = 600.0
"""Virtual seconds after which a run hangs."""

SETTLE_S = MAX_SECONDS + LEASE_S + 3.0
"""Virtual seconds after which everything must be free: the longest fault, the lease, and the goodbyes."""

SETTLE_CHECK_S = 0.5
"""Virtual seconds between two looks at what is left."""

SPARES = (
    ("2:4",),
    ("2:3", "3:4"),
    ("0:1", "1:2", "4:5", "5:6"),
    ("1:5",),
    ("0:3", "3:6"),
    ("0:6",),
    (),
)
"""What further nodes hold: as much as a hole, less, and more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed gave.

    Attributes:
        seed: Which.
        plan: The faults planned.
        fired: The faults that came true.
        problem: What was wrong; empty if nothing was.
        num_calls: Calls on all sessions.
        num_cancelled: Those that were cancelled.
        num_recoveries: Losses that sessions got over.
        virtual_s: How long it took, in virtual seconds.
        trace: What happened, a line each.
    """

    seed: int
    plan: FaultPlan
    fired: tuple[Fault, ...]
    problem: str
    num_calls: int
    num_cancelled: int
    num_recoveries: int
    virtual_s: float
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.problem or 'as the reference'}\n{self.plan}"


class Run:
    """One seed's swarm, traffic and faults, drawn when it is made."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draw = random.Random(f"campaign {seed}")
        self._nodes = self._draw_nodes()
        names = [node.name for node in self._nodes]
        self.plan = FaultPlan.random(seed, names, num_tokens=24, max_faults=MAX_FAULTS_A_RUN)
        self._share_client = self._draw.random() < 0.5
        self._settled = self._draw.random() < 0.5
        self._chunk_tokens = self._draw.choice([2, 4, 64])
        self._traffic = [self._draw_traffic(number) for number in range(self._draw.randint(1, MAX_SESSIONS))]
        self._num_recoveries = 0

    def _draw_nodes(self) -> list[NodeSpec]:
        draw = self._draw
        respawn_s, step_s = draw.choice([0.1, 2.0, 30.0]), draw.choice([0.0, 0.001, 0.02])
        room = draw.choice([1.0, 1.5, 100.0])
        blocks = [blocks for spares in draw.sample(SPARES, 2) for blocks in spares]
        spares = [NodeSpec(f"s{number}", held) for number, held in enumerate(blocks)]
        spares = [replace(spare, block_step_s=draw.choice([0.001, 0.05, 0.05, 0.05])) for spare in spares]
        return [
            replace(
                node,
                respawn_s=respawn_s,
                step_s=step_s,
                lease_s=LEASE_S,
                kv_budget_bytes=round(room * SESSION_BLOCK_BYTES) * len(node.span),
            )
            for node in [*three_nodes(NUM_BLOCKS), *spares]
        ]

    def _draw_traffic(self, number: int) -> Traffic:
        draw = random.Random(f"traffic {self._seed} {number}")
        batch_size = draw.choice([1, 2, MAX_ROWS])
        return Traffic(f"session {number}", draw, ToyEdges(NUM_BLOCKS), batch_size, MAX_TOKENS)

    async def run(self) -> Outcome:
        """Run it to its end, or to the first thing that is wrong."""
        problem = ""
        swarm = MemorySwarm(self._nodes, plan=self.plan)
        num_tasks = len(anyio.get_running_tasks())
        try:
            with anyio.fail_after(TIME_LIMIT_S):
                async with swarm:
                    await self._use(swarm)
        except (PetalsAsyncError, WrongOutputError, TimeoutError) as error:
            problem = problem_of(error)
        if not problem and len(anyio.get_running_tasks()) != num_tasks:
            problem = f"{len(anyio.get_running_tasks()) - num_tasks} tasks are left"
        return self._outcome(swarm, problem)

    def _outcome(self, swarm: MemorySwarm, problem: str) -> Outcome:
        return Outcome(
            self._seed,
            self.plan,
            tuple(swarm.faults.fired),
            problem,
            num_calls=sum(traffic.num_calls for traffic in self._traffic),
            num_cancelled=sum(traffic.num_cancelled for traffic in self._traffic),
            num_recoveries=self._num_recoveries,
            virtual_s=anyio.current_time(),
            trace=tuple(swarm.trace),
        )

    async def _use(self, swarm: MemorySwarm) -> None:
        async with swarm.client(settled=self._settled) as client, open_tasks() as tasks:
            for traffic in self._traffic:
                tasks.start_soon(self._run_session, swarm, client if self._share_client else None, traffic)
        await self._settle(swarm)

    async def _settle(self, swarm: MemorySwarm) -> None:
        """Wait until nothing is left on any server."""
        until = anyio.current_time() + SETTLE_S
        while (left := (swarm.num_sessions(), swarm.kv_in_use(), swarm.num_streams())) != (0, 0, 0):
            if anyio.current_time() >= until:
                raise WrongOutputError(f"sessions, KV bytes and streams that are left: {left}")
            await anyio.sleep(SETTLE_CHECK_S)

    async def _run_session(self, swarm: MemorySwarm, client: Swarm | None, traffic: Traffic) -> None:
        async with swarm.session(
            client, batch_size=traffic.batch_size, max_tokens=MAX_TOKENS, chunk_tokens=self._chunk_tokens
        ) as session:
            await traffic.run(session, traffic.draw.randint(3, MAX_CALLS))
            self._num_recoveries += len(session.recoveries)


def run_seed(seed: int) -> Outcome:
    """Run one seed in virtual time; the same seed gives the same trace. Needs trio."""
    return run_in_virtual_time(Run(seed).run, seed=seed)
