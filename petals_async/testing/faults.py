"""Fault plans: what goes wrong, where and when, as data. A plan prints as three lines that bring it back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from petals_async.errors import ConfigurationError

MAX_FAULTS = 64
"""Faults of one plan at most."""

MAX_SECONDS = 8.0
"""No fault of a random plan lasts longer."""


class FaultKind(Enum):
    """What goes wrong."""

    KILL = "kill"
    """The process dies as by SIGKILL."""
    RESTART = "restart"
    """It dies, and is back after some seconds: another server id, the same address."""
    PAUSE = "pause"
    """It is stopped as by SIGSTOP; after some seconds it goes on, unless they are 0."""
    CONTINUE = "continue"
    """It goes on, if it was stopped."""
    DELAY = "delay"
    """The message is held up for some seconds, and all behind it."""
    DUPLICATE = "duplicate"
    """The step's message is delivered twice."""
    LOSE_REPLY = "lose_reply"
    """The step's reply vanishes."""
    EVICT = "evict"
    """The session's KV is dropped, unless its step is being worked on."""
    BLACK_HOLE = "black_hole"
    """The network swallows everything to and from the server; after some seconds no longer, unless they are 0."""


class Moment(Enum):
    """When it goes wrong."""

    OPENING = "opening"
    """A session's opening arrives."""
    RECEIVING = "receiving"
    """A step arrives that covers the token."""
    COMPUTING = "computing"
    """Such a step is being computed."""
    REPLYING = "replying"
    """Such a step's reply is about to be sent."""
    REPLAYING = "replaying"
    """A step arrives that covers the token, and sends again what was committed before on another server, or here."""
    BETWEEN = "between"
    """The reply to such a step is on its way."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        moment: When.
        token: The step that covers this token; of no matter when opening.
        node: Who, by name.
        kind: What.
        seconds: How long; see `FaultKind`.
    """

    moment: Moment
    token: int
    node: str
    kind: FaultKind
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.moment.value}@{self.token}:{self.node}:{self.kind.value}:{self.seconds:g}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read what `str` gave.

        Raises:
            ConfigurationError: It is not of that form.
        """
        try:
            when, node, kind, seconds = text.split(":")
            moment, token = when.split("@")
            return cls(Moment(moment), int(token), node, FaultKind(kind), float(seconds))
        except ValueError as error:
            raise ConfigurationError(f"a fault is moment@token:node:kind:seconds, got {text!r}") from error


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong in one run.

    Attributes:
        seed: From which everything else of the run is drawn as well.
        faults: Each comes true once at most, at the first moment that fits.
    """

    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        listed = " ".join(str(fault) for fault in self.faults)
        return (
            f'fault plan, {len(self.faults)} faults; its seed and they are\n"{self.seed} {listed}"\nfor FaultPlan.parse'
        )

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Read the second line of what `str` gave, or all of it.

        Raises:
            ConfigurationError: It is not of that form.
        """
        lines = text.strip().splitlines()
        words = (lines[1] if len(lines) > 1 else lines[0]).strip().strip('"').split()
        if not words or not words[0].lstrip("-").isdecimal() or len(words) > MAX_FAULTS + 1:
            raise ConfigurationError(f"a fault plan is a seed and up to {MAX_FAULTS} faults, got {text!r}")
        return cls(int(words[0]), tuple(Fault.parse(word) for word in words[1:]))

    @classmethod
    def random(cls, seed: int, nodes: Sequence[str], *, num_tokens: int, max_faults: int = 5) -> FaultPlan:
        """Draw a plan; the same arguments give the same plan.

        Args:
            seed: Of the draw.
            nodes: Names of the nodes that may be hit.
            num_tokens: Tokens which the steps will cover, about.
            max_faults: Faults at most; at least one.
        """
        draw = random.Random(f"fault plan {seed}")
        count = draw.randint(1, max_faults)
        return cls(seed, tuple(_random_fault(draw, nodes, num_tokens) for _ in range(count)))


def _random_fault(draw: random.Random, nodes: Sequence[str], num_tokens: int) -> Fault:
    kind = draw.choice([kind for kind in FaultKind if kind is not FaultKind.CONTINUE])
    moment = draw.choice([moment for moment in Moment if makes_sense(moment, kind)])
    seconds = round(draw.choice([0.05, 0.6, 2.0, MAX_SECONDS]) * draw.uniform(0.5, 1.0), 3)
    return Fault(moment, draw.randrange(num_tokens), draw.choice(list(nodes)), kind, seconds)


def makes_sense(moment: Moment, kind: FaultKind) -> bool:
    """Whether a kind of fault can come true at a moment."""
    match kind:
        case FaultKind.CONTINUE:
            return False
        case FaultKind.DELAY:
            return moment in (Moment.OPENING, Moment.RECEIVING, Moment.REPLYING, Moment.REPLAYING)
        case FaultKind.DUPLICATE:
            return moment in (Moment.RECEIVING, Moment.REPLAYING)
        case FaultKind.LOSE_REPLY:
            return moment is Moment.REPLYING
        case FaultKind.EVICT:
            return moment in (Moment.RECEIVING, Moment.REPLAYING, Moment.BETWEEN)
        case _:
            return True
