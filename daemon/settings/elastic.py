"""The sizes of an elastic job: on how many nodes it may train, by its options; and whether it may at all.

The same of a job that may draw nodes in.
"""

import re
from collections.abc import Mapping

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_SIZES
from ckptless.daemon.settings.options import ElasticSettings, RunOptions

# How long a job could have been larger before it grows.
DEFAULT_GROW_S = 30.0
# How long a job that lacks a node waits for one that is drawn in.
DEFAULT_DRAW_S = 60.0

# The plugin has all of these sentences from table.h, and fills in the same in the same order.
BOTH_WAYS = (
    "sizes says the same as min-nodes, max-nodes and step together (--nnodes MIN:MAX is min-nodes); "
    "say it in one of these ways"
)
UPSIDE_DOWN = "min-nodes={least} is more than max-nodes={most}; make the one smaller, or the other larger"
NOT_A_SIZE = (
    "the job trains on {nodes} node{n}, spares apart, which is none of sizes={sizes}; add it to them, or "
    "ask for another number of nodes"
)
OUTSIDE = (
    "{word}={bound} is {than} than the {nodes} node{n} that the job trains on, spares apart; change it, or "
    "the number of nodes"
)
NOT_WHOLE = (
    "from the {nodes} node{n} that the job trains on, steps of {step} do not lead to {word}={bound}: its "
    "sizes would not divide into replicas; change one of the three"
)
NO_ROOM = (
    "the job is to grow to {most} nodes, and has {nodes} to train on, {spares} spare{s}, and {late} to draw "
    "in; ask for them as spares, allow it to draw nodes in (draw-in=N), or let it grow to fewer"
)
TOO_MANY = "from min-nodes={least} to max-nodes={most} are more than {limit} sizes; choose a larger step"
NOT_HERE = (
    "this site has no elastic jobs; leave out min-nodes, max-nodes, step and sizes, and give --nnodes one "
    "number"
)
NOT_IN = (
    "partition {partition} has no elastic jobs, as have {allowed}; choose among these, or leave out "
    "min-nodes, max-nodes, step and sizes"
)
NO_DRAW_IN_STEP = (
    "draw-in is for a batch script: a task of srun has nobody who could ask Slurm for nodes; start "
    "ckptless-run without srun, or say draw-in=0"
)
NO_DRAW_IN_ARRAY = (
    "Slurm adds no node to a task of a job array; leave out draw-in, or submit the task as a job of its own"
)

_ALONE = "{word} is for an elastic job: say min-nodes or sizes too, or leave it out"
_PATIENCE_ALONE = "draw-in-patience is for a job that may draw nodes in: say draw-in too, or leave it out"
_NOT_WITH = (
    "jobs of QOS {qos} are not elastic here, as are those of {allowed}; choose among these, or leave out "
    "min-nodes, max-nodes, step and sizes"
)
_NOT_GROWN = "Slurm adds no node to a job here, as {what}; leave out draw-in, or ask the site to change that"
_NOT_DRAWN = "no job of this site may draw nodes in; leave out draw-in, in sbatch --ckptless too"


def sizes(asked: RunOptions, nodes: int, spares: int, *, again: bool = False) -> tuple[int, ...]:
    """`JobSpec.sizes` of a job that begins on `nodes` nodes and has `spares` more; () if it is not elastic.

    The largest may be one with all nodes that it may draw in. A job that Slurm starts `again` may have got
    fewer nodes than before, and be as large no more. Raises UsageError with one sentence that says what to
    change.
    """
    if asked.sizes and (asked.min_nodes or asked.max_nodes or asked.step):
        raise UsageError(BOTH_WAYS)
    if asked.sizes:
        found = asked.sizes
        if nodes not in found:
            written = ":".join(map(str, found))
            raise UsageError(NOT_A_SIZE.format(nodes=nodes, n=_s(nodes), sizes=written))
    elif asked.min_nodes or asked.max_nodes:
        found = _from_range(asked, nodes)
    else:
        alone = {
            "step": asked.step,
            "scale-up-after": asked.scale_up_after_s,
            "scale-timeout": asked.scale_timeout_s,
            "graceful": asked.graceful_s,
        }
        for word, said in alone.items():
            if said is not None:
                raise UsageError(_ALONE.format(word=word))
        return ()
    late = asked.draw_in or 0
    if not again and found[-1] > nodes + spares + late:
        room = {"nodes": nodes, "spares": spares, "s": _s(spares), "late": late}
        raise UsageError(NO_ROOM.format(most=found[-1], **room))
    return found


def patience_s(asked: RunOptions) -> float:
    """`JobSpec.draw_s` of a job that may draw nodes in; 0 of another one. Raises UsageError."""
    if asked.draw_in is None and asked.draw_in_patience_s is not None:
        raise UsageError(_PATIENCE_ALONE)
    if not asked.draw_in:
        return 0.0
    return DEFAULT_DRAW_S if asked.draw_in_patience_s is None else asked.draw_in_patience_s


def check_allowed(site: ElasticSettings, partition: str, qos: str) -> None:
    """Raise UsageError where an elastic job in `partition` with `qos` ("": not known) is not to be."""
    if not site.allow:
        raise UsageError(NOT_HERE)
    if partition and site.partitions and partition not in site.partitions:
        raise UsageError(NOT_IN.format(partition=partition, allowed=",".join(site.partitions)))
    if qos and site.qos and qos not in site.qos:
        raise UsageError(_NOT_WITH.format(qos=qos, allowed=",".join(site.qos)))


def check_may_draw(site: ElasticSettings, *, in_step: bool, in_array: bool) -> None:
    """Raise UsageError where no node can be added to the job, or none is to be."""
    if not site.draw_in:
        raise UsageError(_NOT_DRAWN)
    if in_step:
        raise UsageError(NO_DRAW_IN_STEP)
    if in_array:
        raise UsageError(NO_DRAW_IN_ARRAY)


def check_grows(slurm: Mapping[str, str]) -> None:
    """Raise UsageError where Slurm, by its settings as scontrol shows them, adds no node to a running job."""
    if not slurm:
        return  # it does not answer now, and says itself what it refuses
    if "permit_job_expansion" not in slurm.get("SchedulerParameters", ""):
        raise UsageError(_NOT_GROWN.format(what="permit_job_expansion is not among SchedulerParameters"))
    version = tuple(map(int, re.findall(r"\d+", slurm.get("SLURM_VERSION", ""))[:2]))
    if version >= (24, 11) and "Alloc" in slurm.get("PrologFlags", ""):
        raise UsageError(
            _NOT_GROWN.format(what="PrologFlags has Alloc, with which steps on added nodes fail")
        )


def _from_range(asked: RunOptions, nodes: int) -> tuple[int, ...]:
    """Every size from min-nodes to max-nodes. Raises UsageError where `nodes` is none of them."""
    least, most, step = asked.min_nodes or nodes, asked.max_nodes or nodes, asked.step or 1
    if asked.min_nodes and asked.max_nodes and least > most:
        raise UsageError(UPSIDE_DOWN.format(least=least, most=most))
    n = _s(nodes)
    for word, bound, than in (("min-nodes", least, "more"), ("max-nodes", most, "less")):
        if bound > nodes if than == "more" else bound < nodes:
            raise UsageError(OUTSIDE.format(word=word, bound=bound, than=than, nodes=nodes, n=n))
        if (bound - nodes) % step:
            raise UsageError(NOT_WHOLE.format(nodes=nodes, n=n, step=step, word=word, bound=bound))
    if (most - least) // step >= MOST_SIZES:
        raise UsageError(TOO_MANY.format(least=least, most=most, limit=MOST_SIZES))
    return tuple(range(least, most + 1, step))


def _s(count: int) -> str:
    return "" if count == 1 else "s"
