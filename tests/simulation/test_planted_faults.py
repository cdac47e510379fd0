"""The checker is trusted only since it finds bugs that were put there: each within NUM_SEEDS of the campaign.

Every plant is a bug that somebody has made or might make. Without a plant the same seeds find nothing.
"""

import pytest
from virtual import roll_back_behind_a_permutation, roll_back_in_a_hole_that_two_fill

from petals_async.client import link as link_module
from petals_async.client import route as route_module
from petals_async.client import stage as stage_module
from petals_async.client.link import Link
from petals_async.client.segment import Segment
from petals_async.client.session import Session
from petals_async.client.stage import Stage
from petals_async.core.ledger import StepLedger
from petals_async.core.replay import ReplayLog
from petals_async.server.session_table import SessionTable
from petals_async.testing.campaign import run_seed
from petals_async.testing.virtual_time import run_in_virtual_time

NUM_SEEDS = 300


@pytest.fixture(autouse=True)
def in_virtual_time():
    """Each seed brings its own clock and order of tasks."""


def first_finding():
    """Return the first outcome with a problem, or None."""
    return next((outcome for outcome in map(run_seed, range(NUM_SEEDS)) if outcome.problem), None)


def position_is_copied(monkeypatch):
    """The obvious repair of petals#587: the new server is told position t, and no history is sent."""
    decide = StepLedger.decide

    def trusting(self, step_id, token_offset):
        self.position = max(self.position, token_offset)
        return decide(self, step_id, token_offset)

    async def nothing(links, end, *, merge_tokens, fast):
        return 0

    monkeypatch.setattr(StepLedger, "decide", trusting)
    for module in (route_module, stage_module):
        monkeypatch.setattr(module, "replay", nothing)


def replay_includes_the_pending_step(monkeypatch):
    replay = link_module.replay

    async def too_much(links, end, *, merge_tokens, fast):
        return await replay(links, links[0].log.end, merge_tokens=merge_tokens, fast=fast)

    for module in (route_module, stage_module):
        monkeypatch.setattr(module, "replay", too_much)


def tail_stays_after_a_cancelled_call(monkeypatch):
    monkeypatch.setattr(Stage, "rollback_tail", lambda self: None)


def tail_stays_in_the_first_log_only(monkeypatch):
    def rollback_tail(self):
        for link in self.links[1:]:
            link.log.rollback_tail()

    monkeypatch.setattr(Stage, "rollback_tail", rollback_tail)


def replies_are_matched_by_order(monkeypatch):
    """A cancelled step takes its ticket along, and the reply that comes next is taken for the next step's."""
    wait = Segment.wait

    async def forgetful(self, ticket):
        try:
            return await wait(self, ticket)
        except BaseException:
            if ticket in self._pending:
                self._pending.remove(ticket)
                self._in_flight.release()
            raise

    monkeypatch.setattr(Segment, "wait", forgetful)
    monkeypatch.setattr(Segment, "_is_stale", lambda self, step_id: not self._pending)
    monkeypatch.setattr(Segment, "_expect", lambda self, step_id: self._pending[0])
    monkeypatch.setattr(Segment, "_check_result", lambda self, step, result: None)


def permutation_is_applied_twice(monkeypatch):
    """A replay gathers the rows of the pending step as well, which then permutes them again."""

    def ancestry(self, token_offset, batch_size, end):
        rows = list(range(batch_size))
        for permutation in self._permutations:
            if token_offset < permutation.token_offset <= end:
                rows = [rows[index] for index in permutation.row_indices]
        return rows

    monkeypatch.setattr(ReplayLog, "_ancestry", ancestry)


def permutations_are_composed_backwards(monkeypatch):
    def ancestry(self, token_offset, batch_size, end):
        rows = list(range(batch_size))
        for permutation in self._permutations:
            if token_offset < permutation.token_offset < end:
                rows = [permutation.row_indices[row] for row in rows]
        return rows

    monkeypatch.setattr(ReplayLog, "_ancestry", ancestry)


def gathered_rows_are_forgotten(monkeypatch):
    """A server that was filled with gathered rows is rolled back behind the permutation."""
    monkeypatch.setattr(Link, "check_rows", lambda self, token_offset: None)


def rows_are_not_given_back(monkeypatch):
    """A server truncates behind a permutation."""
    monkeypatch.setattr(StepLedger, "_needs_old_rows", lambda self, token_offset: False)


def logs_made_by_a_replay_forget_that_rows_were_gathered(monkeypatch):
    """Such a log is cut like any other, and its rows keep the order that was rolled back."""
    truncate = ReplayLog.truncate

    def trusting(self, position):
        self.gathered_at = 0
        truncate(self, position)

    monkeypatch.setattr(ReplayLog, "truncate", trusting)


def rollback_leaves_the_logs(monkeypatch):
    monkeypatch.setattr(Stage, "truncate", lambda self, position: None)


def position_moves_before_the_call_succeeds(monkeypatch):
    run = Session._run

    async def eager(self, hidden, rows, num_outputs):
        before = self.position
        try:
            return await run(self, hidden, rows, num_outputs)
        except BaseException:
            self.position = before + 1
            raise

    monkeypatch.setattr(Session, "_run", eager)


def same_id_is_run_twice(monkeypatch):
    """A step that is delivered twice is appended twice."""
    decide = StepLedger.decide

    def forgetful(self, step_id, token_offset):
        self._replies.clear()
        self.next_step_id = step_id
        return decide(self, step_id, self.position if token_offset < self.position else token_offset)

    monkeypatch.setattr(StepLedger, "decide", forgetful)


def memory_is_not_freed(monkeypatch):
    remove = SessionTable._remove

    def leaky(self, session):
        num_bytes = self.budget.bytes_of(session.request.session_id)
        remove(self, session)
        if num_bytes and session.num_completed > 5:
            self.budget.admit(object(), 16, 0.0)

    monkeypatch.setattr(SessionTable, "_remove", leaky)


def eviction_keeps_the_position(monkeypatch):
    monkeypatch.setattr(StepLedger, "evict", lambda self, position=0: None)


PLANTS = [
    position_is_copied,
    replay_includes_the_pending_step,
    tail_stays_after_a_cancelled_call,
    tail_stays_in_the_first_log_only,
    replies_are_matched_by_order,
    permutation_is_applied_twice,
    permutations_are_composed_backwards,
    rows_are_not_given_back,
    rollback_leaves_the_logs,
    position_moves_before_the_call_succeeds,
    same_id_is_run_twice,
    memory_is_not_freed,
    eviction_keeps_the_position,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    found = first_finding()
    assert found is not None, f"{NUM_SEEDS} seeds did not find it"


def test_the_obvious_repair_of_587_gives_wrong_tokens(monkeypatch):
    """Not an error, which anybody would see: other tokens."""
    position_is_copied(monkeypatch)
    assert any("is wrong from token" in run_seed(seed).problem for seed in range(20))


RARE = [
    (gathered_rows_are_forgotten, roll_back_behind_a_permutation, "before"),
    (logs_made_by_a_replay_forget_that_rows_were_gathered, roll_back_in_a_hole_that_two_fill, 2),
]
"""What only one seed in a hundred finds has a test of its own."""


@pytest.mark.parametrize(("plant", "scenario", "argument"), RARE, ids=lambda value: getattr(value, "__name__", ""))
def test_rare_planted_bug_is_found(plant, scenario, argument, monkeypatch):
    run_in_virtual_time(scenario, argument)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_in_virtual_time(scenario, argument)


def test_nothing_is_found_where_nothing_was_planted():
    """test_fault_plans.py runs the same seeds, and more."""
    assert not [outcome for outcome in map(run_seed, range(20)) if outcome.problem]
