"""ckptless-run on nodes that have so much memory left: `poor_launcher.py NBYTES OPTIONS...`.

What the agent's versions have taken of it is gone. It is the agent's program as well: `... NBYTES agent`.
"""

import sys
from pathlib import Path
from typing import Any

from ckptless.daemon.agent import service
from ckptless.daemon.agent.free_memory import FreeMemory
from ckptless.daemon.agent.main import main as agent
from ckptless.daemon.agent.versions.room import Room
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.launch import main, nodes

_start_agent = nodes.Nodes._start_agent


async def start_agent(self: nodes.Nodes, node: nodes.Node, program: Any) -> Any:
    """As ever, but of this program."""
    assert tuple(program[:2]) == ("-m", nodes.AGENT)
    return await _start_agent(self, node, (str(Path(__file__)), NBYTES, "agent", nodes.AGENT, *program[2:]))


class PoorRoom(Room):
    """That of a node which has so much memory, of which only its versions take something."""

    def __init__(self, node: Any, store: VersionStore, copies: int, domains: tuple[str, ...]) -> None:
        left = lambda: FreeMemory(max(0, int(NBYTES) - store.touched_nbytes), "the test")  # noqa: E731
        super().__init__(node, store, copies, domains, left)


if __name__ == "__main__":
    NBYTES = sys.argv.pop(1)
    if sys.argv[1] == "agent":
        del sys.argv[1:3]
        vars(service)["Room"] = PoorRoom
        agent()
    else:
        nodes.Nodes._start_agent = start_agent  # type: ignore[method-assign]
        main.main()
