"""Finds the address of a node that an address, a network or an interface means, as in `daemon.bind`."""

import contextlib
import ctypes
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from ckptless.daemon.protocol.errors import UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Interface(NamedTuple):
    """One address of one interface."""

    name: str
    address: Address


def choose(bind: str, found: Sequence[Interface], name: str = "daemon.bind") -> str:
    """The address of this node that `bind` means; IPv4 before IPv6, as the kernel lists them.

    Raises UsageError where the node has none; `name` is what it calls the setting.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bind))  # as told: binding it says whether it is here
    return str(choose_interface(bind, found, name).address)


def choose_interface(bind: str, found: Sequence[Interface], name: str) -> Interface:
    """The same with its name, of a network of many addresses or an interface. Raises UsageError."""
    try:
        network = ipaddress.ip_network(bind)
    except ValueError:
        fitting = [one for one in found if one.name == bind and not one.address.is_link_local]
    else:
        fitting = [one for one in found if one.address in network]
    fitting.sort(key=lambda one: one.address.version)
    if not fitting:
        here = ", ".join(f"{one.name} {one.address}" for one in found) or "none"
        raise UsageError(f"{name} is {bind}, and this node has no such address; it has {here}")
    return fitting[0]


def by_name(node_name: str) -> str:
    """The address that the node's name stands for; blocks for a look-up.

    Raises UsageError where there is none, or where it is a loopback address, at which no other node could
    reach this one (Debian writes 127.0.1.1 into /etc/hosts).
    """
    hint = "set daemon.bind to the network or interface that the nodes share"
    try:
        found = socket.getaddrinfo(node_name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"the node's name {node_name} has no address ({error.strerror}): {hint}") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise UsageError(f"the node's name {node_name} is {address} here, a loopback address: {hint}")
    return address


def listen_address(bind: str | None, node_name: str) -> str:
    """The numeric address to listen on. Raises UsageError, see `choose` and `by_name`."""
    return by_name(node_name) if bind is None else choose(bind, interfaces())


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
    ("peer", ctypes.POINTER(_SockAddr)),
    ("data", ctypes.c_void_p),
)

# Where the address begins behind the family: after the port, and in IPv6 the flow label.
_LAYOUTS = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}


def interfaces() -> tuple[Interface, ...]:
    """Every address of this node's interfaces, in the kernel's order (getifaddrs(3)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found: list[Interface] = []
    try:
        entry = first
        while entry:
            at = entry.contents
            layout = _LAYOUTS.get(at.address.contents.family) if at.address else None
            if layout is not None:
                begin, nbytes = layout
                data = bytes(at.address.contents.data[begin : begin + nbytes])
                found.append(Interface(os.fsdecode(at.name), ipaddress.ip_address(data)))
            entry = at.next
    finally:
        libc.freeifaddrs(first)
    return tuple(found)
