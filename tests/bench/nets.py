"""Network namespaces, with interfaces between them whose rate the kernel limits (root, iproute2)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator

COMMAND_DEADLINE_S = 20.0


def run(*words: str) -> str:
    """Return what a command says. Raises CalledProcessError where it is not permitted here."""
    return subprocess.check_output(words, stderr=subprocess.PIPE, text=True, timeout=COMMAND_DEADLINE_S)


def limit(name: str, interface: str, rate_mbit: int) -> None:
    """Let an interface send at this rate; what it may send at once is a millisecond's, at least 512 kB."""
    burst = max(512, rate_mbit // 8)
    words = ("root", "tbf", "rate", f"{rate_mbit}mbit", "burst", f"{burst}kb", "latency", "50ms")
    run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, *words)


class Nets:
    """Two namespaces, `count` pairs of interfaces between them of so many Mbit/s each way."""

    def __init__(self, count: int, rate_mbit: int) -> None:
        self.names = [f"ckptless-{os.getpid()}-{node}" for node in range(2)]
        self.addresses = [tuple(f"10.77.{pair}.{node + 1}" for pair in range(count)) for node in range(2)]
        self._count, self._rate = count, rate_mbit

    def make(self) -> None:
        """Raises CalledProcessError, FileNotFoundError where this machine does not have or permit it."""
        for name in self.names:
            run("ip", "netns", "add", name)
        for pair in range(self._count):
            ends = [("name", f"net{pair}", "netns", name) for name in self.names]
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node, name in enumerate(self.names):
                self.open(name, f"net{pair}", self.addresses[node][pair])
                limit(name, f"net{pair}", self._rate)

    def open(self, name: str, interface: str, address: str) -> None:
        run("ip", "-netns", name, "address", "add", f"{address}/24", "dev", interface)
        run("ip", "-netns", name, "link", "set", interface, "up")

    def pull(self, pair: int) -> None:
        """Take node 1's end down: node 0 has no carrier, and nobody is told that a connection has ended."""
        run("ip", "-netns", self.names[1], "link", "set", f"net{pair}", "down")

    def sent_nbytes(self, pair: int) -> int:
        """Bytes that node 0 has sent over an interface."""
        shown = run("ip", "-netns", self.names[0], "-json", "-stats", "link", "show", "dev", f"net{pair}")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


class Star(Nets):
    """Nodes at one switch: each sends, and is sent to, at its own rate."""

    def __init__(self, rates_mbit: list[int]) -> None:
        super().__init__(1, 0)
        self._rates = rates_mbit
        count = len(rates_mbit)
        # The last one is the switch.
        self.names = [f"ckptless-{os.getpid()}-{node}" for node in range(count + 1)]
        self.addresses = [(f"10.78.0.{node + 1}",) for node in range(count)]

    def make(self) -> None:
        switch = self.names[-1]
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "-netns", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-netns", switch, "link", "set", "switch", "up")
        for node, rate in enumerate(self._rates):
            name = self.names[node]
            ends = ("name", "net0", "netns", name), ("name", f"port{node}", "netns", switch)
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            run("ip", "-netns", switch, "link", "set", f"port{node}", "master", "switch", "up")
            self.open(name, "net0", self.addresses[node][0])
            limit(name, "net0", rate)
            limit(switch, f"port{node}", rate)


@contextlib.contextmanager
def made(nets: Nets) -> Iterator[Nets]:
    """These, for as long as they are needed."""
    try:
        nets.make()
        yield nets
    finally:
        nets.close()
