"""When an agent counts as silent, and what of it is the daemon's own sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.local_agent import AgentProcess, Heartbeat

TICK_S = 0.05


def look_until(heart: Heartbeat, begin: float, end: float) -> int:
    """Tick as a daemon does; how often the agent was asked."""
    asked, now = 0, begin
    while now < end:
        asked += heart.look(now)
        now += TICK_S
    return asked


def test_one_that_answers_is_never_silent() -> None:
    heart = Heartbeat(8.0, heard_at=0.0)
    for second in range(0, 100, 2):
        assert 1 <= look_until(heart, second, second + 2) <= 2
        heart.heard_at = second + 2
        assert not heart.silent(second + 2)


def test_one_that_does_not_is() -> None:
    heart = Heartbeat(8.0, heard_at=0.0)
    look_until(heart, 0.0, 7.9)
    assert not heart.silent(7.9)
    look_until(heart, 7.9, 8.1)
    assert heart.silent(8.1)


def test_the_daemons_own_sleep_is_not_the_agents_silence() -> None:
    heart = Heartbeat(8.0, heard_at=0.0)
    look_until(heart, 0.0, 4.0)
    heart.look(104.0)
    assert not heart.silent(104.0)
    look_until(heart, 104.0, 108.5)
    assert heart.silent(108.5)


def test_suspended_is_one_that_is_stopped_with_all_its_children() -> None:
    words = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '100'])"]
    with subprocess.Popen(words, start_new_session=True) as process:
        agent = AgentProcess(process.pid, os.getuid())
        try:
            listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while not (children := listing.read_text().split()):
                time.sleep(0.01)
            found = [agent.suspended]
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            found.append(agent.suspended)
            os.kill(int(children[0]), signal.SIGSTOP)
            limit = time.monotonic() + 30
            while not agent.suspended and time.monotonic() < limit:
                time.sleep(0.01)
            found.append(agent.suspended)
            assert found == [False, False, True]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            agent.close()
    assert not AgentProcess(os.getpid(), os.getuid()).suspended


def test_a_number_that_is_another_users_by_now_is_not_the_agents() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ProcessLookupError):
        AgentProcess(os.getpid(), os.getuid() + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
