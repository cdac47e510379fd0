"""Where the registry is, as a person types it: HOST:PORT, or static:HOST:PORT,HOST:PORT."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum

from petals_async.abc import Connector, Registry
from petals_async.errors import ConfigurationError
from petals_async.registry.static import MAX_ADDRESSES, StaticRegistry
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.rpc.registry_client import GrpcRegistry

MAX_PORT = 65_535
"""The largest port number there is."""

_STATIC = "static:"
_ETCD = "etcd://"


class RegistryKind(Enum):
    """What answers at a registry's address."""

    GRPC = "grpc"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """A registry's kind, and its HOST:PORT; for a static one those of the block servers."""

    kind: RegistryKind
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        prefix = _STATIC if self.kind is RegistryKind.STATIC else ""
        return prefix + ",".join(self.addresses)


def parse_registry(text: str) -> RegistryAddress:
    """Read a registry's address.

    Raises:
        ConfigurationError: It is none of the forms known, a host or port is wrong, or there are too many.
    """
    if text.startswith(_ETCD):
        raise ConfigurationError(f"etcd is not implemented yet, got {text!r}; use HOST:PORT")
    if text.startswith(_STATIC):
        addresses = [_checked(part) for part in text.removeprefix(_STATIC).split(",")]
        return RegistryAddress(RegistryKind.STATIC, _bounded(addresses))
    return RegistryAddress(RegistryKind.GRPC, (_checked(text),))


def parse_host_port(text: str, *, allow_zero: bool = False) -> tuple[str, int]:
    """Read HOST:PORT, where HOST is a name, an IPv4 address or an IPv6 address in brackets.

    Args:
        text: What to read.
        allow_zero: Whether port 0 (any free one) will do, as it does for listening.

    Raises:
        ConfigurationError: It isn't of that form, or the port is out of range.
    """
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host) or "/" in host or "," in host or any(map(str.isspace, host)):
        raise ConfigurationError(f"an address is HOST:PORT, such as 127.0.0.1:7600, got {text!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigurationError(f"an IPv6 address needs brackets, such as [::1]:7600, got {text!r}")
    return host, _port(port, text, 0 if allow_zero else 1)


def connect_registry(text: str, *, connector: Connector | None = None) -> AbstractAsyncContextManager[Registry]:
    """Return the registry at an address, to be used inside `async with`; nothing is opened before.

    Args:
        text: HOST:PORT, or static:HOST:PORT,HOST:PORT.
        connector: How a static registry reaches the block servers; None for gRPC.

    Raises:
        ConfigurationError: The address is wrong.
    """
    address = parse_registry(text)
    if address.kind is RegistryKind.GRPC:
        return GrpcRegistry(address.addresses[0])
    return StaticRegistry(address.addresses, connector or GrpcConnector())


def _checked(text: str) -> str:
    host, port = parse_host_port(text)
    return f"{host}:{port}"


def _port(text: str, whole: str, lowest: int) -> int:
    if not (text.isascii() and text.isdecimal() and lowest <= int(text[:6]) <= MAX_PORT):
        raise ConfigurationError(f"a port is a number from {lowest} to {MAX_PORT}, got {text!r} in {whole!r}")
    return int(text)


def _bounded(addresses: list[str]) -> tuple[str, ...]:
    if len(addresses) > MAX_ADDRESSES:
        raise ConfigurationError(f"{len(addresses)} addresses, at most {MAX_ADDRESSES} can be asked")
    return tuple(dict.fromkeys(addresses))
