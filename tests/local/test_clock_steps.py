"""The system's clock is set forwards and backwards by an hour while a job runs: only records have it.

Every Python process of the run reads its wall clock from a file; the monotonic clock is the kernel's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .localrun import recovered, same_as_reference, toy
from .test_daemons import back, kill_daemon, kill_rank, newest, trains_on

STEP_S = 3600.0
# Python runs it at its start, in whichever process it is.
SITE = """
import time
from pathlib import Path
_real, _file = time.time, Path({file!r})
def _stepped():
    try:
        return _real() + float(_file.read_text() or 0)
    except OSError:
        return _real()
time.time = _stepped
"""


def test_an_hour_forwards_and_backwards(tmp_path: Path) -> None:
    offset, slow = tmp_path / "offset", tmp_path / "slow"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(file=str(offset)))
    env = {
        "PYTHONPATH": str(tmp_path / "site"),
        "TOY_SLEEP_S": "0.2",
        "TOY_SLEEP_WHILE": str(slow),
    }
    slow.touch()
    with toy(tmp_path, spares=1, env=env) as job:
        trains_on(job, 1)
        for generation, (step_s, node, rank) in enumerate([(STEP_S, 1, 2), (-STEP_S, 0, 1)], start=2):
            set_clock(offset, step_s)
            trains_on(job, generation - 1, steps=10)
            assert newest(job)[0] == generation - 1  # nothing was taken for lost or late
            # What is started from now on begins with the new time, beside others that began with the old one.
            back(job, node, kill_daemon(job, node))
            trains_on(job, generation - 1)
            kill_rank(job, rank)
            trains_on(job, generation)
            assert newest(job)[0] == generation
        # Nor does a user's environment, with whatever secrets are in it, lie anywhere on the disk.
        files = [file for file in job.state_dir.rglob("*") if file.is_file()]
        assert {"agent.json", "daemon.json", "ledger.db"} <= {file.name for file in files}
        assert [file for file in files if job.mark.encode() in file.read_bytes()] == []
        slow.unlink()
        job.ended(0)
        ledger = same_as_reference(job, [])
    assert [fault.kind for fault in ledger.faults if fault.kind not in ("exit", "broken", "died")] == []
    assert len(recovered(ledger)) == 2
    for recovery in ledger.recoveries:
        assert all(seconds >= 0.0 for seconds in recovery.phases.values())
        assert sum(recovery.phases.values()) < STEP_S / 10
    for words in (["timeline", "--json"], ["events", "--json"], ["status", "--json"], ["status"], ["jobs"]):
        shown = ckptctl(job.state_dir, *words)
        assert shown.returncode == 0, shown.stderr
        assert "-1h" not in shown.stdout
    found = json.loads(ckptctl(job.state_dir, "timeline", "--json").stdout)
    assert [one["outcome"] for one in found["recoveries"]] == ["recovered"] * 2
    assert all(0.0 < one["total_s"] < STEP_S / 10 for one in found["recoveries"])


def set_clock(offset: Path, seconds: float) -> None:
    partial = offset.with_suffix(".new")
    partial.write_text(str(seconds))
    partial.rename(offset)


def ckptctl(state_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ckptctl")), *words, "--state-dir", str(state_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
