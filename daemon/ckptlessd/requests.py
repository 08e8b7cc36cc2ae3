"""Requests about a job from outside: of an operator, the job's owner, a health check.

`uid` is the asker's, by the kernel's word. Each request is done, or one sentence says why not.
"""

import os
import re
import time
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Literal

from ckptless.daemon.ckptlessd.job_host import JobHost
from ckptless.daemon.ckptlessd.recovery import eviction
from ckptless.daemon.ckptlessd.recovery.events import Leave, NodeLost
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol.limits import MOST_RANKS
from ckptless.daemon.protocol.messages import PROTOCOL, Drill, Wish
from ckptless.daemon.protocol.model import DRILLS_OF_NODES, DRILLS_WITH_LENGTH
from ckptless.daemon.protocol.records import GIVEN_BACK
from ckptless.daemon.protocol.requests import Drilled, DrillJob, Evict, Evicted, Resized, ResizeJob
from ckptless.daemon.protocol.saving import Save, Saved

# Of the sizes of a job, in a sentence.
MOST_SHOWN = 12


def evict(jobs: Iterable[JobHost], asked: Evict, uid: int) -> Evicted:
    """Take a node out of a job."""
    if not asked.reason.isprintable():
        return Evicted(verdict="refused", text="the reason holds what cannot be printed: leave it out")
    run = _asked_for(jobs, asked, uid)
    if isinstance(run, tuple):
        return Evicted(verdict=run[0], text=run[1])
    if not eviction.may_say(asked.source, uid, run.uid, os.getuid()):
        text = f"uid {uid} may not give a verdict on a node's health, only root may"
        return Evicted(verdict="refused", text=text)
    return _evict(run, asked, uid)


def _evict(run: JobHost, asked: Evict, uid: int) -> Evicted:
    control = run.session.control
    names = [run.name_of(number) for number in run.roster.nodes]
    node = eviction.find_node(asked.node, names)
    if node is None:
        return Evicted(verdict="refused", text=f"job {run.job} has no node {asked.node!r}")
    before = control.nodes[node].lost
    if before is not None and control.outcome is None:
        text = f"{names[node]} is out already: {before}"
        if asked.give_back and not before.startswith(GIVEN_BACK):
            text += "; it stays the job's in Slurm until that ends"
            return Evicted(verdict="refused", node=node, text=text)
        return Evicted(verdict="already", node=node, text=text)
    why = eviction.cannot_say(control) if control.outcome is None else None
    if why is not None:
        return Evicted(verdict="elsewhere", node=node, text=why)
    why = eviction.refusal(control, node, force=asked.force)
    if why is not None:
        return Evicted(verdict="refused", node=node, text=f"{names[node]} stays in job {run.job}: {why}")
    if asked.give_back and node == 0:
        text = f"{names[node]} stays in job {run.job}: its batch script runs there, which Slurm would end"
        return Evicted(verdict="refused", node=node, text=text)
    reason = f": {asked.reason}" if asked.reason else ""
    by = f"uid {uid}" if asked.source == "operator" else f"a health check (uid {uid})"
    what = f"{GIVEN_BACK} by" if asked.give_back else "taken out by"
    if asked.planned and _can_move(control):
        if node in control.asked:
            text = f"{names[node]} is about to leave: {control.asked[node].reason}"
            return Evicted(verdict="already", node=node, text=text)
        run.session.leave(node, Leave(f"{what} {by}{reason}", asked.source, shrink=True))
        return Evicted(
            verdict="accepted",
            node=node,
            text=f"{names[node]} leaves job {run.job} once its ranks have moved",
        )
    run.session.lose(NodeLost(node, f"{what} {by}{reason}", 0.0, source=asked.source))
    return Evicted(verdict="accepted", node=node, text=f"{names[node]} is taken out of job {run.job}")


def _can_move(control: JobState) -> bool:
    """Whether ranks go on elsewhere with their state: those of a script with hooks; all nodes' are alike."""
    state = control.nodes[control.me].state
    return state is not None and any(slot.hooked for slot in state.slots)


def drill(jobs: Iterable[JobHost], asked: DrillJob, uid: int) -> Drilled:
    """Have a fault happen to a job on purpose."""
    run = _asked_for(jobs, asked, uid)
    if isinstance(run, tuple):
        return Drilled(verdict=run[0], text=run[1])
    control = run.session.control
    why = eviction.cannot_say(control) if control.outcome is None else None
    if why is not None:
        return Drilled(verdict="elsewhere", text=why)
    wanted = _read_drill(run, asked, uid)
    if isinstance(wanted, str):
        return Drilled(verdict="refused", text=wanted)
    why = eviction.drill_refusal(control, wanted) or control.drills.busy(control.generation, run.now())
    if why is not None:
        return Drilled(verdict="refused", text=f"no drill of job {run.job}: {why}")
    run.session.drill(wanted, asked.deadline_s)
    when = (
        f"once step {wanted.step} is done, if that is within {asked.deadline_s:g} s" if wanted.step else "now"
    )
    return Drilled(verdict="accepted", text=f"a drill of job {run.job}: {wanted.what}, {when}")


def _read_drill(run: JobHost, asked: DrillJob, uid: int) -> Drill | str:
    """The drill that is meant, or why there is none."""
    rank = node = None
    if asked.kind in DRILLS_OF_NODES:
        node = eviction.find_node(asked.target, [run.name_of(number) for number in run.roster.nodes])
        if node is None:
            return f"job {run.job} has no node {asked.target!r}"
        if asked.kind == "cut-node" and (why := _cut_refusal(run, node, uid)) is not None:
            return why
    elif re.fullmatch("[0-9]{1,9}", asked.target) and int(asked.target) < MOST_RANKS:
        rank = int(asked.target)
    else:
        return f"job {run.job} has no rank {asked.target!r}"
    if (asked.for_s > 0) is not (asked.kind in DRILLS_WITH_LENGTH):
        return "a pause and a cut have a length, and nothing else has"
    return Drill(
        kind=asked.kind,
        rank=rank,
        node=node,
        step=asked.step,
        for_s=asked.for_s,
        force=asked.force,
        uid=uid,
    )


def _cut_refusal(run: JobHost, node: int, uid: int) -> str | None:
    """Return why this node is not cut off from the network, or None."""
    if uid != 0:
        return "only root may cut a node off from the network: whatever else is on it is cut off, too"
    where = run.session.agent_address(node)
    if where is not None and ip_address(where[0]).is_loopback:
        return "the job's nodes are all on this machine, with no network between them that could be cut"
    return None


def resize(jobs: Iterable[JobHost], asked: ResizeJob, uid: int) -> Resized:
    """Have an elastic job train on another number of nodes."""
    run = _asked_for(jobs, asked, uid)
    if isinstance(run, tuple):
        return Resized(verdict=run[0], text=run[1])
    control = run.session.control
    why = eviction.cannot_say(control) if control.outcome is None else None
    if why is not None:
        return Resized(verdict="elsewhere", text=why)
    why = _resize_refusal(control, asked.nodes)
    if why is not None:
        return Resized(verdict="refused", text=f"job {run.job} stays as large as it is: {why}")
    assert control.assignment is not None
    already = control.assignment.wanted.nodes == asked.nodes
    # Said in either case: another wish may be on its way, and the newest counts.
    run.session.resize(Wish(nodes=asked.nodes, at_s=time.time(), give_back=asked.give_back))
    s = "" if asked.nodes == 1 else "s"
    many = "as many nodes as there are" if asked.nodes is None else f"{asked.nodes} node{s}"
    words = "is wanted to train on {} already" if already else "is to train on {} from now on"
    return Resized(verdict="already" if already else "accepted", text=f"job {run.job} {words.format(many)}")


def _resize_refusal(job: JobState, nodes: int | None) -> str | None:
    """Return why the job cannot train on so many nodes, or None."""
    spec = job.spec
    if job.outcome is not None:
        return f"the job is over: {job.outcome.reason}"
    if job.assignment is None or spec is None:
        return "the job has not begun yet"
    if job.stage == "releasing":
        return "training is over, and the job about to end"
    if not spec.elastic:
        return "it is not elastic: start it with --min-nodes, --max-nodes or --sizes of ckptless-run"
    if nodes is None or nodes in spec.sizes:
        return None
    known = [str(size) for size in spec.sizes]
    if len(known) > MOST_SHOWN:
        known = [*known[: MOST_SHOWN // 2], "...", *known[-MOST_SHOWN // 2 :]]
    return f"{nodes} is none of the numbers of nodes that it may have, which are {', '.join(known)}"


async def save(jobs: Iterable[JobHost], asked: Save, uid: int) -> Saved:
    """Have a job's state saved to its directory."""
    run = _asked_for(jobs, asked, uid)
    if isinstance(run, tuple):
        return Saved(verdict=run[0], text=run[1])
    if (outcome := run.session.control.outcome) is not None:
        return Saved(verdict="refused", text=f"job {run.job} is over: {outcome.reason}")
    return await run.save_state(asked.deadline_s)


def _asked_for(
    jobs: Iterable[JobHost], asked: Evict | DrillJob | ResizeJob | Save, uid: int
) -> JobHost | tuple[Literal["refused", "unknown"], str]:
    """The run that a request is for, or why it is not done."""
    if asked.protocol != PROTOCOL:
        return "refused", f"ckptctl speaks protocol {asked.protocol}, the daemon {PROTOCOL}"
    run = _find_run(jobs, asked.job)
    if run is None or not eviction.may_say("operator", uid, run.uid, os.getuid()):
        # Of other users' jobs nobody learns so much as that they are here.
        return "unknown", f"no job {asked.job!r} that uid {uid} may touch runs here"
    return run


def _find_run(jobs: Iterable[JobHost], name: str) -> JobHost | None:
    """The run of this name, if it goes on; else the only one that does of the Slurm job of this number."""
    known = {job.job: job for job in jobs}
    going_on = {name: job for name, job in known.items() if job.session.control.outcome is None}
    if name in going_on:
        return going_on[name]
    runs = [job for job in going_on.values() if job.job.partition(".")[0] == name]
    return runs[0] if len(runs) == 1 else known.get(name)
