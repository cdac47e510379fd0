"""Keeps a server's record in the registry: announces, renews, announces again, withdraws.

The registry may die and come back: a renewal that it doesn't know is answered with a new announcement, and its
absence is waited out. Load figures are announced at most every `LOAD_INTERVAL_S`, since each announcement goes to
every watcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio

from petals_async.abc import Registry
from petals_async.core.server_info import ServerInfo
from petals_async.errors import RegistryUnavailableError, RequestError

log = logging.getLogger(__name__)

DEFAULT_TTL_S = 10.0
"""A server that doesn't renew its lease is forgotten after this time."""

RENEWALS_PER_TTL = 3
"""A lease is renewed this often within its time to live."""

LOAD_INTERVAL_S = 3.0
"""Load figures are announced at most this often."""

RETRY_S = 0.5
"""Pause before the registry is tried again."""

WITHDRAW_TIMEOUT_S = 1.0
"""How long a withdrawal may take; the lease ends by itself otherwise."""


class Announcer:
    """Keeps one server's record in the registry.

    Args:
        registry: Where to.
        describe: Returns the record as it is now.
        ttl_s: The lease's time to live.
    """

    def __init__(self, registry: Registry, describe: Callable[[], ServerInfo], ttl_s: float = DEFAULT_TTL_S) -> None:
        self._registry = registry
        self._describe = describe
        self._ttl_s = ttl_s
        self._changed = anyio.Event()
        self._announced: ServerInfo | None = None
        self._announced_at = 0.0
        self._settled = anyio.Event()
        self._reachable = True
        self._withdrawn = False

    async def run(self) -> None:
        """Announce and renew, until the record is withdrawn."""
        while not self._withdrawn:
            try:
                await self._refresh()
            except RegistryUnavailableError as error:
                self._note_away(error)
                await anyio.sleep(RETRY_S)
                continue
            self._reachable = True
            with anyio.move_on_after(self._ttl_s / RENEWALS_PER_TTL):
                await self._changed.wait()

    async def _refresh(self) -> None:
        """Announce what changed, or renew."""
        self._changed = anyio.Event()
        record = self._describe()
        if self._needs_announcing(record) or not await self._registry.renew(record.server_id):
            await self._registry.announce(record, ttl_s=self._ttl_s)
            self._announced, self._announced_at = record, anyio.current_time()
        self._settled.set()

    def _needs_announcing(self, record: ServerInfo) -> bool:
        if self._announced is None or _without_load(record) != _without_load(self._announced):
            return True
        waited = anyio.current_time() - self._announced_at >= LOAD_INTERVAL_S
        return waited and record.kv_free_tokens != self._announced.kv_free_tokens

    def _note_away(self, error: RegistryUnavailableError) -> None:
        if self._reachable:
            log.warning("the registry is away, trying again every %g s: %s", RETRY_S, error)
        self._reachable = False

    async def announce_now(self, timeout_s: float) -> bool:
        """Make the record current at once; False if the registry didn't take it in time."""
        self._settled = anyio.Event()
        self._changed.set()
        with anyio.move_on_after(timeout_s):
            await self._settled.wait()
            return True
        return False

    async def withdraw(self) -> None:
        """Remove the record, within `WITHDRAW_TIMEOUT_S`."""
        self._withdrawn = True
        self._changed.set()
        if self._announced is None:
            return
        with anyio.move_on_after(WITHDRAW_TIMEOUT_S, shield=True):
            try:
                await self._registry.withdraw(self._announced.server_id)
            except (RegistryUnavailableError, RequestError) as error:
                log.debug("not withdrawn: %s", error)


def _without_load(record: ServerInfo) -> ServerInfo:
    return replace(record, kv_free_tokens=0)
