"""Hosts without Slurm: network namespaces on a bridge, each with an sshd; a machine's processes in each.

They share all but the network: files, and process ids. That takes root, iproute2 and openssh-server: without,
tests are skipped, or fail where CKPTLESS_REQUIRE_SSHD=1 is set.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SSHD = "/usr/sbin/sshd"
COMMAND_DEADLINE_S = 20.0
POLL_S = 0.05


def run(*words: object) -> str:
    """Return what a command says. Raises CalledProcessError where it is not permitted here."""
    command = [str(word) for word in words]
    return subprocess.check_output(command, stderr=subprocess.PIPE, text=True, timeout=COMMAND_DEADLINE_S)


class Hosts:
    """`count` hosts, "h0" and so on, and this machine on the bridge beside them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.tag = folder, f"{os.getpid() % 10**5}{secrets.token_hex(2)}"
        self.bridge, self.net = f"ck{self.tag}", f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.names = [f"h{number}" for number in range(count)]
        self._servers: list[subprocess.Popen[bytes]] = []

    def space(self, number: int) -> str:
        return f"ckptless-{self.tag}-{number}"

    def address(self, number: int) -> str:
        return f"{self.net}.{number + 1}"

    def make(self) -> None:
        """Raises OSError, CalledProcessError where this machine does not have or permit it."""
        self.folder.mkdir(parents=True)
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.net}.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for number in range(len(self.names)):
            space, ours = self.space(number), f"{self.bridge}-{number}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", ours, "type", "veth", "peer", "name", "net0", "netns", space)
            run("ip", "link", "set", ours, "master", self.bridge, "up")
            run("ip", "-netns", space, "address", "add", f"{self.address(number)}/24", "dev", "net0")
            for device in ("lo", "net0"):
                run("ip", "-netns", space, "link", "set", device, "up")

    def serve(self) -> None:
        """Start an sshd on each, and put an ssh that finds them into `folder`."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        config = self.folder / "sshd_config"
        config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\nStrictModes no\n"
            "UsePAM no\nPermitRootLogin yes\nPidFile none\nUseDNS no\n"
        )
        known = "".join(
            f"Host {name}\n HostName {self.address(number)}\n" for number, name in enumerate(self.names)
        )
        (self.folder / "ssh_config").write_text(
            f"{known}Host *\n User root\n IdentityFile {self.folder}/user\n StrictHostKeyChecking no\n"
            " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        )
        bin_dir = self.folder / "bin"
        bin_dir.mkdir()
        (bin_dir / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n'
        )
        (bin_dir / "ssh").chmod(0o755)
        for number in range(len(self.names)):
            words = ["ip", "netns", "exec", self.space(number), SSHD, "-D", "-e", "-f", str(config)]
            with (self.folder / f"sshd-{number}.log").open("wb") as log:
                self._servers.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log))
        for number in range(len(self.names)):
            self._answers(number)

    def _answers(self, number: int) -> None:
        limit = time.monotonic() + COMMAND_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address(number), 22), 1.0):
                return
            assert time.monotonic() < limit, (self.folder / f"sshd-{number}.log").read_text()
            time.sleep(POLL_S)

    @property
    def path(self) -> str:
        """PATH with that ssh."""
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def hostfile(self) -> Path:
        """A file that names all."""
        path = self.folder / "hostfile"
        lines = [f"{name} address={self.address(number)}" for number, name in enumerate(self.names)]
        path.write_text("\n".join(["# for a test", *lines, ""]))
        return path

    def processes(self, number: int) -> list[int]:
        """Every process of a host but for its sshd and what that has for a connection."""
        found = [int(pid) for pid in run("ip", "netns", "pids", self.space(number)).split()]
        return [pid for pid in found if not _command(pid).startswith((b"sshd", SSHD.encode()))]

    def kill(self, number: int) -> None:
        """End all of a host's processes at once."""
        for pid in self.processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def darken(self, number: int) -> None:
        """Nothing reaches a host any more, and nobody is told."""
        run("ip", "link", "set", f"{self.bridge}-{number}", "down")

    def close(self) -> None:
        for number in range(len(self.names)):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in run("ip", "netns", "pids", self.space(number)).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        for server in self._servers:
            server.wait(COMMAND_DEADLINE_S)
        made = [("link", f"{self.bridge}-{number}") for number in range(len(self.names))]
        made += [("netns", self.space(number)) for number in range(len(self.names))]
        # Links by themselves: a namespace stays as long as connections in it do.
        for kind, name in (*made, ("link", self.bridge)):
            delete = ["ip", kind, "delete", name]
            subprocess.run(delete, check=False, capture_output=True, timeout=COMMAND_DEADLINE_S)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def hosts(folder: Path, count: int, *, sshd: bool = True) -> Iterator[Hosts]:
    """Hosts on this machine; skips where there can be none."""
    missing = "" if not sshd or Path(SSHD).exists() else "there is no sshd: install openssh-server"
    found = Hosts(folder / "hosts", count)
    try:
        try:
            if not missing:
                found.make()
        except (OSError, subprocess.CalledProcessError) as error:
            missing = f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
        if missing and os.environ.get("CKPTLESS_REQUIRE_SSHD") == "1":
            pytest.fail(missing)
        if missing:
            pytest.skip(missing)
        if sshd:
            found.serve()
        yield found
    finally:
        found.close()
