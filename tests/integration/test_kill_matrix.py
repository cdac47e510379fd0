"""Servers are killed at every kind of moment, and no token changes: pairwise combinations over one swarm.

Which span is lost, when, how often, what is being generated, in which dtype, how it is decoded, and what takes the
place. The swarm lives through all of it: who was killed is started again under the same name.

The moments are hit exactly, with a tap on the wire: between two steps; while a step is computed (it was sent, and
the reply of the dead is never seen); while its replacement is being filled (and that one dies, too); and a second
time, before the next step of the replacement.
"""

from dataclasses import dataclass, field

import anyio
import pytest
import torch
from pairwise import pairwise
from registry_process import RegistryProcess
from respawning import RespawningSwarm, eventually, open_stage
from scenarios import (
    CHUNK_TOKENS,
    NEW_TOKENS,
    PROMPTS,
    ROWS,
    SEED,
    decode_rows,
    in_child,
    options_of,
    plain_references,
)
from wire_tap import WireTap

import petals_async
from petals_async.core.messages import OpenSession, Step
from petals_async.core.span import Span

pytestmark = pytest.mark.processes

ROUTE = ("first", "middle", "last")

SPANS = {
    "first": "0:2", "middle": "2:4", "last": "4:6",
    "first-spare": "0:2", "middle-spare": "2:4", "last-spare": "4:6",
    "whole": "0:6",
    "quarter-a": "0:1", "quarter-b": "1:3", "quarter-c": "3:5", "quarter-d": "5:6",
}  # fmt: skip

REPLACEMENTS = {
    "exact": {name: (f"{name}-spare",) for name in ROUTE},
    "more": dict.fromkeys(ROUTE, ("whole",)),
    "shared": {
        "first": ("quarter-a", "quarter-b"),
        "middle": ("quarter-b", "quarter-c"),
        "last": ("quarter-c", "quarter-d"),
    },
}
"""Who takes over from whom; of those who share a hole, each runs only its part of it."""

OFFSETS = {
    "start": 0,
    "prefill": CHUNK_TOKENS,
    "one": len(PROMPTS[0]),
    "middle": len(PROMPTS[0]) + NEW_TOKENS // 2,
    "last": len(PROMPTS[0]) + NEW_TOKENS - 2,
}
"""At which step of the long prompt: the first chunk, the second one, and those that give token 2, 8, 12."""

COMBINATIONS = pairwise(
    {
        "lost": ROUTE,
        "position": list(OFFSETS),
        "moment": ["between", "computing", "replay", "twice"],
        "what": ["one", "rows", "many"],
        "dtype": ["float32", "bfloat16"],
        "decoding": ["greedy", "sampling"],
        "replacement": list(REPLACEMENTS),
    },
    allowed=lambda case: not (case["position"] == "start" and case["moment"] == "replay"),
    at_least=42,
)


@dataclass
class Killer:
    """Kills when its moment has come; the hooks of one tap."""

    case: dict
    stage: object
    swarm: RespawningSwarm
    tap: WireTap = field(default_factory=WireTap)
    num_replayed: int = 0
    done: set = field(default_factory=set)

    def __post_init__(self):
        lost = self.case["lost"]
        self.addresses = {name: self.swarm.info(name).address for name in (*ROUTE, *self.replacements)}
        self.lost, self.second = lost, self.replacements[-1]
        self.offset = OFFSETS[self.case["position"]]
        if self.case["moment"] == "twice" and self.case["position"] == "last":
            self.offset -= 1
        self.next_offset = self.offset + (CHUNK_TOKENS if self.offset < len(PROMPTS[0]) - CHUNK_TOKENS else 1)
        if self.offset == CHUNK_TOKENS:
            self.next_offset = 2 * CHUNK_TOKENS
        self.tap.before_send, self.tap.after_send = self.before_send, self.after_send

    @property
    def replacements(self):
        return REPLACEMENTS[self.case["replacement"]][self.case["lost"]]

    async def before_send(self, address, message):
        if not isinstance(message, Step):
            return
        if self.case["moment"] == "between" and message.token_offset == self.offset:
            await self.kill_first()
        if self.case["moment"] == "twice" and self._is_for_second(address) and message.token_offset >= self.next_offset:
            await self.kill_second()
        if self._begins_to_compute(address, message):
            self.tap.deaf.add(address)  # before it is sent: its reply may be here sooner than `after_send`

    async def after_send(self, address, message):
        if not isinstance(message, Step):
            return
        if self._begins_to_compute(address, message):
            await self.kill_first()
        elif self.case["moment"] == "replay" and self._is_for_second(address):
            self.num_replayed += 1
            if self.num_replayed == min(2, self.offset // CHUNK_TOKENS):
                await self.kill_second()

    def _begins_to_compute(self, address, message):
        at_once = self.case["moment"] == "between"
        return not at_once and address == self.addresses[self.lost] and message.token_offset == self.offset

    def _is_for_second(self, address):
        return "first" in self.done and address == self.addresses[self.second]

    async def kill_first(self):
        if "first" not in self.done:
            self.done.add("first")
            await self.stage.show(*self.replacements)
            await self._kill(self.lost)

    async def kill_second(self):
        if "second" not in self.done:
            self.done.add("second")
            await self._kill(self.second)
            await self.stage.give_encore()

    async def _kill(self, name):
        self.tap.deaf.add(self.addresses[name])
        await self.stage.kill(name)

    @property
    def expected_kills(self):
        return 2 if self.case["moment"] in ("replay", "twice") else 1


class References:
    """What is generated when nobody dies: by plain transformers (float32), and on the swarm (both dtypes)."""

    def __init__(self, context, model):
        self._context = context
        self._model = str(model)
        self._plain = None
        self._undisturbed = {}

    async def undisturbed(self, swarm, case):
        """Return what the swarm generates when nobody dies; run once for each key."""
        key = case["what"], case["dtype"], case["decoding"]
        if key not in self._undisturbed:
            async with (
                open_stage(swarm, *ROUTE) as stage,
                petals_async.Client(self._model, stage.registry, chunk_tokens=CHUNK_TOKENS, timeout_s=30) as client,
            ):
                self._undisturbed[key], recoveries = await generate(client, case)
            assert not any(recoveries)
        return self._undisturbed[key]

    def plain(self, case):
        """Return plain transformers' tokens; all of them are computed at once, in another process."""
        if self._plain is None:
            self._plain = in_child(self._context, plain_references, self._model)
        return self._plain[case["what"], case["decoding"]]


async def generate(client, case):
    """Generate what a combination says; return the tokens of each text, and the recoveries of each session."""
    if case["what"] == "rows":
        return await generate_rows(client, case["decoding"])
    prompts = list(PROMPTS if case["what"] == "many" else PROMPTS[:1])
    results = await client.generate(prompts, seed=SEED, **options_of(case["decoding"]))
    return [list(result.token_ids) for result in results], [result.recoveries for result in results]


async def generate_rows(client, decoding):
    """Decode two rows that share a session, and now and then swap or copy their caches."""
    edges, decoder = client.files.edges, decode_rows(decoding)
    async with client.session(batch_size=len(ROWS), max_tokens=len(ROWS[0]) + NEW_TOKENS) as session:
        new, rows = next(decoder)
        try:
            while True:
                states = edges.embed_tensor(torch.tensor(new), position=session.position)
                outputs = await session.step(states, row_indices=rows, num_outputs=1)
                new, rows = decoder.send(edges.logits(outputs)[:, -1])
        except StopIteration as end:
            return end.value, [tuple(session.recoveries)]


@pytest.fixture(scope="module")
def registry_process(context):
    process = RegistryProcess(context)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def swarms(context, tiny_model, registry_process):
    made = {
        dtype: RespawningSwarm(context, tiny_model, registry_process.address, SPANS, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    }
    yield made
    for swarm in made.values():
        anyio.run(swarm.stop)


@pytest.fixture(scope="module")
def references(context, tiny_model):
    return References(context, tiny_model)


def name_of(case):
    return "-".join(case.values())


async def test_there_are_enough_combinations():
    assert len(COMBINATIONS) >= 40
    assert len({name_of(case) for case in COMBINATIONS}) == len(COMBINATIONS)


@pytest.mark.parametrize("case", sorted(COMBINATIONS, key=lambda case: case["dtype"]), ids=name_of)
async def test_a_kill_changes_no_token(case, swarms, references, tiny_model):
    swarm = swarms[case["dtype"]]
    await swarm.ensure(REPLACEMENTS[case["replacement"]][case["lost"]])
    async with open_stage(swarm, *ROUTE) as stage:
        killer = Killer(case, stage, swarm)
        async with petals_async.Client(
            tiny_model, stage.registry, connector=killer.tap, chunk_tokens=CHUNK_TOKENS, timeout_s=30
        ) as client:
            tokens, recoveries = await generate(client, case)
            check_recoveries(killer, recoveries)
        for name in ROUTE:
            if name != case["lost"]:
                await eventually(lambda name=name: _is_empty(swarm, name))
    assert tokens == await references.undisturbed(swarm, case)
    if case["dtype"] == "float32":
        assert tokens == references.plain(case)


async def _is_empty(swarm, name):
    return await swarm.num_sessions(name) == 0


def check_recoveries(killer, recoveries):
    """At most one recovery for each kill, of exactly the hole, by those who were meant to."""
    case, hole = killer.case, Span.parse(SPANS[killer.case["lost"]])
    assert killer.stage.num_kills == killer.expected_kills
    assert all(len(of_one) <= killer.expected_kills for of_one in recoveries)
    firsts = [of_one[0] for of_one in recoveries if of_one]
    seen = {(first.lost.split()[0], first.span, names_of(first.replacements)) for first in firsts}
    wanted = (case["lost"], hole, killer.replacements)
    if case["moment"] == "replay":  # the replacements died before they had replaced anybody
        seen, wanted = {what[:2] for what in seen}, wanted[:2]
    if case["what"] == "many":  # one that opens or heals later may meet other servers, but somebody lost this one
        assert wanted[:2] in {what[:2] for what in seen}
    else:
        assert seen == {wanted}
        addresses = {killer.addresses[name] for name in killer.replacements}
        opened = [message.span for address, message in killer.tap.sent if is_opening(message) and address in addresses]
        assert opened
        assert all(span in hole for span in opened)


def names_of(servers):
    return tuple(server.split()[0] for server in servers)


def is_opening(message):
    return isinstance(message, OpenSession)
