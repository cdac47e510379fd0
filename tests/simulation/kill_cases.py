"""The kill matrix's cases, each with the fault plan that makes it, and the two models that it is run on."""

import math
import random
from dataclasses import dataclass, fields, replace
from functools import cache

import anyio

from petals_async.scopes import open_tasks
from petals_async.testing.faults import Fault, FaultKind, FaultPlan, Moment
from petals_async.testing.swarm import MemorySwarm, NodeSpec, toy_model
from petals_async.testing.toy import ToyBackend, ToyEdges, toy_reference, toy_scores, toy_vectors

NUM_BLOCKS = 6
NUM_TOKENS = 5
CHUNK_TOKENS = 3
PROMPT = [3, 14, 15, 9, 26]
PROMPTS = {
    "one prompt": [[PROMPT]],
    "two rows": [[PROMPT, [5, 35, 8, 9, 7]]],
    "several prompts": [[PROMPT], [[9, 26, 5]]],
}
"""For each kind of input its sessions, and for each session its rows."""

DIMENSIONS = {
    "span": ("a", "b", "c"),
    "position": ("first", "second", "middle", "last"),
    "moment": ("in prefill", "between steps", "while a step is computed", "during a replay", "twice in a row"),
    "prompts": tuple(PROMPTS),
    "dtype": ("float32", "bfloat16"),
    "decoding": ("greedy", "sampling"),
    "replacement": ("exactly the hole", "more than the hole", "two share it"),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    span: str
    position: str
    moment: str
    prompts: str
    dtype: str
    decoding: str
    replacement: str

    def __str__(self):
        return ", ".join(getattr(self, field.name) for field in fields(self))

    def nodes(self):
        """Three nodes, and the replacements: costly, so that nobody uses them before; those come back when they die."""
        first = 2 * "abc".index(self.span)
        blocks = {
            "exactly the hole": {"r1": (first, first + 2)},
            "more than the hole": {"r1": (0, NUM_BLOCKS)},
            "two share it": {"r1": (first, first + 1), "r2": (first + 1, first + 2)},
        }[self.replacement]
        return [
            *(NodeSpec(name, f"{2 * i}:{2 * i + 2}", dtype=self.dtype) for i, name in enumerate("abc")),
            *(
                NodeSpec(name, f"{start}:{end}", dtype=self.dtype, block_step_s=0.05, respawn_s=0.5)
                for name, (start, end) in blocks.items()
            ),
        ]

    def plan(self):
        """The kills: of the span's server, and of a replacement."""
        if self.moment == "in prefill":
            token = {"first": 0, "second": 1, "middle": 2, "last": len(PROMPT) - 1}[self.position]
            return self._kills((Moment.RECEIVING, token))
        number = {"first": 0, "second": 1, "middle": NUM_TOKENS // 2, "last": NUM_TOKENS - 1}[self.position]
        token = len(PROMPT) - 1 + number
        return self._kills(
            *{
                "between steps": [(Moment.BETWEEN, token)],
                "while a step is computed": [(Moment.COMPUTING, token)],
                "during a replay": [(Moment.COMPUTING, token), (Moment.REPLAYING, number % 3)],
                "twice in a row": [(Moment.COMPUTING, token), (Moment.RECEIVING, token)],
            }[self.moment]
        )

    def _kills(self, first, second=None):
        faults = [Fault(*first, self.span, FaultKind.KILL)]
        if second:
            share = self.replacement == "two share it" and self.position in ("second", "last")
            faults.append(Fault(*second, "r2" if share else "r1", FaultKind.KILL))
        return FaultPlan(0, tuple(faults))


class ToyMatrixModel:
    """The toy model."""

    def __init__(self, dtype):
        self.edges = ToyEdges(NUM_BLOCKS, dtype=dtype)
        self.spec = toy_model(NUM_BLOCKS)

    def backend(self, spec):
        return ToyBackend(spec.span, dtype=spec.dtype)

    def embed(self, rows, position):
        return self.edges.embed_rows(rows)

    def chooser(self, decoding):
        """Return a function that picks a token for each row from the last outputs."""
        draw = random.Random(7)

        def choose(outputs):
            return [self._choose(vectors[-1], decoding, draw) for vectors in toy_vectors(outputs)]

        return choose

    def _choose(self, vector, decoding, draw):
        scores = toy_scores(vector)
        if decoding == "greedy":
            return max(range(len(scores)), key=scores.__getitem__)
        return draw.choices(range(len(scores)), weights=[math.exp(score) for score in scores])[0]

    @cache  # noqa: B019 - lives as long as the test run
    def reference(self, prompts, decoding):
        """The tokens, by the whole model run from scratch for each token."""
        return [self._continue([list(row) for row in rows], decoding) for rows in PROMPTS[prompts]]

    def _continue(self, rows, decoding):
        draw, start = random.Random(7), len(rows[0])
        for _ in range(NUM_TOKENS):
            for row in rows:
                row.append(self._choose(toy_reference(row, NUM_BLOCKS)[-1], decoding, draw))
        return [row[start:] for row in rows]


async def decode(swarm, client, model, case, rows):
    """Continue the rows of one session; return the new tokens of each, and the recoveries."""
    choose = model.chooser(case.decoding)
    new, inputs = [[] for _ in rows], rows
    async with swarm.session(
        client, batch_size=len(rows), max_tokens=32, dtype=case.dtype, chunk_tokens=CHUNK_TOKENS
    ) as session:
        for _ in range(NUM_TOKENS):
            outputs = await session.step(model.embed(inputs, session.position), num_outputs=1)
            inputs = [[token] for token in choose(outputs)]
            new = [[*row, *token] for row, token in zip(new, inputs, strict=True)]
        return new, session.recoveries, session.exact


async def run_case(case, model, plan):
    """Run a case's sessions at the same time; return for each what `decode` gave, and the faults that came true."""
    results = {}

    async def run(number, rows):
        results[number] = await decode(swarm, client, model, case, rows)

    nodes = [replace(node, step_s=0.0) for node in case.nodes()]  # time of its own would only cost real time here
    async with MemorySwarm(nodes, model=model.spec, backend=model.backend, plan=plan, latency_s=0.0) as swarm:
        async with swarm.client(dtype=case.dtype) as client, open_tasks() as tasks:
            for number, rows in enumerate(PROMPTS[case.prompts]):
                tasks.start_soon(run, number, rows)
        await anyio.sleep(0.6)
        assert (swarm.kv_in_use(), swarm.num_sessions(), swarm.num_streams()) == (0, 0, 0)
        return [results[number] for number in sorted(results)], swarm.faults.fired


async def check_case(case, model, expected):
    """The tokens are the expected ones, each kill came true and cost each session one recovery at most."""
    plan = case.plan()
    results, fired = await run_case(case, model, plan)
    assert [tokens for tokens, _, _ in results] == expected, case
    assert len(fired) == len(plan.faults), (case, fired)
    for _, recoveries, exact in results:
        assert len(recoveries) <= len(fired), (case, recoveries)
        assert exact
    needs_one = case.moment != "between steps" or case.position != "last"
    assert any(recoveries for _, recoveries, _ in results) or not needs_one, case
