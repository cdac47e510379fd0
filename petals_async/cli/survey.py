"""Asking a swarm how it is: the registry who is there, and each server how it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.errors import AuthError, PeerError, RequestError
from petals_async.registry.address import RegistryKind, connect_registry, parse_registry
from petals_async.rpc.block_channel import GrpcConnector

ASK_TIMEOUT_S = 1.5
"""How long one server may take to answer, in seconds."""

MAX_CONCURRENT_ASKS = 16
"""Servers that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One server.

    Attributes:
        address: HOST:PORT.
        info: What it says of itself; what the registry knows, if it doesn't answer; None if that knows nothing.
        sessions: What it holds; empty if it doesn't answer.
        problem: Why it didn't answer; empty if it did.
    """

    address: str
    info: ServerInfo | None
    sessions: tuple[SessionInfo, ...] = ()
    problem: str = ""


async def survey(registry: str) -> list[Answer]:
    """Return all servers of a swarm, by block.

    Args:
        registry: HOST:PORT, or static:HOST:PORT,HOST:PORT.

    Raises:
        RegistryUnavailableError: No registry answers, or none of the static servers; names the addresses tried.
    """
    async with connect_registry(registry) as connection:
        known: list[Answer] = [Answer(server.address, server) for server in await connection.list_servers()]
    address = parse_registry(registry)
    if address.kind is RegistryKind.STATIC:
        listed = {answer.address for answer in known}
        known += [Answer(missing, None) for missing in address.addresses if missing not in listed]
    return await _ask_all(known)


async def _ask_all(known: Sequence[Answer]) -> list[Answer]:
    answers = list(known)
    limiter = anyio.CapacityLimiter(MAX_CONCURRENT_ASKS)

    async def ask(index: int) -> None:
        async with limiter:
            answers[index] = await _ask(answers[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(answers)):
            tasks.start_soon(ask, index)
    return answers


async def _ask(known: Answer) -> Answer:
    try:
        with anyio.fail_after(ASK_TIMEOUT_S):
            async with GrpcConnector().connect(known.address) as channel:
                info = await channel.get_server_info()
                sessions = await channel.list_sessions()
    except TimeoutError:
        return replace(known, problem=f"no answer within {ASK_TIMEOUT_S:g} s")
    except (PeerError, RequestError, AuthError) as error:
        return replace(known, problem=f"{error.reason}: {error.message}")
    if known.info is not None and info.server_id != known.info.server_id:
        return replace(known, problem=f"another server answers there now: {info.server_id}")
    return replace(known, info=info, sessions=tuple(sessions))
