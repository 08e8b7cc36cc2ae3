"""`ckptctl`: the command itself; options, exit codes, and errors as one sentence."""

from typing import Any

import click

from ckptless import __version__
from ckptless.daemon.ckptctl.config_command import config
from ckptless.daemon.ckptctl.data import data
from ckptless.daemon.ckptctl.drill import drill
from ckptless.daemon.ckptctl.events import events
from ckptless.daemon.ckptctl.evict import evict, release
from ckptless.daemon.ckptctl.explain import explain
from ckptless.daemon.ckptctl.goodput import goodput
from ckptless.daemon.ckptctl.jobs import jobs
from ckptless.daemon.ckptctl.ledger import ledger
from ckptless.daemon.ckptctl.owner import resize, save
from ckptless.daemon.ckptctl.plan import plan
from ckptless.daemon.ckptctl.replicas import replicas
from ckptless.daemon.ckptctl.shared.options import Asked, common
from ckptless.daemon.ckptctl.status import status
from ckptless.daemon.ckptctl.stragglers import stragglers
from ckptless.daemon.ckptctl.this_node import health, kept
from ckptless.daemon.ckptctl.timeline import timeline
from ckptless.daemon.ckptctl.top import top
from ckptless.daemon.protocol.errors import CkptlessError

_EPILOG = """
\b
Exit codes:
  0  done
  1  failed, or refused; or what is planned does not fit
  2  a mistake in how it was called, or in the settings
  3  the ledger is not there or cannot be read, or no daemon answers
  4  no such job, or it is another user's

Data goes to stdout, words to stderr. JSON is an object with "meta": {"schema": 1}; fields are only ever
added to it.
"""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptlessError as error:
            click.echo(f"ckptctl: error: {error}", err=True)
            ctx.exit(error.exit_code)


# Every command, with examples of how it is called and what that shows or does.
COMMANDS: dict[click.Command, dict[str, str]] = {
    jobs: {"jobs": "all jobs"},
    status: {"status": "the newest job, down to every slot", "status 4711": "another one"},
    top: {"top": "as it goes: nodes with trouble first"},
    replicas: {"replicas": "who holds what of its state"},
    data: {"data": "its batches, and whether ranks wait for them"},
    events: {"events -f": "its story, as it goes"},
    explain: {"explain": "why it waits, what happened to it, and what to do"},
    stragglers: {"stragglers": "which ranks hold up the others"},
    timeline: {"timeline": "where the time of each recovery went"},
    goodput: {"goodput --days 7": "where the time of all GPUs went, in a week"},
    evict: {"evict 4711 node02": "take a node out of a job, for a spare"},
    release: {"release 4711 node02": "give a node of it back to Slurm"},
    resize: {"resize 4711 --nodes 4": "train on fewer of its nodes, or on more"},
    save: {"save 4711": "save its state to its directory now"},
    drill: {"drill 4711 --kill-rank 3": "see what happens when a process dies"},
    health: {"health": "how this node is, and what says so"},
    kept: {"kept": "memory that is kept here for jobs that start again"},
    plan: {"plan --gpus 64 --params 70e9": "memory and traffic of a job"},
    ledger: {"ledger export 4711": "all that is recorded of it, as JSON lines"},
    config: {},
}
_EXAMPLES = "\n".join(
    f"    {'ckptctl ' + call:29} {what}" for calls in COMMANDS.values() for call, what in calls.items()
)


@click.group(
    cls=_Group,
    help=f"""See what ckptless does for your jobs: how they stand, what broke, how long every recovery took.

On a cluster the daemon of this node answers: root about all jobs, everybody else about their own. Of a
local run the ledgers of its nodes are read, which stay when they have ended, or were killed. Only evict,
release, resize, save and drill do something.
JOB is a run or the number of a Slurm job; without it, the newest job. Options may stand before or behind
the command.

\b
Examples:
{_EXAMPLES}
""",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["--help"]},
)
@click.version_option(__version__, "-V", "--version", prog_name="ckptctl", message="%(prog)s %(version)s")
@common
def ckptctl(_asked: Asked) -> None:
    """The command itself; each of its commands has the rest."""


for _command in COMMANDS:
    ckptctl.add_command(_command)


def main() -> None:
    """The console script."""
    ckptctl(prog_name="ckptctl")
