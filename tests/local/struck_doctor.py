"""A ckptless-doctor that sends at a pace, and may be struck: `struck_doctor.py RATE STRIKE OPTIONS...`.

RATE is in bytes per second. STRIKE: "" for none; "wrong", of what it sends one byte is another; "gone", it
ends when it is tried; "deaf", it takes no connection but its own to node 0.
"""

import os
import sys
from typing import Any

from ckptless.daemon.transport.bulk import SendRate
from ckptless.daemon.transport.link import Link
from ckptless.daemon.transport.listener import Listener
from ckptless.doctor.__main__ import main

RATE, STRIKE = float(sys.argv.pop(1)), sys.argv.pop(1)
_send_bulk = Link.send_bulk


async def send_bulk(self: Link[Any], data: memoryview, _pace: object = None) -> None:
    """As ever, but at a pace."""
    if STRIKE == "gone":
        os._exit(9)
    sent = bytearray(data)
    sent[len(sent) // 2] ^= STRIKE == "wrong"
    await _send_bulk(self, memoryview(sent), SendRate(RATE))


def say_one(_self: Listener, _host: str, _port: int = 0) -> int:
    """Say a port at which nobody listens."""
    return 1


if __name__ == "__main__":
    Link.send_bulk = send_bulk  # type: ignore[assignment, method-assign]
    if STRIKE == "deaf":
        Listener.open = say_one  # type: ignore[assignment, method-assign]
    main()
