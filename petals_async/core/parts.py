"""Large tensors in parts: cut at the sender, put together at the receiver.

Parts of one tensor are contiguous and increasing. The receiver knows the total from the header, and its
memory grows only as bytes arrive.
"""

from __future__ import annotations

from collections.abc import Iterator

from petals_async.core.messages import MAX_INLINE_BYTES, PART_BYTES, Part
from petals_async.errors import RequestError

MAX_PART_BYTES = 1024 * 1024
"""A peer's part may be up to this large; ours are `PART_BYTES`."""


def travels_inline(num_bytes: int) -> bool:
    """Whether a tensor of this size goes inside its header message."""
    return num_bytes <= MAX_INLINE_BYTES


def cut(data: bytes) -> Iterator[Part]:
    """Cut a tensor's bytes into parts."""
    for start in range(0, len(data), PART_BYTES):
        yield Part(start, data[start : start + PART_BYTES])


class PartAssembler:
    """Puts one tensor's parts together.

    Args:
        total_bytes: The tensor's size, from its checked header.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.received_bytes = 0
        self._pieces: list[bytes] = []

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self.received_bytes == self.total_bytes

    def check(self, part: Part) -> None:
        """Check whether this is the next part.

        Raises:
            RequestError: It is empty, too large, out of order, or beyond the tensor's end (BAD_PART).
        """
        if part.byte_offset != self.received_bytes:
            raise RequestError(
                f"a part at byte {part.byte_offset} came, expected byte {self.received_bytes}",
                reason="BAD_PART",
            )
        size = len(part.data)
        if not 0 < size <= MAX_PART_BYTES or self.received_bytes + size > self.total_bytes:
            raise RequestError(
                f"a part of {size} bytes at byte {part.byte_offset} of {self.total_bytes}; "
                f"parts are 1 to {MAX_PART_BYTES} bytes",
                reason="BAD_PART",
            )

    def add(self, part: Part) -> None:
        """Check and take the next part."""
        self.check(part)
        self._pieces.append(part.data)
        self.received_bytes += len(part.data)

    def join(self) -> bytes:
        """Return the whole tensor's bytes, once complete."""
        return b"".join(self._pieces)
