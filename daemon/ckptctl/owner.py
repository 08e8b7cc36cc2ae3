"""`ckptctl resize` and `save`: what a job's owner asks of it: other nodes, or its state on the disk now."""

import re

import click

from ckptless.daemon.ckptctl.shared.ask import ask_any, sockets, tell
from ckptless.daemon.ckptctl.shared.options import Asked, for_job
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_NODES
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.requests import Resized, ResizeJob
from ckptless.daemon.protocol.saving import MAX_DEADLINE_S, Save, Saved

# As many as there are.
MOST = "max"
# The daemon answers a save by the deadline; the way there and back comes on top.
_GRACE_S = 10.0


@click.command()
@for_job
@click.option(
    "--nodes",
    required=True,
    metavar=f"N|{MOST}",
    help=f"How many nodes are to train: one of the job's sizes; {MOST}: as many as there are.",
)
@click.option("--give-back", is_flag=True, help="Give the nodes that are left over back to Slurm.")
def resize(asked: Asked, nodes: str, give_back: bool) -> None:
    """Have JOB, which is elastic, train on N nodes from now on, or on as many as there are.

    JOB is a run, or the number of a Slurm job that has one. Its sizes are those that it was started with
    (ckptless-run --min-nodes, --max-nodes, --step or --sizes). It goes on at the same step; nodes that do not
    train wait as spares, and stay the job's in Slurm unless --give-back is said: then Slurm has those again
    that are more than the job's spares. It is asked of the daemon of this node, which must be
    one of the job's; the job's owner may do it, and root.

    \b
    Example:
        ckptctl resize 4711 --nodes 4 --give-back
        ckptctl resize 4711 --nodes max
    """
    wanted = _read(nodes)
    if give_back and wanted is None:
        raise UsageError(f"--give-back is for fewer nodes: say how many, in place of {MOST}")
    question = ResizeJob(protocol=PROTOCOL, job=asked.named, nodes=wanted, give_back=give_back)
    answer, by = ask_any(sockets(asked), question, Resized)
    tell(asked, answer, ("accepted", "already"), job=asked.named, nodes=wanted, socket=by, resized=answer)


def _read(text: str) -> int | None:
    """The number of nodes; None for as many as there are. Raises UsageError."""
    if text == MOST:
        return None
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) <= MOST_NODES:
        raise UsageError(f"--nodes is {text[:40]!r}: it must be a number from 1 to {MOST_NODES}, or {MOST}")
    return int(text)


@click.command()
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=1, max=MAX_DEADLINE_S),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take.",
)
@for_job
def save(asked: Asked, deadline_s: float) -> None:
    """Save the state of JOB now, to the directory that it was started with, and wait until it is there.

    JOB is a run, or the number of a Slurm job that has one. It must have been started with --save-dir, and
    goes on training meanwhile. Which step it is, and where it lies, is printed. It is asked of the daemon of
    this node, which must be one of the job's; the job's owner may do it, and root.

    \b
    Example:
        ckptctl save 4711 --deadline 60
    """
    run = asked.named
    question = Save(protocol=PROTOCOL, job=run, deadline_s=deadline_s)
    answer, by = ask_any(sockets(asked), question, Saved, deadline_s + _GRACE_S)
    tell(asked, answer, ("saved",), job=run, socket=by, saved=answer)
