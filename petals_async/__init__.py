"""Run one large language model over several machines, and keep generating when any of them dies.

The public names; each is imported at first use, so that `import petals_async` needs no torch and no gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from petals_async.version import __version__

if TYPE_CHECKING:
    from petals_async.client.client import Client
    from petals_async.client.result import GenerationResult, Piece, Recovery
    from petals_async.client.session import Session
    from petals_async.core.hidden import HiddenStates
    from petals_async.core.server_info import Limits, ServerInfo
    from petals_async.core.span import Span
    from petals_async.registry.embedded import Registry
    from petals_async.server.block_server import BlockServer

_HOMES = {
    "BlockServer": "petals_async.server.block_server",
    "Client": "petals_async.client.client",
    "GenerationResult": "petals_async.client.result",
    "HiddenStates": "petals_async.core.hidden",
    "Limits": "petals_async.core.server_info",
    "Piece": "petals_async.client.result",
    "Recovery": "petals_async.client.result",
    "Registry": "petals_async.registry.embedded",
    "ServerInfo": "petals_async.core.server_info",
    "Session": "petals_async.client.session",
    "Span": "petals_async.core.span",
}

__all__ = [
    "BlockServer",
    "Client",
    "GenerationResult",
    "HiddenStates",
    "Limits",
    "Piece",
    "Recovery",
    "Registry",
    "ServerInfo",
    "Session",
    "Span",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
