"""Cuts this node off from its network for a while, as a drill: a packet filter that ends by itself."""

import asyncio
import math
import subprocess

from ckptless.daemon.protocol.errors import CkptlessError

TABLE = "ckptless_drill"
DEADLINE_S = 10.0
# Also where there is none.
_NONE = f"table inet {TABLE} {{}}\ndelete table inet {TABLE}\n"
# The elements' own time ends it, so that a node comes back also if its daemon is killed meanwhile.
_RULES = """
table inet {table} {{
    set cut {{ type nf_proto; flags timeout; elements = {{ ipv4 timeout {for_s}s, ipv6 timeout {for_s}s }}; }}
    chain comes {{ type filter hook input priority -500; iifname != "lo" meta nfproto @cut drop; }}
    chain goes {{ type filter hook output priority -500; oifname != "lo" meta nfproto @cut drop; }}
}}
"""


async def cut_network(for_s: float) -> None:
    """Let nothing in or out, but for loopback, for so long. Raises CkptlessError, with why not."""
    await _nft(_NONE + _RULES.format(table=TABLE, for_s=math.ceil(for_s)))
    # no deadline: the length of the drill
    await asyncio.sleep(for_s)
    await _nft(_NONE)


async def _nft(commands: str) -> None:
    try:
        # no deadline: that of the process
        done = await asyncio.to_thread(
            subprocess.run, ["nft", commands], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except FileNotFoundError:
        raise CkptlessError("nft(8) is not installed there (Debian's package nftables)") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CkptlessError(f"nft(8) failed: {error}") from error
    if done.returncode:
        first, *_ = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise CkptlessError(f"nft(8) says: {first}")
