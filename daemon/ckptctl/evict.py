"""`ckptctl evict` and `ckptctl release`: take a node out of a job that runs, and give it back to Slurm."""

from typing import Any

import click

from ckptless.daemon.ckptctl.shared.ask import ask_any, sockets, tell
from ckptless.daemon.ckptctl.shared.options import Asked, confirm, for_job
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.requests import MAX_NAME, MAX_REASON, Evict, Evicted, EvictionSource

_REASON = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for the job's story; 200 characters at most."
)


@click.command()
@for_job
@click.argument("node")
@_REASON
@click.option(
    "--source",
    type=click.Choice(("operator", "health")),
    default="operator",
    show_default=True,
    help="Whose word it is: a person's, or a health check's (root only).",
)
@click.option(
    "--planned", is_flag=True, help="Its ranks move first, with its state; for a node that still works."
)
@click.option("--force", is_flag=True, help="Also where its ranks have no spare to go to: the job then ends.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask at.")
def evict(asked: Asked, node: str, yes: bool, **word: Any) -> None:
    """Take NODE out of JOB, which goes on with a spare in its place.

    JOB is a run, or the number of a Slurm job that has one. NODE is its name, or its number in the job, from
    0. It is asked of the daemon of this node, which must be one of the job's; the job's owner may do it, and
    root. Processes of the job on NODE end. For Slurm nothing changes: drain it there, or other jobs will
    start on it; ckptctl release gives it back. A second call for the same node changes nothing. With
    --planned nothing ends at once: the spares that its ranks go to build for them while all train, then the
    ranks move with the newest step, then NODE is out; where there is no place for them it stays.

    \b
    Example:
        ckptctl evict 4711 node02 --reason "ECC errors"
        ckptctl evict 4711 node02 --planned --reason "new cables at noon"
        ckptctl evict --yes --source health --reason "GPU 3 is gone" 4711 node02
    """
    run = asked.named
    if word["planned"] and word["force"]:
        raise UsageError(
            "--planned waits for a place for its ranks, and --force does without: say one of them"
        )
    question = _question(run, node, give_back=False, **word)
    where = sockets(asked)
    if not yes:
        confirm(f"Take {node} out of job {run}?")
    answer, by = ask_any(where, question, Evicted)
    tell(asked, answer, ("accepted", "already"), job=run, node=node, socket=by, evicted=answer)


@click.command()
@for_job
@click.argument("node")
@_REASON
def release(asked: Asked, node: str, reason: str) -> None:
    """Give NODE of JOB back to Slurm; the job goes on with a spare in its place, or with fewer nodes.

    JOB is a run, or the number of a Slurm job that has one. NODE is its name, or its number in the job, from
    0; never that of the batch script. Its ranks move first, with the newest step (as with evict --planned).
    Where the job cannot go on without it, that is refused. It is asked of
    the daemon of this node, which must be one of the job's; the job's owner may do it, and root. For fewer
    nodes, whichever: ckptctl resize --give-back.

    \b
    Example:
        ckptctl release 4711 node07
    """
    what = {"force": False, "give_back": True, "planned": True}
    question = _question(asked.named, node, reason=reason, source="operator", **what)
    answer, by = ask_any(sockets(asked), question, Evicted)
    tell(asked, answer, ("accepted", "already"), job=asked.named, node=node, socket=by, evicted=answer)


def _question(run: str, node: str, *, reason: str, source: EvictionSource, **more: bool) -> Evict:
    """Return the question. Raises UsageError for what no daemon would take."""
    if len(reason) > MAX_REASON or not reason.isprintable():
        raise UsageError(f"--reason takes at most {MAX_REASON} characters, on one line")
    if not (0 < len(node) <= MAX_NAME and node.isprintable()):
        raise UsageError("NODE is a name: give it")
    return Evict(protocol=PROTOCOL, job=run, node=node, source=source, reason=reason, **more)
