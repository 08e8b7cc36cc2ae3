"""What one daemon, or one agent, computes and says at a size: seconds on this machine, bytes, and counts.

`python -m tests.sim.scale_parts 256 1024 [--json FILE]`: so many nodes of 8 ranks, each a shard of its own,
which two other nodes hold, too. Each is what the shipped function takes with what such a job would give it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptless.daemon.ckptlessd.consensus.packing import digest_of, pack, unpack
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.main import GC_THRESHOLD
from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.planning.faults import Fault, NodeView, NodeViews
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Ballot, Decree, Durable, Vote
from ckptless.daemon.replication.re_replication import Holders, remakes

SLOTS = 8
SPARES = 2
COPIES = 2
STEP = 1000
LIMITS = m.Limits.from_max_stall(300.0)
T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """Of one size: the best of a few tries, in seconds of a CPU; and bytes of messages and rows."""

    nodes: int
    slots: int
    remakes_s: float
    tick_s: float
    report_s: float
    tally_s: float
    plan_s: float
    pack_s: float
    unpack_s: float
    decree_nbytes: int
    row_nbytes: int
    frozen_nbytes: int
    training_nbytes: int


def spec_of(nodes: int) -> m.JobSpec:
    """A job of so many nodes, the last ones spares."""
    names = tuple(f"node{node:05d}" for node in range(nodes))
    return m.JobSpec(
        job="scale", command=("t",), nodes=nodes - SPARES, spares=SPARES, slots_per_node=SLOTS,
        limits=LIMITS, names=names,
    )  # fmt: skip


def info_of(node: int) -> m.NodeInfo:
    """Addresses as in a large network, ports as the kernel gives them."""
    port = 32768 + node * 7919 % 28232
    return m.NodeInfo(
        node=node, name=f"node{node:05d}", address=f"10.0.{node >> 8}.{node & 255}",
        agent_port=port, nccl_port=port ^ 1,
    )  # fmt: skip


def holdings_of(node: int, nodes: int, steps: tuple[int, ...]) -> m.Holdings:
    """What the agent of `node` holds: its own ranks' state, and that of the nodes before it on the ring."""
    homes = {(node - back) % nodes for back in range(COPIES + 1)}
    ranks = sorted(home * SLOTS + slot for home in homes if home < nodes - SPARES for slot in range(SLOTS))
    return m.Holdings(
        tensors=tuple((rank, steps) for rank in ranks),
        records=tuple((rank, rank, steps) for rank in ranks),
    )


def state_of(node: int, nodes: int, step: int, *, frozen: bool = False) -> m.AgentState:
    """An agent's report in generation 1: its ranks train, or have left."""
    trains = node < nodes - SPARES
    phase: m.Phase = "waiting" if not trains else "left" if frozen else "restored"
    slots = tuple(
        m.SlotState(
            slot=slot, phase=phase, generation=1 if trains else 0, pid=40000 + slot, hooked=True,
            step=step if trains else None, stepped=trains, loss=2.718281828 if trains else None,
            every=1 if trains else None, share=0.01 if trains else None,
            cause=m.Cause(kind="stop", text="stopped") if frozen and trains else None, age_s=0.125,
        )
        for slot in range(SLOTS)
    )  # fmt: skip
    return m.AgentState(
        seq=step,
        slots=slots,
        assigned=1,
        frozen=1 if frozen else None,
        holdings=holdings_of(node, nodes, (step - 1, step)) if frozen else None,
        daemon_pid=4711,
    )


def views_of(nodes: int, *, frozen: bool) -> dict[int, NodeView]:
    """Return what the leader knows of all."""
    hellos = [m.Introduction(info=info_of(node), pid=4711) for node in range(nodes)]
    states = [state_of(node, nodes, STEP, frozen=frozen) for node in range(nodes)]
    return {node: NodeView(node, hellos[node], states[node]) for node in range(nodes)}


def after_a_loss(nodes: int) -> tuple[plan.Situation, dict[int, NodeView]]:
    """Return what the plan is made of when one node is lost and all others are frozen."""
    first = plan.first_assignment(spec_of(nodes), views_of(nodes, frozen=False), 1, 0)
    views = views_of(nodes, frozen=True)
    views[nodes // 2 + 1].lost = "its agent is gone"
    faults = [Fault("g1.t1.1", finding) for finding in GenerationProgress.of(first, views).findings[:1]]
    return plan.Situation(spec_of(nodes), views, first, faults, STEP, 1, 0), views


def leader_of(nodes: int) -> Controller:
    """The leader while generation 1 trains."""
    spec = spec_of(nodes)
    first = plan.first_assignment(spec, views_of(nodes, frozen=False), 1, 0)
    known = Decree(index=1, voters=first_decree(tuple(range(nodes))).voters, assignment=first)
    control = Controller(
        me=0, session="x", nodes=NodeViews(tuple(range(nodes))),
        durable=Durable(promised=Ballot(number=1, node=0), vote=None, known=known),
    )  # fmt: skip
    control.job.spec, control.job.leader = spec, 0
    control.job.agreement.elected = control.job.agreement.prepared = True
    control.job.agreement.ballot = control.job.reign = control._election._leads_by = Ballot(number=1, node=0)
    control.handle_all([e.PeerUp(v, standing()) for v in known.voters if v], 1e6)
    control.job.stage = "running"
    hellos = [e.Report(n, m.Introduction(info=info_of(n), pid=4711)) for n in range(nodes)]
    control.handle_all(hellos, 1e6)
    return control


def standing() -> e.Standing:
    """Of a daemon that follows node 0."""
    return e.Standing(1, 0, "running", index=1)


def took(work: Callable[[], T], tries: int = 3) -> tuple[float, T]:
    """Seconds of CPU that it takes at best, and what it gives."""
    best, found = float("inf"), None
    for _ in range(tries):
        found = None  # what the last try made goes on nobody's time
        begun = time.process_time()
        found = work()
        best = min(best, time.process_time() - begun)
    assert found is not None
    return best, found


def training(control: Controller, nodes: int) -> tuple[float, float]:
    """What the leader takes for a report, where each agent has sent one, and for the tick after them."""
    told, ticked = [], []
    for step in (2, 3, 4):
        reports = [e.Report(node, state_of(node, nodes, step)) for node in range(nodes)]
        told.append(took(lambda: control.handle_all(reports, 1e6 + step), 1)[0] / nodes)  # noqa: B023
        control._following._reminded = 1e6 + step  # what it says to others is not its own work
        ticked.append(took(lambda: control.handle(e.Tick(), 1e6 + step), 1)[0])  # noqa: B023
    return min(told), min(ticked)


def measure(nodes: int) -> Parts:
    """All of one size."""
    encode = msgspec.msgpack.encode
    now, views = after_a_loss(nodes)
    tally_s, _ = took(lambda: GenerationProgress.of(now.current, views))
    plan_s, following = took(lambda: plan.next_assignment(now))
    decree = Decree(index=2, voters=(0,), assignment=following)
    base = Decree(index=1, voters=(0,), assignment=now.current)
    vote = Vote(ballot=Ballot(number=1, node=0), decree=decree)
    row = Durable(promised=vote.ballot, vote=vote, known=base)
    remakes_s, _ = took(lambda: remakes(Holders(following, COPIES), nodes // 2))
    report_s, tick_s = training(leader_of(nodes), nodes)
    pack_s, body = took(lambda: pack(decree, base))
    assert body is not None
    unpack_s, _ = took(lambda: unpack(body, base, digest_of(decree), range(nodes)))
    packed = p.Packed(job="scale", base=1, digest=digest_of(decree), body=body)
    return Parts(
        nodes=nodes,
        slots=SLOTS,
        remakes_s=remakes_s,
        tick_s=tick_s,
        report_s=report_s,
        tally_s=tally_s,
        plan_s=plan_s,
        pack_s=pack_s,
        unpack_s=unpack_s,
        decree_nbytes=len(encode(packed)),
        row_nbytes=len(msgspec.json.encode(row)),
        frozen_nbytes=len(encode(e.Report(0, state_of(0, nodes, STEP, frozen=True)))),
        training_nbytes=len(encode(e.Report(0, state_of(0, nodes, STEP)))),
    )


def main() -> None:
    """Entry point."""
    gc.set_threshold(*GC_THRESHOLD)
    found: list[Parts] = []
    for size in [int(word) for word in sys.argv[1:] if word.isdigit()]:
        found.append(measure(size))
        print(json.dumps(asdict(found[-1])), flush=True)
    if "--json" in sys.argv:
        path = Path(sys.argv[sys.argv.index("--json") + 1])
        path.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
