"""A user's signal in the launcher's first second, while it imports what it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CLICK = """\
import time
from pathlib import Path

Path({here!r}, "imports").touch()
limit = time.monotonic() + 60
while not Path({here!r}, "go").exists() and time.monotonic() < limit:
    time.sleep(0.01)
raise SystemExit(7)
"""


def test_it_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(CLICK.format(here=str(tmp_path)))
    code = "from ckptless.daemon.launch.entry import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as launcher:
        limit = time.monotonic() + 60
        while not (tmp_path / "imports").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(number)
        (tmp_path / "go").touch()
        assert launcher.wait(60) == 7
