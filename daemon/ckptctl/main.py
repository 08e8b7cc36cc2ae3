"""`ckptctl`: the command itself; options, exit codes, and errors as one sentence."""

import importlib
from typing import Any

import click

from ckptless import __version__
from ckptless.daemon.ckptctl.shared.options import Asked, common
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


# Every command, with examples of how it is called and what that shows or does.
COMMANDS: dict[str, dict[str, str]] = {
    "jobs": {"jobs": "all jobs"},
    "status": {"status": "the newest job, down to every slot", "status 4711": "another one"},
    "top": {"top": "as it goes: nodes with trouble first"},
    "replicas": {"replicas": "who holds what of its state"},
    "data": {"data": "its batches, and whether ranks wait for them"},
    "events": {"events -f": "its story, as it goes"},
    "explain": {"explain": "why it waits, what happened to it, and what to do"},
    "stragglers": {"stragglers": "which ranks hold up the others"},
    "timeline": {"timeline": "where the time of each recovery went"},
    "goodput": {"goodput --days 7": "where the time of all GPUs went, in a week"},
    "evict": {"evict 4711 node02": "take a node out of a job, for a spare"},
    "release": {"release 4711 node02": "give a node of it back to Slurm"},
    "resize": {"resize 4711 --nodes 4": "train on fewer of its nodes, or on more"},
    "save": {"save 4711": "save its state to its directory now"},
    "drill": {"drill 4711 --kill-rank 3": "see what happens when a process dies"},
    "health": {"health": "how this node is, and what says so"},
    "kept": {"kept": "memory that is kept here for jobs that start again"},
    "plan": {"plan --gpus 64 --params 70e9": "memory and traffic of a job"},
    "ledger": {"ledger export 4711": "all that is recorded of it, as JSON lines"},
    "config": {},
}
# The modules of those that have not a module of their own name.
_MODULES = {
    "release": "evict",
    "resize": "owner",
    "save": "owner",
    "health": "this_node",
    "kept": "this_node",
    "config": "config_command",
}
_EXAMPLES = "\n".join(
    f"    {'ckptctl ' + call:29} {what}" for calls in COMMANDS.values() for call, what in calls.items()
)


class _Group(click.Group):
    """Commands are imported when they are asked for: none waits for what only another one needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ckptless.daemon.ckptctl.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptlessError as error:
            click.echo(f"ckptctl: error: {error}", err=True)
            ctx.exit(error.exit_code)


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


def main() -> None:
    """The console script."""
    ckptctl(prog_name="ckptctl")
