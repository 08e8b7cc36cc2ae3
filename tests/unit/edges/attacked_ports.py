"""Every port that a daemon and an agent have on the network, in one process, until stdin is closed.

`attacked_ports.py FOLDER` writes their numbers to FOLDER/ports.json. The store takes whatever the process
that has started it starts, if it is of the same user: its "ranks".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from ckptless.daemon.agent.kvstore.guard import StoreGuard
from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.agent.nccl.server import NcclServer
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.transport.credentials import KeyCredentials

from .test_service import Site, hello

HOST, KEY, JOB = "127.0.0.1", b"k" * 32, "4711"
# What a connection to the daemon is for; here to the agent, too.
LINK = f"{JOB}/{NO_RUN}"


async def main(folder: Path) -> None:
    os.set_blocking(0, False)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    events: list[tuple[str, str]] = []

    def note(kind: str, text: str) -> None:
        events.append((kind, text))

    site = Site(folder)
    replicas = Replicas(1, Origin(LINK), 1, VersionStore())
    store, nccl = StoreServer(StoreGuard(note, root=os.getppid()).refuses), NcclServer()
    replicas.credentials, replicas.on_event, nccl.on_event = KeyCredentials(KEY), note, note
    async with site.running():
        agent = await site.client(hello(JOB))
        await agent.hears(m.Admitted)
        assert site.service._listener._sock is not None
        ports = {"daemon": site.service._listener._sock.getsockname()[1], "agent": await replicas.start(HOST)}
        ports |= {"store": await store.start(HOST), "nccl": await nccl.start(HOST)}
        nccl.learn_key(KEY)
        nccl.follow(1)
        new = folder / "ports.new"
        new.write_text(json.dumps(ports))
        new.rename(folder / "ports.json")
        await ended.wait()
        await replicas.close()
        await store.close()
        await nccl.close()
    (folder / "events.json").write_text(json.dumps(events))


if __name__ == "__main__":
    log.configure("both[n0]")
    asyncio.run(main(Path(sys.argv[1])))
