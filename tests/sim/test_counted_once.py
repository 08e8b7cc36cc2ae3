"""The metrics of all daemons together count each recovery, fault and event once, whoever leads the job."""

from __future__ import annotations

from collections import Counter

import pytest

from ckptless.daemon.ckptlessd.metrics.tally import Tally
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.records import EventRecord, FaultRecord, JobRecord, Record, RecoveryRecord

from .daemons import _Session
from .world import simulate

SEEDS = 40
BATCHES = 4


class Counting:
    """One tally for all daemons, beside what they have told."""

    def __init__(self) -> None:
        self.tally, self.records = Tally(), list[Record]()

    def told(self, records: tuple[Record, ...]) -> None:
        self.tally.told(records)
        self.records += records


@pytest.mark.parametrize("batch", range(BATCHES))
def test_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    say, all_told = _Session.say, Counting()

    def says(self: _Session, node: int | None, message: p.Said) -> None:
        if isinstance(message, p.Rows):
            counted.told(message.records)
        say(self, node, message)

    monkeypatch.setattr(_Session, "say", says)
    for seed in range(1 + batch, 1 + SEEDS, BATCHES):
        counted = Counting()
        simulate(seed)
        over = {r.generation for r in counted.records if isinstance(r, RecoveryRecord) and r.outcome}
        assert sum(counted.tally.outcomes.values()) == len(over), seed
        faults = {r.fault for r in counted.records if isinstance(r, FaultRecord)}
        assert sum(counted.tally.faults.values()) == len(faults), seed
        events = {r.event for r in counted.records if isinstance(r, EventRecord)}
        assert sum(counted.tally.events.values()) == len(events), seed
        ends = Counter(r.state for r in counted.records if isinstance(r, JobRecord) and r.ended_s is not None)
        assert counted.tally.ended == Counter({(state,): 1 for state in ends}), seed
        assert sum(counted.tally.ended.values()) <= 1, seed
        all_told.told(tuple(counted.records))
    assert all_told.tally.recoveries
    assert all(phase for _, phase in all_told.tally.phases)
    assert not any("other" in key for key in (*all_told.tally.faults, *all_told.tally.recoveries))
