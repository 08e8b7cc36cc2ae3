"""daemon.bind: which address of a node is meant."""

import ipaddress
import socket

import pytest

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.bind import (
    Interface,
    by_name,
    choose,
    interfaces,
    listen_address,
)
from ckptless.daemon.settings.option_kinds import is_shared_bind

HERE = tuple(
    Interface(name, ipaddress.ip_address(address))
    for name, address in [
        ("lo", "127.0.0.1"),
        ("eth0", "192.0.2.7"),
        ("ib0", "fe80::1"),
        ("ib0", "fd00::7"),
        ("ib0", "10.1.2.7"),
        ("ib0", "10.2.2.7"),
        ("v6", "fd01::7"),
    ]
)


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("eth0", "192.0.2.7"),
        ("ib0", "10.1.2.7"),
        ("v6", "fd01::7"),
        ("10.2.0.0/16", "10.2.2.7"),
        ("10.0.0.0/8", "10.1.2.7"),
        ("fd00::/8", "fd00::7"),
        ("198.51.100.1", "198.51.100.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
    ],
)
def test_choose(bind: str, expected: str) -> None:
    assert choose(bind, HERE) == expected


@pytest.mark.parametrize("bind", ["eth1", "172.16.0.0/12", "fe80::/10x"])
def test_a_node_without_such_an_address(bind: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(bind, HERE)
    assert str(caught.value).startswith(
        f"daemon.bind is {bind}, and this node has no such address; it has lo "
    )
    assert "eth0 192.0.2.7" in str(caught.value)


def test_what_many_nodes_can_have_one_of() -> None:
    assert all(is_shared_bind(text) for text in ("ib0", "10.1.0.0/16", "fd00::/8", "eth0.7"))
    assert not any(is_shared_bind(text) for text in ("10.1.0.7", "10.1.0.7/32", "::1", "10.1", "", "a" * 16))


def test_an_interface_with_nothing_but_a_link_local_address() -> None:
    with pytest.raises(UsageError):
        choose("ib0", (Interface("ib0", ipaddress.ip_address("fe80::1")),))


def test_the_interfaces_of_this_machine() -> None:
    found = interfaces()
    assert Interface("lo", ipaddress.ip_address("127.0.0.1")) in found
    assert {one.name for one in found} <= {name for _, name in socket.if_nameindex()}
    for one in found:
        if one.address.version == 4:
            # Whatever it says is here can be bound.
            with socket.socket() as probe:
                probe.bind((str(one.address), 0))
    assert listen_address("lo", "unused") == "127.0.0.1"


def test_a_name_that_is_a_loopback_address() -> None:
    with pytest.raises(UsageError, match=r"localhost is (127\.|::1).*set daemon\.bind"):
        by_name("localhost")


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UsageError, match=r"node\.invalid has no address.*set daemon\.bind"):
        listen_address(None, "node.invalid")


def test_a_name_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert listen_address(None, "node01") == "192.0.2.7"
