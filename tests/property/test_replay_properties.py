"""ReplayLog against rows that are permuted at once, with the state kept for every position."""

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from petals_async.core.byte_budget import ByteBudget
from petals_async.core.hidden import HiddenStates
from petals_async.core.replay import ReplayLog
from petals_async.errors import LengthExceededError, RequestError

ROWS = 3
LIMIT_TOKENS = 14


def states(rows):
    """Rows of numbers as hidden states of width 1."""
    data = b"".join(struct.pack("<I", number) for row in rows for number in row)
    return HiddenStates("float32", (len(rows), len(rows[0]), 1), data)


def numbers(hidden):
    flat = struct.unpack(f"<{hidden.batch_size * hidden.num_tokens}I", hidden.data)
    return [list(flat[row * hidden.num_tokens : (row + 1) * hidden.num_tokens]) for row in range(hidden.batch_size)]


class Log(RuleBasedStateMachine):
    """`rows_at[p]` is what each row held when p tokens were held, before the step at p; chunks begin at `starts`."""

    def __init__(self):
        super().__init__()
        self.budget = ByteBudget(LIMIT_TOKENS * ROWS * 4, "the log")
        self.log = ReplayLog(self.budget)
        self.rows_at = [[[] for _ in range(ROWS)]]
        self.starts = []
        self.committed = 0
        self.serial = 0

    @property
    def end(self):
        return len(self.rows_at) - 1

    @rule(num_tokens=st.integers(1, 4), rows=st.one_of(st.just(()), st.tuples(*[st.integers(0, ROWS - 1)] * ROWS)))
    def append(self, num_tokens, rows):
        new = [[self.serial + row * num_tokens + token for token in range(num_tokens)] for row in range(ROWS)]
        self.serial += ROWS * num_tokens
        if self.end + num_tokens > LIMIT_TOKENS:
            with pytest.raises(LengthExceededError, match=f"may hold {LIMIT_TOKENS * ROWS * 4} bytes"):
                self.log.append(self.end, states(new), rows)
            return
        self.log.append(self.end, states(new), rows)
        self.starts.append(self.end)
        held = self.rows_at[-1]
        held = [held[row] for row in rows] if rows else held
        for count in range(1, num_tokens + 1):
            self.rows_at.append([row + new[index][:count] for index, row in enumerate(held)])

    @rule(offset=st.integers(-1, LIMIT_TOKENS + 1))
    def append_elsewhere(self, offset):
        if offset != self.end:
            with pytest.raises(RequestError, match=f"the log ends at {self.end}"):
                self.log.append(offset, states([[1]] * ROWS))

    @rule(data=st.data())
    def commit(self, data):
        position = data.draw(st.integers(self.committed, self.end))
        self.log.commit(position)
        self.committed = position

    @rule(beyond=st.integers(1, 3))
    def commit_too_much(self, beyond):
        with pytest.raises(RequestError, match="can't be committed"):
            self.log.commit(self.end + beyond)

    @rule(data=st.data())
    def truncate(self, data):
        position = data.draw(st.integers(0, self.end))
        self.log.truncate(position)
        self.cut(position)

    @rule()
    def rollback_tail(self):
        self.log.rollback_tail()
        self.cut(self.committed)

    def cut(self, position):
        del self.rows_at[position + 1 :]
        self.starts = [start for start in self.starts if start < position]
        self.committed = min(self.committed, position)

    @rule(data=st.data())
    def read(self, data):
        end = data.draw(st.integers(0, self.end))
        start = data.draw(st.integers(0, end))
        chunks = list(self.log.read(start, end))
        begin = [
            max(at, start)
            for at, until in zip(self.starts, [*self.starts, self.end][1:], strict=True)
            if max(at, start) < min(until, end)
        ]
        assert [chunk.token_offset for chunk in chunks] == begin
        assert [chunk.end for chunk in chunks] == [*begin[1:], end][: len(begin)]
        for row in range(ROWS):
            got = [number for chunk in chunks for number in numbers(chunk.hidden)[row]]
            assert got == self.rows_at[end][row][start:end]

    @precondition(lambda self: self.end)
    @rule()
    def close(self):
        self.log.close()
        self.cut(0)

    @invariant()
    def what_it_says(self):
        assert (self.log.end, self.log.committed) == (self.end, self.committed)
        assert self.log.num_bytes == self.budget.used_bytes == self.end * ROWS * 4


TestLog = Log.TestCase
TestLog.settings = settings(max_examples=60, stateful_step_count=40)


def test_logs_share_one_budget():
    budget = ByteBudget(24, "the replay logs")
    one, other = ReplayLog(budget), ReplayLog(budget)
    one.append(0, states([[1, 2, 3]]))
    with pytest.raises(LengthExceededError, match="may hold 24 bytes and holds 12; 16 more"):
        other.append(0, states([[1, 2, 3, 4]]))
    assert (other.end, budget.used_bytes) == (0, 12)
    one.close()
    other.append(0, states([[1, 2, 3, 4]]))
    assert budget.used_bytes == 16


def test_permutations_compose_in_the_order_in_which_they_came():
    log = ReplayLog()
    log.append(0, states([[1], [2], [3]]))
    log.append(1, states([[4], [5], [6]]), (1, 2, 0))
    log.append(2, states([[7], [8], [9]]), (1, 0, 0))
    rows = [[1], [2], [3]]
    rows = [rows[1] + [4], rows[2] + [5], rows[0] + [6]]
    rows = [rows[1] + [7], rows[0] + [8], rows[0] + [9]]
    chunks = list(log.read(0, 3))
    for row in range(3):
        assert [number for chunk in chunks for number in numbers(chunk.hidden)[row]] == rows[row]


def test_the_pending_steps_permutation_is_not_replayed():
    """A permutation belongs to the step at its offset, which is never part of a replay up to there."""
    log = ReplayLog()
    log.append(0, states([[1], [2]]))
    log.append(1, states([[3], [4]]), (1, 0))
    assert [numbers(chunk.hidden) for chunk in log.read(0, 1)] == [[[1], [2]]]
    assert [numbers(chunk.hidden) for chunk in log.read(0, 2)] == [[[2], [1]], [[3], [4]]]
    log.truncate(1)
    log.append(1, states([[5], [6]]))
    assert [numbers(chunk.hidden) for chunk in log.read(0, 2)] == [[[1], [2]], [[5], [6]]]
