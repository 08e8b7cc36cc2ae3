"""A whole job whose nodes have two interfaces: each version goes over both, also after a node was lost."""

from __future__ import annotations

import re
from pathlib import Path

from .localrun import FAULTY_DEADLINE_S, HERE, fault, recovered, toy

# A shard of 46 MB with its moments: what is as small as a piece goes over one way.
ENV = {"TOY_PARALLEL": "fsdp", "TOY_WIDTH": "160000"}
STEPS = 8


def test_versions_go_over_both_addresses(tmp_path: Path) -> None:
    launcher = (str(HERE / "two_addresses.py"),)
    faults = [fault("forward", "node", 1, 4)]
    with toy(tmp_path, faults, spares=1, steps=STEPS, env=ENV, launcher=launcher) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        assert len(recovered(job.ledger())) == 1
        for node in (0, 2, 3, 4):
            log = (job.state_dir / f"node-{node}" / "agent.log").read_text()
            found = re.findall(r"fetched over (\S+), (\S+)", log)
            assert found, job.story()
            assert all(one != other for one, other in found)
        assert not [event for event in job.ledger().events if event.kind == "interface-lost"], job.story()
