"""Agents believe, and hand their memory to, the node's own daemon alone: by the kernel's word."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptless.daemon.agent.daemon_link import DaemonLink
from ckptless.daemon.ckptctl.shared.ask import ask
from ckptless.daemon.ckptlessd.unix_server import listen
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.fdsocket import FdSocket
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.peercred import daemon_credentials, unix_address

STRANGER = 65534
DEADLINE_S = 20.0
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")


@pytest.fixture
def site() -> Iterator[Path]:
    """As /run: root's, and open to all."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def listens(name: str, uid: int) -> Iterator[int]:
    """A process of that user on that socket; what it heard is in its exit code: 0 is nothing at all."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            os.setgroups([])
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(unix_address(name))
                if not name.startswith("@"):
                    Path(name).chmod(0o666)
                server.listen()
                server.settimeout(DEADLINE_S)
                os.write(told, b".")
                near, _ = server.accept()
                near.settimeout(DEADLINE_S)
                status = 1 if near.recv(1) else 0
        finally:
            os._exit(status)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    os.close(told)
    yield child
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it was told something"


def folder_of(site: Path, uid: int, mode: int = 0o755) -> Path:
    folder = site / "ckptless"
    folder.mkdir()
    os.chown(folder, uid, uid)
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize("abstract", [True, False])
def test_a_squatter_is_told_nothing(site: Path, abstract: bool) -> None:
    # Of a job's socket in a folder like /tmp, or in the abstract namespace, anybody may be the first.
    site.chmod(0o1777)
    name = f"@{secrets.token_hex(8)}" if abstract else str(folder_of(site, STRANGER) / "d.sock")
    greeted: list[int] = []

    def greet() -> list[m.FromAgent]:
        greeted.append(1)
        return [m.Cancel(exit_code=1, reason="")]

    async def work() -> str:
        link = DaemonLink(name, greet, lambda _message: None)
        task = asyncio.create_task(link.run())
        async with asyncio.timeout(DEADLINE_S):
            while not link.stranger:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.02)
        assert not link.connected
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return link.stranger

    with listens(name, STRANGER):
        said = asyncio.run(work())
    assert f"uid {STRANGER} listens on {name}" in said
    assert greeted == []


def test_nor_does_it_get_memory_or_a_question(site: Path) -> None:
    site.chmod(0o1777)
    folder = folder_of(site, STRANGER)

    async def work(name: str) -> None:
        with pytest.raises(PeerError, match="it is not believed"):
            await FdSocket.connect(name, KeptList)

    with listens(name := str(folder / "a.sock"), STRANGER):
        asyncio.run(work(name))
    with (
        listens(name := str(folder / "b.sock"), STRANGER),
        pytest.raises(PeerError, match="it is not believed"),
    ):
        ask(name, WhatIsKept(protocol=m.PROTOCOL), KeptList)


@pytest.mark.parametrize(
    ("uid", "owner", "above", "good"),
    [
        (0, 0, 0o755, True),
        (STRANGER, STRANGER, 0o755, True),  # SlurmUser's: root has given it the folder
        (STRANGER, STRANGER, 0o1777, False),  # it may have made that folder itself
        (STRANGER, 0, 0o755, False),
    ],
)
def test_whom_an_agent_believes(site: Path, uid: int, owner: int, above: int, good: bool) -> None:
    site.chmod(above)
    folder = folder_of(site, owner, 0o755)
    name = str(folder / "d.sock")
    if owner != uid:
        folder.chmod(0o777)
    with listens(name, uid), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(name)
        if good:
            assert daemon_credentials(sock, name)[1] == uid
        else:
            with pytest.raises(PeerError, match="it is not believed"):
                daemon_credentials(sock, name)


@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_a_link_in_place_of_the_new_socket_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """In a folder that others may write to, which is the site's mistake, one may come at any moment."""
    secret, swap = tmp_path / "secret", [True]
    secret.touch(mode=0o640)

    class Swapped(socket.socket):
        def bind(self, address: object) -> None:
            super().bind(address)  # type: ignore[arg-type]
            if swap:
                Path(str(address)).unlink()
                Path(str(address)).symlink_to(secret)

    monkeypatch.setattr("ckptless.daemon.ckptlessd.unix_server.socket.socket", Swapped)
    before = os.umask(0o022)
    try:
        listen(tmp_path / "d.sock", mode).close()
        assert secret.stat().st_mode & 0o777 == 0o640
        swap.clear()
        (tmp_path / "d.sock").unlink()
        listen(tmp_path / "d.sock", mode).close()
        assert (tmp_path / "d.sock").stat().st_mode & 0o777 == mode
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
