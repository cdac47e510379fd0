"""A bound on bytes that several holders share."""

from __future__ import annotations

from petals_async.errors import LengthExceededError


class ByteBudget:
    """Counts bytes up to a limit.

    Args:
        limit_bytes: The bound.
        name: What is bounded, and the option's name, for the error.
    """

    def __init__(self, limit_bytes: int, name: str) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._name = name

    def take(self, num_bytes: int) -> None:
        """Take bytes.

        Raises:
            LengthExceededError: The bound would be passed; nothing is taken.
        """
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise LengthExceededError(
                f"{self._name} may hold {self.limit_bytes} bytes and holds {self.used_bytes}; "
                f"{num_bytes} more don't fit"
            )
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= num_bytes
