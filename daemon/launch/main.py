"""`ckptless-run`: torchrun's command line, in a Slurm job, on hosts without Slurm, or on one machine."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from ckptless import __version__
from ckptless.daemon.agent.ranks.signals import ignore_others
from ckptless.daemon.launch.options import meets, recovers, run_of
from ckptless.daemon.launch.preload import check_torch, names_ckptless, try_untested
from ckptless.daemon.launch.rehearsal import rehearse
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.launch.torchrun import NOT_NEEDED, NOT_OF_THE_ENVIRONMENT, REFUSED, check
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.settings.options import RUN_ROWS

logger = logging.getLogger(__name__)

EPILOG = """\b
Examples:
  sbatch --ckptless=spares=1 --nodes=5 --wrap "ckptless-run train.py --lr 1e-3"
  ckptless-run --local --nodes 4 --spares 1 train.py --lr 1e-3
  ckptless-run --local --nodes 2 --nproc-per-node 2 -m my.training --config c.yaml
  ckptless-run --hosts hostfile --spares 1 train.py --lr 1e-3

\b
Exit codes:
  0  every rank's training ended            3  a daemon or agent could not start
  1  the script failed (or its own code)    4  a fault could not be answered; the reason is printed
  2  wrong options                          128+n  ended by signal n (130: Ctrl-C)
"""


class _TorchrunNames(click.Command):
    """torchrun takes every option with dashes or underscores."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for p in self.params if isinstance(p, click.Option) for name in p.opts}
        mended: list[str] = []
        for position, arg in enumerate(args):
            name, equals, value = arg.partition("=")
            dashed = name.replace("_", "-") if name.startswith("--") else name
            if name.startswith("-") and dashed in known:
                mended.append(dashed + equals + value)
                continue
            mended.append(arg)
            if not arg.startswith("-") and not _is_value(args, position, self):
                return super().parse_args(ctx, mended + args[position + 1 :])
        return super().parse_args(ctx, mended)


def _is_value(args: list[str], position: int, command: click.Command) -> bool:
    """Whether an argument is the value of the option before it, and so not the script."""
    if position == 0:
        return False
    before = args[position - 1].replace("_", "-")
    options = [p for p in command.params if isinstance(p, click.Option) and not p.is_flag]
    return any(before in option.opts for option in options)


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Give the command the table's options, and those of torchrun's of which it says that they do nothing."""
    for name in (*NOT_NEEDED, *REFUSED):
        envvar = None if name in NOT_OF_THE_ENVIRONMENT else f"PET_{name.upper()}"
        flag = f"--{name.replace('_', '-')}"
        function = click.option(flag, is_flag=name in _FLAGS, envvar=envvar, hidden=True)(function)
    for row in reversed(RUN_ROWS):
        option, unsaid = row.option, row.unsaid
        function = click.option(
            *row.flags,
            row.name,
            type=option.click_type,
            is_flag=option.click_type is click.BOOL,
            default=None,
            multiple=option.multiple,
            metavar=option.metavar,
            envvar=f"PET_{row.flags[-1].lstrip('-').replace('-', '_').upper()}" if option.torchruns else None,
            help=f"{option.help}  [default: {unsaid}]" if unsaid else option.help,
        )(function)
    return function


def given(params: dict[str, object]) -> dict[str, object]:
    """Return the options of the command line that were said."""
    return {
        name: value
        for name, value in params.items()
        if value is not None and value is not False and value != ()
    }


_FLAGS = frozenset(("standalone", "run_path", "no_python", "virtual_local_rank"))


@click.command(
    cls=_TorchrunNames,
    epilog=EPILOG,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
)
@_options
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, script_args: tuple[str, ...], **params: object) -> None:
    """Run SCRIPT with its arguments on every rank, and keep it going when a process or a node dies.

    The command line is torchrun's, and a script for torchrun runs unchanged. With ckptless.run in it, the
    processes that are well stay alive through a fault and go on at the same step.
    """
    said = given(params)
    json = said.get("log_format") == "json"
    log.configure("ckptless-run", verbose="verbose" in said, log_format="json" if json else "text")
    try:
        check_torch()
        if recovers(said, os.environ) and names_ckptless(script, Path.cwd(), module="module" in said):
            try_untested()
        for name in check(said, meets=meets(said, os.environ)):
            click.echo(f"ckptless-run: {name} is not needed and has no effect", err=True)
        if "rehearse" in said:
            sys.exit(rehearse(script, script_args, said, os.environ))
        run = run_of(script, script_args, said, os.environ)
        sys.exit(run.run() if isinstance(run, StepRun) else asyncio.run(run.run()))
    except CkptlessError as error:
        if json:
            logger.error("%s", error)  # noqa: TRY400  # no traceback of what the user is to change
        else:
            click.echo(f"ckptless-run: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    ignore_others()
    command(prog_name="ckptless-run")


if __name__ == "__main__":
    main()
