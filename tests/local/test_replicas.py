"""`ckptctl replicas` and `status` of a sharded job: who holds what, before and after a node is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl

from .localrun import RANKS, Job, toy, wait_until

DEADLINE_S = 100.0
LOST = 2
STEPS = 10_000


def asked(job: Job, *command: str) -> Any:
    result = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), "--json", *command])
    return json.loads(result.stdout) if result.exit_code == 0 else {}


def holders(job: Job) -> dict[int, dict[str, set[int]]]:
    """Of each shard, the nodes that hold its tensors as it goes on, by what they hold them as."""
    return {
        shard["shard"]: {
            role: {holder["node"] for holder in shard["holders"] if holder["as"] == role}
            for role in ("owner", "copy")
        }
        for shard in asked(job, "replicas").get("shards", ())
    }


def held_twice(job: Job, among: set[int]) -> bool:
    """Whether each shard has an owner and two other holders, and so has each rank's record."""
    safety = asked(job, "status").get("safety") or {}
    found = holders(job)
    well = all(
        len(each["owner"]) == 1 and len(each["copy"]) == 2 and each["owner"] | each["copy"] <= among
        for each in found.values()
    )
    at_risk = (safety.get("gone"), safety.get("lost_with_one"), safety.get("lost_with_two"))
    nothing: dict[str, list[int]] = {"shards": [], "records_of_ranks": []}
    trains = bool(safety.get("complete")) and (safety.get("watermark") or 0) > 0
    return len(found) == RANKS and well and trains and at_risk == (nothing, [], [])


def test_copies_are_where_it_says_and_are_made_anew(tmp_path: Path) -> None:
    env = {"TOY_PARALLEL": "fsdp", "TOY_SLEEP_S": "0.1"}
    with toy(tmp_path, spares=1, steps=STEPS, env=env) as job:
        everybody = set(range(RANKS + 1))
        wait_until(
            lambda: held_twice(job, everybody) and holders(job)[LOST]["owner"] == {LOST}, DEADLINE_S, job
        )
        before = asked(job, "status")["safety"]
        assert before["watermark"] <= before["newest_step"]

        for what in ("daemon", "agent"):
            pid = job.pid_of(LOST, what)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: held_twice(job, everybody - {LOST}) and holders(job)[LOST]["owner"] == {RANKS},
            DEADLINE_S,
            job,
        )
        after = asked(job, "status")["safety"]
        assert after["watermark"] >= before["watermark"]
        os.kill(job.launcher.pid, signal.SIGINT)
        job.ended(130)
        # It is over, and so is what was held; the last of it can still be looked at.
        assert asked(job, "status")["safety"] is None
        assert len(asked(job, "replicas")["shards"]) == RANKS
