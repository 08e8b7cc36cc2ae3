"""The agent's part of rings alone: `python ring_agent.py SOCKET LEASE_S`, to the end of its standard input.

Prints a line of JSON for each event, and at the end what was left open. For the line "told" on its input it
prints what is told of the rings, in an event of that name.
"""

import asyncio
import json
import os
import sys

import msgspec

from ckptless.daemon.agent.dataloader.service import RingService
from ckptless.daemon.agent.ranks.link import Heard, RankLink, RankServer
from ckptless.daemon.protocol.ring import FromRing


def say(kind: str, text: str) -> None:
    print(json.dumps([kind, text]), flush=True)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def asked(rings: RingService) -> None:
    """To the end of standard input."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    # Closed at its end.
    pipe = os.fdopen(os.dup(0), "rb")
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
    while line := await lines.readline():
        assert line == b"told\n"
        say("told", msgspec.json.encode(rings.told()).decode())


async def main() -> None:
    rings = RingService(say, float(sys.argv[2]))

    def says(link: RankLink, message: Heard) -> None:
        assert isinstance(message, FromRing)
        rings.says(link, message)

    before = open_fds()
    server = RankServer(sys.argv[1], says, rings.hung_up)
    server.start()
    say("ready", "")
    await asked(rings)
    server.close()
    rings.close()
    say("left", str(open_fds() - before))


if __name__ == "__main__":
    asyncio.run(main())
