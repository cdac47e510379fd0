"""KvBudget against a table that everybody can read: who holds how much, since when, and why it can't be taken."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from petals_async.core.kv_budget import MIN_PROTECTION_S, REPLAY_PROTECTION_FACTOR, Admitted, KvBudget, NotNow

CAPACITY = 10
keys = st.sampled_from("abcde")


@dataclass
class Holding:
    num_bytes: int
    last_used: float
    protected_until: float
    orphaned: bool = False


class Budget(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.budget = KvBudget(CAPACITY)
        self.now = 0.0
        self.held = {}
        self.pins = dict.fromkeys("abcde", 0)

    def may_be_evicted(self, key):
        holding = self.held[key]
        return not self.pins[key] and (holding.orphaned or holding.protected_until <= self.now)

    @property
    def free(self):
        return CAPACITY - sum(holding.num_bytes for holding in self.held.values())

    @rule(key=keys, num_bytes=st.integers(0, CAPACITY + 1))
    def admit(self, key, num_bytes):
        if key in self.held:
            return
        loose = [other for other in self.held if self.may_be_evicted(other)]
        most = self.free + sum(self.held[other].num_bytes for other in loose)
        outcome = self.budget.admit(key, num_bytes, self.now)
        if num_bytes > most:
            assert isinstance(outcome, NotNow)
            assert outcome.retry_after_s > 0
            return
        assert isinstance(outcome, Admitted)
        self.check_victims(outcome.evicted, loose, num_bytes)
        for victim in outcome.evicted:
            del self.held[victim]
        self.held[key] = Holding(num_bytes, self.now, self.now + MIN_PROTECTION_S)

    def check_victims(self, victims, loose, num_bytes):
        assert set(victims) <= set(loose), "a pinned or protected session was evicted"
        if victims:
            without_last = self.free + sum(self.held[victim].num_bytes for victim in victims[:-1])
            assert without_last < num_bytes, "more were evicted than needed"
        spared = [self.held[key] for key in loose if key not in victims]
        for victim in map(self.held.__getitem__, victims):
            assert victim.orphaned or not any(other.orphaned for other in spared), "orphans go first"
            alike = [other for other in spared if other.orphaned == victim.orphaned]
            assert all(victim.last_used <= other.last_used for other in alike), "the longest idle goes first"

    @rule(key=keys)
    def pin(self, key):
        self.budget.pin(key)
        self.pins[key] += 1

    @rule(key=keys, replay_cost_s=st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    def unpin(self, key, replay_cost_s):
        if not self.pins[key]:
            return
        self.budget.unpin(key, self.now, replay_cost_s=replay_cost_s)
        self.pins[key] -= 1
        if key in self.held:
            self.held[key].last_used = self.now
            protection_s = max(MIN_PROTECTION_S, REPLAY_PROTECTION_FACTOR * replay_cost_s)
            self.held[key].protected_until = self.now + protection_s

    @rule(key=keys, orphaned=st.booleans())
    def set_orphaned(self, key, orphaned):
        self.budget.set_orphaned(key, orphaned)
        if key in self.held:
            self.held[key].orphaned = orphaned

    @rule(key=keys)
    def free_one(self, key):
        self.budget.free(key)
        self.held.pop(key, None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 7.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def what_it_says(self):
        assert 0 <= self.budget.used_bytes <= CAPACITY
        assert (self.budget.used_bytes, self.budget.free_bytes) == (CAPACITY - self.free, self.free)
        for key, count in self.pins.items():
            assert self.budget.pinned(key) == (count > 0)
            assert (key in self.budget) == (key in self.held)
            assert self.budget.bytes_of(key) == (self.held[key].num_bytes if key in self.held else 0)


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=60, stateful_step_count=40)


def test_orphans_go_first_and_the_longest_idle_of_them():
    budget = KvBudget(10)
    for now, key in enumerate("abcde"):
        budget.admit(key, 2, float(now))
    for key in "ced":
        budget.set_orphaned(key, True)
    assert budget.admit("f", 2, 100.0) == Admitted(("c",))
    assert budget.admit("g", 6, 200.0) == Admitted(("d", "e", "a"))


def test_after_the_stated_wait_there_is_room():
    budget = KvBudget(10)
    budget.admit("a", 10, 0.0)
    budget.pin("a")
    budget.unpin("a", 2.0, replay_cost_s=3.0)
    outcome = budget.admit("b", 10, 5.0)
    assert outcome == NotNow(9.0)
    assert budget.admit("b", 10, 5.0 + outcome.retry_after_s) == Admitted(("a",))


def test_two_that_do_not_fit_together_alternate():
    """Each gets at least the protection of its replay before the other may have its turn."""
    budget, now, turns = KvBudget(10), 0.0, []
    budget.admit("a", 6, now)
    for _ in range(3):
        for mine, other in (("b", "a"), ("a", "b")):
            budget.pin(other)
            budget.unpin(other, now, replay_cost_s=1.0)
            assert isinstance(budget.admit(mine, 6, now + 3.9), NotNow)
            now += 4.0
            assert budget.admit(mine, 6, now) == Admitted((other,))
            turns.append(mine)
    assert turns == ["b", "a"] * 3
