"""Local mode: the processes of its nodes. torch is loaded once for all agents' zygotes, see `agent.hatch`."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ckptless.daemon.agent.config import AgentConfig
from ckptless.daemon.agent.ranks.prctl import set_pdeathsig
from ckptless.daemon.agent.ranks.processes import Process, SpawnSpec, Zygote

logger = logging.getLogger(__name__)

DAEMON, AGENT = "ckptless.daemon.ckptlessd.main", "ckptless.daemon.agent.main"
HATCH = "ckptless.daemon.agent.hatch"
KILL_DEADLINE_S = 5.0

Child: TypeAlias = Process | asyncio.subprocess.Process


class Nest:
    """Owned by the launcher's event loop. What it starts ends with the launcher, however that ends."""

    def __init__(self) -> None:
        self._zygote = Zygote(lambda kind, text: logger.debug("%s: %s", kind, text))

    @property
    def pid(self) -> int | None:
        """Of the process that has torch loaded."""
        return self._zygote.pid

    async def warm(self, config: AgentConfig) -> None:
        """Load what the agents preload. Raises UsageError, PeerError."""
        await self._zygote.start(config.preload, config.env, config.zygote_deadline_s)

    async def agent(self, arguments: Sequence[str], preload: Sequence[str], log: Path) -> Process:
        """An agent with a zygote. Raises PeerError."""
        words = [HATCH, *(f"--preload={module}" for module in preload), *arguments]
        spec = SpawnSpec(argv=tuple(words), env=os.environ, cwd=Path.cwd(), module=True)
        with log.open("ab") as errors:
            return await self._zygote.spawn(spec, 1, errors.fileno())

    async def close(self) -> None:
        """All agents are started."""
        await self._zygote.close()


async def start_daemon(arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
    """A node's daemon."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            DAEMON,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_Tie(os.getpid()),
        )


def send(child: Child, number: signal.Signals) -> None:
    """A signal, to one that lives."""
    if child.returncode is not None:
        return
    if isinstance(child, Process):
        child.kill(number)
    else:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


async def end(children: Sequence[Child], term_s: float) -> None:
    """SIGTERM, and SIGKILL after `term_s` seconds. Raises TimeoutError for one that outlives that."""
    for number, deadline_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_DEADLINE_S)):
        for child in children:
            send(child, number)
            # One that is stopped could not act on it.
            send(child, signal.SIGCONT)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(child.wait() for child in children))
        except TimeoutError:
            if number is signal.SIGKILL:
                raise
        else:
            return


@dataclass(frozen=True)
class _Tie:
    """Runs in the child before exec: it is to end when the launcher does."""

    parent: int

    def __call__(self) -> None:
        set_pdeathsig(signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(1)
