"""Merging ledgers: neither the order of the ledgers, nor of their records, nor repeats matter."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.ledger.merge import Snapshot, merge
from ckptless.daemon.ledger.precedence import ENDED, key
from ckptless.daemon.protocol.records import (
    EventRecord,
    FaultRecord,
    GenerationRecord,
    HoldingRecord,
    JobRecord,
    NodeRecord,
    Record,
    RecoveryRecord,
    SlotRecord,
)

# Few keys and few values: records that collide, and ties, are what is looked for.
few = st.integers(0, 2)
times = st.sampled_from((0.0, 1.0, 2.0))
words = st.sampled_from(("a", "b"))
common: dict[str, Any] = {"job": words}

jobs = st.builds(
    JobRecord,
    **common,
    command=st.just(("t",)),
    world_size=few,
    nodes=few,
    spares=few,
    state=st.sampled_from(("forming", "running", "recovering", "done", "failed", "stopped")),
    started_s=times,
    ended_s=st.none() | times,
)
nodes = st.builds(
    NodeRecord,
    **common,
    node=few,
    name=words,
    address=words,
    state=st.sampled_from(("up", "lost")),
    daemon_pid=st.none(),
    agent_pid=st.none(),
    updated_s=times,
)
slots = st.builds(
    SlotRecord,
    **common,
    node=few,
    slot=few,
    rank=st.none() | few,
    generation=few,
    pid=st.none(),
    phase=words,
    step=st.none() | few,
    loss=st.none() | times,
    updated_s=times,
)
holdings = st.builds(
    HoldingRecord,
    **common,
    node=few,
    tensors=st.sampled_from(((), ((0, (1,), 8),))),
    records=st.just(()),
    nbytes=few,
    seq=few,
    updated_s=times,
)
generations = st.builds(
    GenerationRecord,
    **common,
    generation=few,
    places=st.just(((0, 0),)),
    restore_step=st.none() | few,
    rung=words,
    faults=st.just(()),
    leader=few,
    agreed_s=times,
)
faults = st.builds(
    FaultRecord,
    **common,
    fault=words,
    kind=words,
    node=few,
    slot=st.none(),
    rank=st.none() | few,
    generation=few,
    detail=words,
    seen_s=times,
)
recoveries = st.builds(
    RecoveryRecord,
    **common,
    generation=few,
    rung=words,
    faults=st.just(()),
    restore_step=st.none(),
    started_s=times,
    phases=st.dictionaries(st.sampled_from(("detect", "stop", "leave")), times),
    outcome=st.sampled_from((None, "recovered", "superseded")),
)
events = st.builds(
    EventRecord,
    **common,
    event=words,
    node=few,
    at_s=times,
    level=st.just("info"),
    kind=words,
    generation=st.none(),
    text=words,
)
records = st.one_of(jobs, nodes, slots, holdings, generations, faults, recoveries, events)
ledgers = st.lists(st.lists(records, max_size=6), max_size=4)


def everything(found: Snapshot) -> list[Record]:
    return [
        *found.jobs,
        *found.nodes,
        *found.slots,
        *found.holdings,
        *found.generations,
        *found.faults,
        *found.recoveries,
        *found.events,
    ]


@given(ledgers, st.data())
def test_order_and_repeats_do_not_matter(parts: list[list[Record]], data: st.DataObject) -> None:
    whole = merge(parts)
    again = parts + (data.draw(st.lists(st.sampled_from(parts), max_size=3)) if parts else [])
    mixed = [data.draw(st.permutations(part)) for part in data.draw(st.permutations(again))]
    assert merge(mixed) == whole


@given(ledgers)
def test_merging_what_was_merged_changes_nothing(parts: list[list[Record]]) -> None:
    whole = merge(parts)
    assert merge([everything(whole)]) == whole
    assert merge([everything(whole), *parts]) == whole


@given(ledgers)
def test_each_thing_is_there_once_and_is_one_that_was_told(parts: list[list[Record]]) -> None:
    told = [record for part in parts for record in part]
    kept = everything(merge(parts))
    keys = [(type(record), *key(record)) for record in kept]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {(type(record), *key(record)) for record in told}
    assert all(record in told for record in kept if not isinstance(record, RecoveryRecord))


@given(ledgers)
def test_no_rule_is_broken(parts: list[list[Record]]) -> None:
    told = [record for part in parts for record in part]
    found = merge(parts)
    for job in found.jobs:
        ended = any(isinstance(r, JobRecord) and r.job == job.job and r.state in ENDED for r in told)
        assert (job.state in ENDED) == ended
    for slot in found.slots:
        same = [r for r in told if isinstance(r, SlotRecord) and key(r) == key(slot)]
        assert slot.updated_s == max(r.updated_s for r in same)
    for recovery in found.recoveries:
        rivals = [r for r in told if isinstance(r, RecoveryRecord) and key(r) == key(recovery)]
        generations = {r.generation for r in found.generations if r.job == recovery.job}
        if any(r.outcome is not None for r in rivals):
            assert recovery in rivals
            assert recovery.outcome is not None
        elif any(newer > recovery.generation for newer in generations):
            # Its leader died over it.
            assert structs.replace(recovery, outcome=None) in rivals
            assert recovery.outcome == "superseded"
        else:
            assert recovery in rivals
