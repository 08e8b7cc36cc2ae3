"""The agent's part of rings alone: `python ring_agent.py SOCKET LEASE_S`, to the end of its standard input.

Prints a line of JSON for each event, and at the end what was left open.
"""

import asyncio
import json
import os
import sys

from ckptless.daemon.agent.rank_link import Heard, RankLink, RankServer
from ckptless.daemon.agent.ring_service import RingService
from ckptless.daemon.api.ring import FromRing


def say(kind: str, text: str) -> None:
    print(json.dumps([kind, text]), flush=True)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def main() -> None:
    rings = RingService(say, float(sys.argv[2]))

    def says(link: RankLink, message: Heard) -> None:
        assert isinstance(message, FromRing)
        rings.says(link, message)

    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(0, over.set)
    before = open_fds()
    server = RankServer(sys.argv[1], says, rings.hung_up)
    server.start()
    say("ready", "")
    await over.wait()
    loop.remove_reader(0)
    server.close()
    await rings.close()
    say("left", str(open_fds() - before))


if __name__ == "__main__":
    asyncio.run(main())
