"""ckptless-run, whose agents are tests/local/struck_agent.py: `struck_launcher.py PLAN OPTIONS...`."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from ckptless.daemon.launch import main

AGENT = "ckptless.daemon.agent.main"
_start = asyncio.create_subprocess_exec


async def start(program: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
    """As ever, but for agents."""
    if words[:2] == ("-m", AGENT):
        words = (str(Path(__file__).with_name("struck_agent.py")), PLAN, AGENT, *words[2:])
    return await _start(program, *words, **options)


if __name__ == "__main__":
    PLAN = sys.argv.pop(1)
    asyncio.create_subprocess_exec = start  # type: ignore[assignment]
    main.main()
