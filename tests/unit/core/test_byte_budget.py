import pytest

from petals_async.core.byte_budget import ByteBudget
from petals_async.errors import LengthExceededError


def test_it_holds_its_limit_and_no_more():
    budget = ByteBudget(10, "the log (log_bytes)")
    budget.take(4)
    budget.take(6)
    budget.take(0)
    with pytest.raises(LengthExceededError, match=r"the log \(log_bytes\) may hold 10 bytes and holds 10; 1 more"):
        budget.take(1)
    assert budget.used_bytes == 10
    budget.give_back(3)
    with pytest.raises(LengthExceededError):
        budget.take(4)
    budget.take(3)
    assert budget.used_bytes == 10
