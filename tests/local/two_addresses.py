"""ckptless-run on nodes of two interfaces, `two_addresses.py OPTIONS...`, and its agents, with `agent`.

An agent that fetches what it is offered says so in its log.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptless.daemon.agent.main import main as agent
from ckptless.daemon.agent.versions.deltas import Span
from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.store import Incoming
from ckptless.daemon.agent.versions.ways import Way
from ckptless.daemon.launch import local, main, nodes
from ckptless.daemon.settings.agent_config import AgentConfig, agent_config

logger = logging.getLogger(__name__)

_start_agent, _fill = nodes.Nodes._start_agent, TensorsFetch.fill


async def start_agent(self: nodes.Nodes, node: nodes.Node, program: Any) -> Any:
    """As ever, but of this program."""
    assert tuple(program[:2]) == ("-m", nodes.AGENT)
    return await _start_agent(self, node, (str(Path(__file__)), "agent", nodes.AGENT, *program[2:]))


def with_two(shared: Any, **own: Any) -> AgentConfig:
    """The configuration of an agent, with one more address."""
    (first,) = own.pop("copies_addresses")
    second = f"127.{255 - int(first.split('.')[1])}.{first.partition('.')[2].partition('.')[2]}"
    return agent_config(shared, **own, copies_addresses=(first, second))


async def fill(self: TensorsFetch, ways: Sequence[Way], place: Incoming, spans: Sequence[Span]) -> None:
    """Fetch as ever, and say over which ways."""
    await _fill(self, ways, place, spans)
    logger.info("fetched over %s", ", ".join(way.address[0] for way in ways))


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        del sys.argv[1:3]
        setattr(TensorsFetch, "fill", fill)  # noqa: B010 - as a method
        agent()
    else:
        nodes.Nodes._start_agent = start_agent  # type: ignore[method-assign]
        vars(local)["agent_config"] = with_two
        main.main()
