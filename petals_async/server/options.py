"""What one may set on a block server, checked before anything is started."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field

from petals_async.core.server_info import Limits
from petals_async.core.sizes import parse_bytes
from petals_async.core.span import Span
from petals_async.errors import ConfigurationError
from petals_async.registry.address import parse_host_port, parse_registry
from petals_async.server.announcer import DEFAULT_TTL_S
from petals_async.server.host import DEFAULT_PROGRESS_INTERVAL_S
from petals_async.server.session_table import DEFAULT_LEASE_S

DTYPES = ("float32", "bfloat16", "float16")
"""What a server can compute in."""

DEFAULT_KV_BUDGET = "512MiB"
"""Memory for the KV caches of all sessions."""

DEFAULT_DRAIN_S = 5.0
"""How long a server that was asked to stop waits for its clients to leave."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The settings of a block server.

    Attributes:
        model: A directory, a Hub id, a .gguf file, or "demo".
        blocks: The blocks to hold; None for all.
        registry: HOST:PORT, or None to announce nowhere.
        listen: HOST:PORT; port 0 for any free one.
        name: A stable name for people; the host's name and the blocks when None.
        dtype: float32, bfloat16 or float16.
        device: As torch names it.
        kv_budget: Bytes, or text such as 512MiB.
        threads: Threads that compute; None leaves it to torch.
        limits: Bounds on steps and sessions.
        drain_s: How long a stop waits for clients to leave, in seconds.
        lease_s: How long a session without a stream is kept, in seconds.
        progress_interval_s: Seconds between the signs of life of a step.
        ttl_s: Time to live of the registry's record, in seconds.
        public_address: HOST:PORT that clients reach it under, if it isn't the one listened on.
    """

    model: str
    blocks: Span | None = None
    registry: str | None = None
    listen: str = "127.0.0.1:0"
    name: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    kv_budget: str | int = DEFAULT_KV_BUDGET
    threads: int | None = None
    limits: Limits = field(default_factory=Limits)
    drain_s: float = DEFAULT_DRAIN_S
    lease_s: float = DEFAULT_LEASE_S
    progress_interval_s: float = DEFAULT_PROGRESS_INTERVAL_S
    ttl_s: float = DEFAULT_TTL_S
    public_address: str | None = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without a model.

        Raises:
            ConfigurationError: An option that can't work; the message names it.
        """
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ConfigurationError(f"threads must be at least 1, got {self.threads}")
        if self.device.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise ConfigurationError(f"device must be cpu, cuda, cuda:N or mps, got {self.device!r}")
        if self.registry is not None:
            parse_registry(self.registry)
        parse_host_port(self.listen, allow_zero=True)
        if self.public_address is not None:
            parse_host_port(self.public_address)
        parse_bytes(self.kv_budget)

    @property
    def kv_budget_bytes(self) -> int:
        """The KV budget in bytes."""
        return parse_bytes(self.kv_budget)

    def stable_name(self, span: Span) -> str:
        """Return the server's name for people."""
        return self.name or f"{platform.node() or 'server'}-{os.getpid()}-{span.start}-{span.end}"
