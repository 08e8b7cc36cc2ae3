"""`ckptctl drill`: have a fault happen to a job that runs, on purpose."""

import re
from typing import Any

import click

from ckptless.daemon.ckptctl.shared.ask import ask_any, sockets, tell
from ckptless.daemon.ckptctl.shared.options import Asked, confirm, for_job
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_RANKS
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.model import DRILLS_WITH_LENGTH, DrillKind
from ckptless.daemon.protocol.requests import MAX_NAME, MAX_PAUSE_S, MAX_WAIT_S, Drilled, DrillJob

# The options that say what is to happen, and to whom.
KINDS: dict[str, DrillKind] = {
    "kill_rank": "kill-rank",
    "pause": "pause-rank",
    "kill_agent": "kill-agent",
    "cut": "cut-node",
}
_RANK = click.IntRange(min=0, max=MOST_RANKS - 1)


@click.command()
@for_job
@click.option("--kill-rank", type=_RANK, metavar="RANK", help="Kill the process of this rank (SIGKILL).")
@click.option("--pause", type=_RANK, metavar="RANK", help="Stop the process of this rank, for a while.")
@click.option("--kill-agent", metavar="NODE", help="Kill the agent of this node: the node is lost.")
@click.option("--cut", metavar="NODE", help="Cut this node off from the network, for a while.")
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(min=0.1, max=MAX_PAUSE_S),
    metavar="SECONDS",
    help="How long a rank is paused, or a node cut off.",
)
@click.option("--when", default="", metavar="step=N", help="Once this step is done. Default: now.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=1, max=MAX_WAIT_S),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long that step may take; then nothing is done.",
)
@click.option("--force", is_flag=True, help="Also where the job would end over it.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask at.")
def drill(asked: Asked, when: str, yes: bool, **said: Any) -> None:
    """Have a fault happen to JOB on purpose: a process dies, or hangs, a node is lost, or cut off.

    JOB is a run, or the number of a Slurm job that has one. RANK is a rank's number; NODE is a node's name,
    or its number in the job, from 0. It is answered as any fault, and marked as a drill in all that is
    recorded of it. It counts against no budget; but a node whose agent was killed, or which was cut off for
    too long, is out of the job. Where the job would end over it, that is refused. It is asked of the daemon
    of this node, which must be one of the job's; the job's owner may do it, and root; a cut root alone.

    \b
    Example:
        ckptctl drill 4711 --kill-rank 3 --when step=2000
        ckptctl drill 4711 --pause 0 --for 60
        ckptctl drill 4711 --kill-agent node02
        ckptctl drill 4711 --cut node02 --for 30
    """
    question = _question(asked.named, _step(when), **said)
    kind, target = question.kind, question.target
    where = sockets(asked)
    if not yes:
        confirm(f"Have this happen to job {asked.named}: {kind} {target}?")
    answer, by = ask_any(where, question, Drilled)
    tell(asked, answer, ("accepted",), job=asked.named, kind=kind, target=target, socket=by, drilled=answer)


def _question(
    run: str, step: int, *, for_s: float | None, deadline_s: float, force: bool, **fault: Any
) -> DrillJob:
    """Return the question; `fault` has a target for one of KINDS. Raises UsageError for what nobody does."""
    chosen = [(KINDS[option], str(target)) for option, target in fault.items() if target is not None]
    if len(chosen) != 1:
        raise UsageError("say one of --kill-rank, --pause, --kill-agent and --cut")
    ((kind, target),) = chosen
    if not (0 < len(target) <= MAX_NAME and target.isprintable()):
        raise UsageError("NODE is a name: give it")
    # What is not a number is not greater than any.
    if (for_s is not None and for_s > 0) is not (kind in DRILLS_WITH_LENGTH):
        raise UsageError("--pause and --cut need --for SECONDS, and nothing else takes it")
    return DrillJob(
        protocol=PROTOCOL,
        job=run,
        kind=kind,
        target=target,
        step=step,
        for_s=for_s if for_s is not None else 0.0,
        deadline_s=deadline_s,
        force=force,
    )


def _step(when: str) -> int:
    """The step to wait for; 0 for none. Raises UsageError."""
    found = re.fullmatch(r"step=([0-9]{1,18})", when)
    if when and found is None:
        raise UsageError(f"--when is {when[:40]!r}: it must be step=N, as step=2000")
    return int(found[1]) if found else 0
