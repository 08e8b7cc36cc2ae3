"""A daemon for `test_attacks`, in a process of its own: `attacked.py FOLDER [old]`, until stdin is closed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ckptless.daemon.ckptlessd import unix_server
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.errors import PeerError

from .attackers import ATTACKER, VICTIM
from .test_service import FakeCluster, Site


class Cluster(FakeCluster):
    """Jobs "1..." are the attacker's, all others the victim's."""

    async def check_owner(self, run: str, uid: int) -> None:
        if uid != (ATTACKER if run.startswith("1") else VICTIM):
            raise PeerError(f"job {run} is not of uid {uid}")

    async def has_job(self, uid: int) -> bool:
        return uid in (ATTACKER, VICTIM)


async def main(folder: Path) -> None:
    site = Site(folder)
    site.service._cluster = Cluster()
    async with site.running():
        os.set_blocking(0, False)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, ended.set)
        await ended.wait()


if __name__ == "__main__":
    log.configure("ckptlessd[n0]")
    if "old" in sys.argv[2:]:
        unix_server.SO_PASSRIGHTS = 0xFFFF
    asyncio.run(main(Path(sys.argv[1])))
