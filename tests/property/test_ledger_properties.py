"""StepLedger against a naive server that keeps each token of each row, and a client that knows what should be held."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from petals_async.core.ledger import Resend, Run, StepLedger
from petals_async.core.messages import Refused, Result

KEPT = 3
SWAPPED = (1, 2, 0)
ids = st.integers(-KEPT - 1, 2)
offsets = st.integers(0, 9)


class Ledger(RuleBasedStateMachine):
    """`cache` is what the server holds, token by token, each a tuple of rows.

    `wanted[p]` is what it should hold when a step comes at offset p. `replies` are all that were ever given.
    """

    def __init__(self):
        super().__init__()
        self.ledger = StepLedger(max_kept_replies=KEPT)
        self.cache = []
        self.wanted = [[]]
        self.replies = {}
        self.last_permutation = None
        self.evicted = False
        self.serial = 0

    def expected(self, step_id, offset):
        """The rules 1 to 4, in words that a person could check."""
        next_id = len(self.replies) + 1
        if step_id in self.replies and step_id > len(self.replies) - KEPT:
            return Resend(self.replies[step_id])
        if step_id < next_id:
            return "STALE_STEP"
        if step_id > next_id:
            return "OUT_OF_ORDER"
        if offset > len(self.cache):
            return "EVICTED" if self.evicted else "OFFSET_GAP"
        if offset and self.last_permutation is not None and offset <= self.last_permutation:
            return "ROWS_CHANGED"
        return Run()

    @rule(relative=ids, offset=offsets, num_tokens=st.integers(0, 3), permuted=st.booleans())
    def step(self, relative, offset, num_tokens, permuted):
        step_id = len(self.replies) + relative
        expected = self.expected(step_id, offset)
        decision = self.ledger.decide(step_id, offset)
        if expected == "ROWS_CHANGED":
            self.cache.clear()
            self.last_permutation = None
        if isinstance(expected, str):
            assert isinstance(decision, Refused)
            assert (decision.step_id, decision.reason) == (step_id, expected)
            assert (decision.position, decision.next_step_id) == (len(self.cache), len(self.replies) + 1)
            return
        assert decision == expected
        if isinstance(decision, Run):
            self.run(step_id, offset, num_tokens, permuted and num_tokens > 0)

    @rule(offset=offsets, num_tokens=st.integers(1, 3), permuted=st.booleans())
    def next_step(self, offset, num_tokens, permuted):
        """The same with the right id, as most steps have it."""
        self.step(1, min(offset, len(self.cache)), num_tokens, permuted)

    def run(self, step_id, offset, num_tokens, permuted):
        assert self.cache[:offset] == self.wanted[offset], "the step would be computed over the wrong rows"
        del self.cache[offset:], self.wanted[offset + 1 :]
        if permuted:
            self.cache = [tuple(token[row] for row in SWAPPED) for token in self.cache]
            self.last_permutation = offset
        elif offset == 0:
            self.last_permutation = None
        for _ in range(num_tokens):
            self.serial += 1
            self.cache.append(tuple((self.serial, row) for row in range(len(SWAPPED))))
            self.wanted.append(list(self.cache))
        reply = Result(step_id, offset, offset + num_tokens)
        self.ledger.record(reply, permuted=permuted)
        self.replies[step_id] = reply
        self.evicted = False

    @rule()
    def evict(self):
        self.ledger.evict()
        self.evicted = self.evicted or bool(self.cache)
        self.cache.clear()
        self.last_permutation = None

    @rule(max_tokens=offsets)
    def fork(self, max_tokens):
        """A fork holds the wanted tokens, in their order at that point, or none; and knows the old permutations."""
        possible = min(max_tokens, len(self.cache))
        if self.cache[:possible] != self.wanted[possible]:
            possible = 0
        forked = self.ledger.fork(max_tokens)
        assert (forked.position, forked.next_step_id) == (possible, 1)
        for offset in range(possible + 1):
            if isinstance(self.ledger.fork(max_tokens).decide(1, offset), Run):
                assert self.cache[:offset] == self.wanted[offset]

    @invariant()
    def what_it_says(self):
        assert (self.ledger.position, self.ledger.next_step_id) == (len(self.cache), len(self.replies) + 1)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)


def test_exactly_so_many_replies_are_kept():
    ledger = StepLedger(max_kept_replies=KEPT)
    replies = [Result(number, number - 1, number) for number in range(1, KEPT + 3)]
    for reply in replies:
        ledger.record(reply, permuted=False)
    kept = {reply.step_id for reply in replies if ledger.decide(reply.step_id, 0) == Resend(reply)}
    assert kept == {3, 4, 5}
    assert [ledger.decide(number, 0).reason for number in (1, 2)] == ["STALE_STEP"] * 2


def test_a_refusal_carries_what_it_is_told():
    ledger = StepLedger(max_kept_replies=KEPT, position=4)
    refused = ledger.refuse(7, "KV_EXHAUSTED", "no room", retry_after_s=2.5)
    assert refused == Refused(7, "KV_EXHAUSTED", "no room", 4, 1, 2.5)


def test_an_eviction_of_nothing_is_none():
    ledger = StepLedger(max_kept_replies=KEPT)
    ledger.evict()
    assert ledger.decide(1, 1).reason == "OFFSET_GAP"
