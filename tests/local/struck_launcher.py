"""ckptless-run, whose agents are tests/local/struck_agent.py: `struck_launcher.py PLAN OPTIONS...`."""

import sys
from pathlib import Path
from typing import Any

from ckptless.daemon.launch import local, main

_start_agent = local.LocalRun._start_agent


async def start_agent(self: local.LocalRun, node: local.LocalNode, program: Any) -> Any:
    """As ever, but of another program."""
    assert tuple(program[:2]) == ("-m", local.AGENT)
    words = (str(Path(__file__).with_name("struck_agent.py")), PLAN, local.AGENT, *program[2:])
    return await _start_agent(self, node, words)


if __name__ == "__main__":
    PLAN = sys.argv.pop(1)
    local.LocalRun._start_agent = start_agent  # type: ignore[method-assign]
    main.main()
