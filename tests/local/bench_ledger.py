"""What a day of a busy cluster costs a daemon's ledger: `bench_ledger.py [JOBS]`; prints JSON.

Each job has 8 nodes of 8 ranks, a fault and a recovery, and 10 events; rows of slots are written again and
again, as a daemon does it each second. Seconds, bytes.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from ckptless.daemon.ledger.store import Ledger, Owner, Retention
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.records import (
    PHASES,
    EventRecord,
    FaultRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    Record,
    RecoveryRecord,
    SlotRecord,
)
from ckptless.daemon.protocol.requests import TABLES, Read

NODES, SLOTS, EVENTS, AGAIN = 8, 8, 10, 10
DAY_S = 86400.0


def rows(job: str, at_s: float) -> list[Record]:
    """All rows of one job."""
    places = tuple((node, slot) for node in range(NODES) for slot in range(SLOTS))
    made: list[Record] = [
        JobRecord(
            job=job,
            command=("train.py",),
            world_size=len(places),
            nodes=NODES,
            spares=0,
            state="done",
            started_s=at_s,
            ended_s=at_s + 60,
            exit_code=0,
            reason="every rank ended by itself",
        ),
        FaultRecord(
            fault="g1.t1.1",
            job=job,
            kind="died",
            node=1,
            slot=0,
            rank=8,
            generation=1,
            detail="was ended by SIGKILL",
            seen_s=at_s + 10,
            source="process",
        ),
        RecoveryRecord(
            job=job,
            generation=2,
            rung="process",
            faults=("g1.t1.1",),
            restore_step=10,
            started_s=at_s + 10,
            phases=dict.fromkeys(PHASES, 0.1),
            outcome="recovered",
        ),
    ]
    for number in (1, 2):
        made.append(
            GenerationRecord(
                job=job,
                generation=number,
                places=places,
                restore_step=None,
                rung="start",
                faults=(),
                leader=0,
                agreed_s=at_s + number,
            )
        )
    made += [
        EventRecord(
            event=f"{number}",
            job=job,
            node=0,
            at_s=at_s + number,
            level="info",
            kind="generation",
            generation=1,
            text="rank 8 on node02 (slot 0, pid 4711) was ended by SIGKILL",
        )
        for number in range(EVENTS)
    ]
    return [*made, *told_again(job, at_s)]


def told_again(job: str, at_s: float) -> list[Record]:
    """The rows that a daemon writes each second."""
    made: list[Record] = []
    for node in range(NODES):
        made.append(
            NodeRecord(
                job=job,
                node=node,
                name=f"node{node:02}",
                address="10.0.0.1",
                state="up",
                daemon_pid=1,
                agent_pid=2,
                updated_s=at_s,
            )
        )
        made += [
            SlotRecord(
                job=job,
                node=node,
                slot=slot,
                rank=node * SLOTS + slot,
                generation=2,
                pid=7,
                phase="restored",
                step=100,
                loss=0.5,
                updated_s=at_s,
            )
            for slot in range(SLOTS)
        ]
    return made


def main(jobs: int) -> None:
    """Write, read, take out, and say what each took."""
    took: dict[str, float] = {}

    def timed(name: str, began: float) -> None:
        took[name] = round(time.perf_counter() - began, 4)

    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.db") as ledger:
        began = time.perf_counter()
        for number in range(jobs):
            ledger.own(f"job-{number}", Owner(1001, "0" * 32), anew=True)
            ledger.write(rows(f"job-{number}", number * DAY_S / jobs))
        timed("write", began)
        began = time.perf_counter()
        for _ in range(AGAIN):
            ledger.write(told_again("job-0", DAY_S))
        took["write_a_second_s"] = round((time.perf_counter() - began) / AGAIN, 5)
        nbytes = ledger.used_nbytes
        began = time.perf_counter()
        page = ledger.page(Read(protocol=PROTOCOL, tables=("job",)), 1001, jobs + 1, 1 << 30)
        timed("list_jobs", began)
        began = time.perf_counter()
        one = ledger.page(Read(protocol=PROTOCOL, job="job-7", tables=TABLES), 1001, 10_000, 1 << 30)
        timed("read_a_job", began)
        began = time.perf_counter()
        ledger.check()
        timed("check", began)
        began = time.perf_counter()
        removed = ledger.prune(2 * DAY_S, Retention(keep_s=1.5 * DAY_S))
        timed("prune_half", began)
        left = ledger.used_nbytes
        began = time.perf_counter()
        for_room = ledger.prune(2 * DAY_S, Retention(most_nbytes=left // 2))
        timed("make_room", began)
    found = {
        **{"jobs": jobs, "listed": len(page.records), "rows_of_a_job": len(one.records)},
        **{"nbytes": nbytes, "nbytes_left": left, "removed_for_room": removed + for_room, "seconds": took},
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
