"""The job's output, its story and its end say who it was, why, and which file to read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .localrun import Job, fault, recovered, toy, wait_until

DEADLINE_S = 120.0

# Without a collective by which the others would wait for it, rank 1 returns early, or raises.
SCRIPT = """
import sys, time
import ckptless

def build():
    return ckptless.State(step=0)

def train(run):
    state = run.keep(build)
    while state.step < 100_000:
        state.step += 1
        if run.rank == 1 and state.step == 4:
            if sys.argv[1] == "return":
                return
            raise ValueError("told to\\nraise")
        time.sleep(0.02)
        run.commit()

ckptless.run(train)
"""


def ckptctl(job: Job, *words: str) -> Any:
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_who_died_and_why(tmp_path: Path) -> None:
    """A kill, and right behind the recovery's first step a raise: both by name, and no recovery is lost."""
    faults = [fault("forward", "kill", 1, 20), fault("forward", "raise", 2, 22)]
    with toy(tmp_path, faults, nodes=3, steps=40) as job:
        job.ended(0, 200.0)
        told = {event["kind"]: event for event in ckptctl(job, "events")["events"]}
        causes = [one for one in ckptctl(job, "status")["faults"] if one["kind"] in ("died", "raised")]
        ledger = job.ledger()
    died, raised = told["died"], told["raised"]
    assert died["text"].startswith("rank 1 on node-1 (slot 0, pid ")
    assert died["text"].endswith(") was ended by SIGKILL")
    assert died["about"]["signal"] == "SIGKILL"
    assert (died["about"]["rank"], died["about"]["node"], died["about"]["slot"]) == (1, 1, 0)
    assert raised["text"].endswith(") raised ValueError: the toy raises, as told")
    assert raised["about"]["error"] == "ValueError: the toy raises, as told"
    for line in (died["text"], raised["text"]):
        assert f"[ckptless] {line}\n" in job.stdout
    # Whoever only noticed is no fault of its own.
    assert len(causes) == 2
    assert not [kind for kind in told if kind == "broken"]
    assert [one.outcome for one in ledger.recoveries] == ["recovered", "recovered"]
    assert len(recovered(ledger)) == 2


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of JSON of a log; a rank's has others, too."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_one_id_follows_a_fault_through_all_logs(tmp_path: Path) -> None:
    killed, options = [fault("forward", "kill", 1, 20)], ("--log-format", "json")
    with toy(tmp_path, killed, nodes=2, steps=40, options=options) as job:
        job.ended(0, 200.0)
        ledger = job.ledger()
    (died,) = [one for one in ledger.faults if one.kind == "died"]
    (recovery,) = recovered(ledger)
    assert died.fault in recovery.faults

    def says(log: str) -> list[str]:
        """What comes of the fault, in order; each line has its id as a field."""
        found = [one for one in lines_of(job.state_dir / log) if died.fault in one.get("faults", ())]
        assert {one["job"] for one in found} == {recovery.job}
        return [one["text"] for one in found]

    daemons = [line for node in (0, 1) for line in lines_of(job.state_dir / f"node-{node}/daemon.log")]
    told = [one["record"] for one in daemons if "record" in one]
    assert died.fault in {record.get("fault") for record in told}
    assert any(died.fault in record.get("faults", ()) for record in told)
    step = recovery.restore_step
    assert step is not None
    after, goes_on = f"generation 2 (fault {died.fault})", f"goes on after step {step}"
    for node in (0, 1):
        # The stop may be for what was noticed first, the end of a connection.
        follows, first = says(f"node-{node}/agent.log")[-2:]
        assert follows == f"generation 2 ({recovery.rung}) (fault {died.fault})"
        assert first == f"{after}: slot 0 has made its first step, {step + 1}"
        rank = says(f"node-{node}/logs/rank-{node:05d}.log")[-2:]
        assert rank == [f"{after}: rank {node} {goes_on}", f"{after}: step {step + 1} is its first"]
        (stops,) = [
            line for line in lines_of(job.state_dir / f"node-{node}/agent.log") if "stops:" in line["text"]
        ]
        assert set(stops["faults"]) <= {one.fault for one in ledger.faults}
        assert stops["faults"]
    left = lines_of(job.state_dir / "node-0/logs/rank-00000.log")[0]
    assert left["text"].startswith("generation 1 is left: ")
    for line in job.stderr.splitlines():
        assert json.loads(line)["who"] == "ckptless-run"


def test_the_end_says_what_the_rank_that_failed_printed_last(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(tmp_path / "run", ["--nodes", 2], [script, "raise"]) as job:
        job.ended(1, DEADLINE_S)
        log = job.state_dir / "node-1" / "logs" / "rank-00001.log"
    said = job.stderr
    assert "failed: rank 1 raised ValueError: told to, 3 times" in said
    assert "the last that rank 1 printed:\n    Traceback (most recent call last):\n" in said
    assert "    ValueError: told to\n    raise\n" in said
    assert f"the whole log of rank 1: {log}\n" in said
    assert "in train" in log.read_text()


def test_a_rank_that_returns_early_is_named_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(tmp_path / "run", ["--nodes", 3, "--tee", "none"], [script, "return"]) as job:
        wait_until(lambda: "has returned" in job.stdout, DEADLINE_S, job)
        wanted = "rank 1 has returned from the training function after step 3, while ranks 0, 2"

        def early() -> str:
            return ckptctl(job, "status")["returned_early"] or ""

        def told() -> list[Any]:
            return [e for e in ckptctl(job, "events")["events"] if e["kind"] == "returned-early"]

        # What the output has, the ledgers' rows and events have a while later.
        wait_until(lambda: early().startswith(wanted), DEADLINE_S, job)
        wait_until(told, DEADLINE_S, job)
        (event,) = told()
        assert f"[ckptless] {event['text']}\n" in job.stdout
        assert (event["about"]["rank"], event["about"]["node"]) == (1, 1)
        job.launcher.send_signal(signal.SIGINT)
        job.ended(130, DEADLINE_S)
