"""`ckptctl save`: have the state of a job that runs saved now."""

import click

from ckptless.daemon.api.errors import CkptlessError, UsageError
from ckptless.daemon.api.messages import PROTOCOL
from ckptless.daemon.api.saving import MAX_DEADLINE_S, MAX_NAME, Save, Saved
from ckptless.daemon.ckptctl import render
from ckptless.daemon.ckptctl.ask import ask_any, sockets
from ckptless.daemon.ckptctl.options import Asked, common
from ckptless.daemon.ckptctl.view import NoSuchJobError

# The daemon answers by the deadline; the way there and back comes on top.
_GRACE_S = 10.0


class _FailedError(CkptlessError):
    """The daemon has said why."""


@click.command()
@click.argument("run", metavar="JOB")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=1, max=MAX_DEADLINE_S),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take.",
)
@click.option(
    "--socket",
    "given_socket",
    metavar="PATH",
    help="The daemon's socket. Default: those of the local run, then daemon.socket of the settings.",
)
@common
def save(asked: Asked, run: str, deadline_s: float, given_socket: str | None) -> None:
    """Save the state of JOB now, to the directory that it was started with, and wait until it is there.

    JOB is a run, or the number of a Slurm job that has one. It must have been started with --save-dir, and
    goes on training meanwhile. Which step it is, and where it lies, is printed. It is asked of the daemon of
    this node, which must be one of the job's; the job's owner may do it, and root.

    \b
    Example:
        ckptctl save 4711 --deadline 60
    """
    if asked.job not in (None, run):
        raise UsageError(f"--job {asked.job} and the job {run} are two: give one")
    if not (0 < len(run) <= MAX_NAME and run.isprintable()):
        raise UsageError("JOB is a name: give it")
    question = Save(protocol=PROTOCOL, job=run, deadline_s=deadline_s)
    answer, by = ask_any(sockets(asked, given_socket), question, Saved, deadline_s + _GRACE_S)
    if asked.as_json:
        render.show_json(job=run, socket=by, saved=answer)
    elif answer.verdict == "saved":
        click.echo(render.harmless(answer.text))
    if answer.verdict == "unknown":
        raise NoSuchJobError(render.harmless(answer.text))
    if answer.verdict != "saved":
        raise _FailedError(render.harmless(answer.text))
