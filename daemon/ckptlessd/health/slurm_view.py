"""A probe that asks Slurm what it says of this node, and tells what nobody acts upon elsewhere.

Jobs lose a node that Slurm has down, and leave one that is drained, by what their leader's daemon asks; this
tells whoever looks at the node. What ckptless itself has drained it for stands there by its own name.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.slurm.adapter import Node
from ckptless.daemon.slurm.reason import reason_text


class SlurmProbe:
    """`ask` gives this node as Slurm has it now, in the event loop that the probe was made in.

    slurmctld answers one after another: nodes that boot together do not ask together.
    """

    deadline_s = 30.0
    # Before the deadline, so that the trouble is told in Slurm's own words.
    LIMIT_S = 20.0

    def __init__(self, ask: Callable[[], Awaitable[Node]]) -> None:
        self._ask, self._loop = ask, asyncio.get_running_loop()
        self.interval_s = random.uniform(90.0, 150.0)

    def missing(self) -> str:
        """See `probe.Probe`."""
        return ""

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises SlurmError where Slurm does not say."""

        async def asked() -> Node:
            return await self._ask()

        answer = asyncio.run_coroutine_threadsafe(asked(), self._loop)
        try:
            return findings(answer.result(self.LIMIT_S))
        finally:
            answer.cancel()  # nobody asks any more what comes of it

    def close(self) -> None:
        """See `probe.Probe`."""


def findings(node: Node) -> list[Finding]:
    """Pure: what of Slurm's view of a node is worth a word; the evidence is Slurm's own words."""
    state = "+".join((node.state, *sorted(node.flags)))
    evidence = f"{state}: {node.reason}" if node.reason else state
    codes: list[str] = []
    if "FAIL" in node.flags or node.state in ("FAIL", "FAILING"):
        codes.append("slurm-fail")
    elif node.down:
        codes.append("slurm-down")
    elif node.draining and not node.reason.startswith(reason_text("")):
        codes.append("slurm-drained")
    if not node.responding:
        codes.append("slurm-not-responding")
    return [Finding(code=code, evidence=evidence) for code in codes]
