"""ckptless-run, whose agents are tests/local/struck_agent.py: `struck_launcher.py PLAN OPTIONS...`."""

import sys
from pathlib import Path
from typing import Any

from ckptless.daemon.launch import main, nodes

_start_agent = nodes.Nodes._start_agent


async def start_agent(self: nodes.Nodes, node: nodes.Node, program: Any) -> Any:
    """As ever, but of another program."""
    assert tuple(program[:2]) == ("-m", nodes.AGENT)
    words = (str(Path(__file__).with_name("struck_agent.py")), PLAN, nodes.AGENT, *program[2:])
    return await _start_agent(self, node, words)


if __name__ == "__main__":
    PLAN = sys.argv.pop(1)
    nodes.Nodes._start_agent = start_agent  # type: ignore[method-assign]
    main.main()
