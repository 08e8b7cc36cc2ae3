"""A drill cuts a node off from its network: nothing comes or goes for a while, and then all does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.bench.nets import Nets, made

CUT_S = 3
DEADLINE_S = 30.0
PROGRAM = f"""
import asyncio, sys
from ckptless.daemon.ckptlessd.cutting import cut_network
from ckptless.daemon.protocol.errors import CkptlessError
try:
    asyncio.run(cut_network({CUT_S}))
except CkptlessError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def net() -> Iterator[Nets]:
    try:
        with made(Nets(1, 100)) as found:
            if shutil.which("nft") is None:
                raise FileNotFoundError("nft")
            for name in found.names:
                subprocess.run(["ip", "-netns", name, "link", "set", "lo", "up"], check=True, timeout=20)
            yield found
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
            raise
        pytest.skip(f"no network namespaces or packet filter here: {error}")


def cut(net: Nets) -> subprocess.Popen[bytes]:
    """Node 0 cuts itself off."""
    words = ["ip", "netns", "exec", net.names[0], sys.executable, "-c", PROGRAM]
    return subprocess.Popen(words)


def reaches(net: Nets, node: int, address: str) -> bool:
    """Whether TCP gets an answer there within half a second: nobody listens, which is an answer."""
    program = f"""
import socket
with socket.socket() as one:
    one.settimeout(0.5)
    try:
        one.connect(("{address}", 9))
    except ConnectionRefusedError:
        print("answers")
    except OSError:
        pass
"""
    words = ["ip", "netns", "exec", net.names[node], sys.executable, "-c", program]
    return "answers" in subprocess.check_output(words, text=True, timeout=20)


def until(net: Nets, reached: bool) -> None:
    limit = time.monotonic() + DEADLINE_S
    while reaches(net, 0, net.addresses[1][0]) is not reached:
        assert time.monotonic() < limit


def rules(net: Nets) -> str:
    """The packet filter of node 0."""
    return subprocess.check_output(
        ["ip", "netns", "exec", net.names[0], "nft", "list ruleset"], text=True, timeout=20
    )


def test_nothing_comes_or_goes_but_over_loopback(net: Nets) -> None:
    until(net, True)
    cutting = cut(net)
    until(net, False)
    assert not reaches(net, 1, net.addresses[0][0])
    assert reaches(net, 0, "127.0.0.1")
    assert cutting.wait(DEADLINE_S) == 0
    assert reaches(net, 0, net.addresses[1][0])
    assert rules(net) == "", "nothing is left of it"


def test_it_ends_also_where_the_daemon_is_killed(net: Nets) -> None:
    cutting = cut(net)
    until(net, False)
    cutting.kill()
    cutting.wait(DEADLINE_S)
    until(net, True)
    # The next one takes the place of what is left.
    again = cut(net)
    until(net, False)
    assert again.wait(DEADLINE_S) == 0
    assert rules(net) == ""


def test_where_it_may_not(net: Nets) -> None:
    """Without CAP_NET_ADMIN, as the unit has it."""
    words = ["ip", "netns", "exec", net.names[0], "setpriv", "--bounding-set=-net_admin"]
    done = subprocess.run(
        [*words, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("nft(8) says: ")
    assert "not permitted" in done.stderr
    assert rules(net) == ""
