"""Addresses as people type them."""

import pytest

from petals_async.errors import ConfigurationError
from petals_async.registry.address import RegistryKind, connect_registry, parse_host_port, parse_registry
from petals_async.registry.static import MAX_ADDRESSES, StaticRegistry
from petals_async.rpc.registry_client import GrpcRegistry


@pytest.mark.parametrize("text", ["127.0.0.1:7600", "some-host.example:1", "[::1]:65535"])
def test_one_registry(text):
    address = parse_registry(text)
    assert (address.kind, address.addresses, str(address)) == (RegistryKind.GRPC, (text,), text)


def test_static_addresses():
    address = parse_registry("static:a:1, b:2,a:1")
    assert (address.kind, address.addresses) == (RegistryKind.STATIC, ("a:1", "b:2"))
    assert str(address) == "static:a:1,b:2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an address is HOST:PORT"),
        ("localhost", "an address is HOST:PORT"),
        (":7600", "an address is HOST:PORT"),
        ("http://localhost:7600", "an address is HOST:PORT"),
        ("a:1,b:2", "an address is HOST:PORT"),
        ("two words:1", "an address is HOST:PORT"),
        ("::1:7600", "needs brackets"),
        ("localhost:", "a port is a number from 1 to 65535, got ''"),
        ("localhost:http", "got 'http' in 'localhost:http'"),
        ("localhost:0", "from 1 to 65535, got '0'"),
        ("localhost:65536", "got '65536'"),
        ("localhost:-1", "got '-1'"),
        ("localhost:" + "9" * 10_000, "a port is"),
        ("localhost:\u0663", "a port is"),
        ("static:", "an address is HOST:PORT"),
        ("static:a:1,,b:2", "an address is HOST:PORT"),
        ("etcd://localhost:2379", "etcd is not implemented yet"),
    ],
)
def test_addresses_that_cannot_be(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_registry(text)


def test_too_many_static_addresses():
    text = "static:" + ",".join(f"a:{port}" for port in range(1, MAX_ADDRESSES + 2))
    with pytest.raises(ConfigurationError, match="at most 1024"):
        parse_registry(text)


def test_port_0_is_for_listening():
    assert parse_host_port("127.0.0.1:0", allow_zero=True) == ("127.0.0.1", 0)


def test_the_kind_of_address_decides_what_is_connected():
    assert isinstance(connect_registry("localhost:7600"), GrpcRegistry)
    assert isinstance(connect_registry("static:a:1"), StaticRegistry)
