"""`ckptctl save`: have the state of a job that runs saved now."""

import click

from ckptless.daemon.ckptctl.ask import ask_any, sockets, tell
from ckptless.daemon.ckptctl.options import Asked, for_job
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.saving import MAX_DEADLINE_S, Save, Saved

# The daemon answers by the deadline; the way there and back comes on top.
_GRACE_S = 10.0


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
