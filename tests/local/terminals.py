"""Terminals of somebody who reads a page: one that a job is started in, and others beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .localrun import Job

# On a machine that does other things too, two seconds without a sign are no fault.
PATIENT = {"CKPTLESS_MAX_STALL": "60"}
# Scripts of pages sleep so that there is time to kill something; here until they are told to hurry.
SLEEPS = {"time.sleep(0.1)": "__import__('os').path.exists('slow') and time.sleep(0.02)"}
DEADLINE_S = 100.0


def own_world(home: Path) -> dict[str, str]:
    """A user's environment: his home, and our programs at hand."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, **PATIENT}


class Started(Job):
    """A job that somebody has started by typing its command, in `home`, with its state in `try` there."""

    def __init__(self, home: Path, command: str) -> None:
        self.state_dir = home / "try"
        (home / "slow").touch()
        self._begin(home, ["bash", "-c", command], own_world(home), home)

    @property
    def said(self) -> str:
        """All that stands in its terminal."""
        return self.stdout + self.stderr

    def finishes(self) -> None:
        """Let it train on without pauses, to its end."""
        (self.home / "slow").unlink()
        self.ended(0, DEADLINE_S)


def _as_from_a_terminal() -> None:
    """What a shell's `&` ignores, which the tests may have been started with."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A shell in a folder; what is exported stays."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._exported = ""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CKPTLESS_")}
        self._env = {**inherited, **own_world(home)}

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        if command.startswith("export "):
            self._exported += f"{command}\n"
        return subprocess.run(
            ["bash", "-c", self._exported + command],
            cwd=self.home,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )

    @contextlib.contextmanager
    def follows(self, command: str, into: Path) -> Iterator[None]:
        """Start one that goes on until somebody ends it, with Ctrl-C."""
        with into.open("wb") as out:
            running = subprocess.Popen(
                ["bash", "-c", f"{self._exported}exec {command}"],
                cwd=self.home,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                preexec_fn=_as_from_a_terminal,
            )
        try:
            yield
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(DEADLINE_S)
