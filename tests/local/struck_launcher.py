"""ckptless-run, whose agents are tests/local/struck_agent.py: `struck_launcher.py PLAN OPTIONS...`."""

import sys
from pathlib import Path
from typing import Any

from ckptless.daemon.launch import main, nest

_agent = nest.Nest.agent


async def agent(self: nest.Nest, arguments: Any, preload: Any, log: Path) -> Any:
    """As ever, but of another program."""
    assert tuple(arguments[:2]) == ("-m", nest.AGENT)
    words = (str(Path(__file__).with_name("struck_agent.py")), PLAN, nest.AGENT, *arguments[2:])
    return await _agent(self, words, preload, log)


if __name__ == "__main__":
    PLAN = sys.argv.pop(1)
    nest.Nest.agent = agent  # type: ignore[method-assign]
    main.main()
