"""`ckptless-run`: torchrun's command line, in a Slurm job, or with `--local` on one machine."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from ckptless import __version__
from ckptless.daemon.agent.signals import ignore_others
from ckptless.daemon.api import log
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.launch.bounds import MAX_COPIES, MAX_SPARES, MAX_STALL_S, MIN_STALL_S, check_torch
from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.options import local_options, slurm_run
from ckptless.daemon.launch.preload import names_ckptless
from ckptless.daemon.launch.slurm import SlurmRun
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.launch.tier import recovers
from ckptless.daemon.launch.torchrun import NOT_NEEDED, NOT_OF_THE_ENVIRONMENT, REFUSED, check
from ckptless.daemon.launch.untested import try_untested

EPILOG = """\b
Examples:
  sbatch --ckptless=spares=1 --nodes=5 --wrap "ckptless-run train.py --lr 1e-3"
  ckptless-run --local --nodes 4 --spares 1 train.py --lr 1e-3
  ckptless-run --local --nodes 2 --nproc-per-node 2 -m my.training --config c.yaml

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


def _torchruns(function: Callable[..., None]) -> Callable[..., None]:
    """Give the command torchrun's options that do nothing here, or cannot be had, so that it can say so."""
    for name in (*NOT_NEEDED, *REFUSED):
        envvar = None if name in NOT_OF_THE_ENVIRONMENT else f"PET_{name.upper()}"
        option = f"--{name.replace('_', '-')}"
        function = click.option(option, is_flag=name in _FLAGS, envvar=envvar, hidden=True)(function)
    return function


_FLAGS = frozenset(("standalone", "run_path", "no_python", "virtual_local_rank"))


@click.command(
    cls=_TorchrunNames,
    epilog=EPILOG,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110, "show_default": True},
)
@click.option("--local", is_flag=True, help="Make the nodes on this machine; needs no root and no Slurm.")
@click.option(
    "--nodes",
    "--nnodes",
    metavar="N",
    envvar="PET_NNODES",
    help="Nodes that train.  [default: 1; in a Slurm job, all that are no spares]",
)
@click.option(
    "--spares",
    type=click.IntRange(0, MAX_SPARES),
    help="More nodes that wait, warm, to replace one.  [default: 0, or what sbatch --ckptless said]",
)
@click.option(
    "--nproc-per-node",
    metavar="N",
    envvar="PET_NPROC_PER_NODE",
    help="Ranks on each node; or gpu, cpu, xpu, auto: as many as this node has.  "
    "[default: 1; in a Slurm job, its tasks or GPUs per node]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    envvar="PET_MAX_RESTARTS",
    help="For scripts without ckptless.run: as torchrun.",
)
@click.option(
    "--tier",
    type=click.Choice(["1", "4"]),
    help="1: process groups start without a root or a central store, and nothing else; a rank that fails "
    "ends the job.  [default: 4, all that the script uses; CKPTLESS_ROOTLESS=1 in the environment is 1]",
)
@click.option(
    "--max-stall",
    type=click.FloatRange(MIN_STALL_S, MAX_STALL_S),
    help="Seconds without a step that are too many; every deadline follows from it.  [default: 300]",
)
@click.option(
    "-m",
    "--module",
    is_flag=True,
    envvar="PET_MODULE",
    help="The script is a module's name, as in python -m.",
)
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="Import this before the ranks are forked (torch always is).",
)
@click.option(
    "-t",
    "--tee",
    envvar="PET_TEE",
    help="Ranks whose output is shown here too: all or none, ranks as in 0,3, or as torchrun 3 for all and "
    "0:3,1:3 for local ranks.  [default: rank 0]",
)
@click.option(
    "-r",
    "--redirects",
    envvar="PET_REDIRECTS",
    help="As torchrun: with 3 no output is shown here, with 0:3 none of local rank 0.  Every rank has a log.",
)
@click.option(
    "--local-ranks-filter",
    envvar="PET_LOCAL_RANKS_FILTER",
    metavar="0,1",
    help="As torchrun: show only the output of these local ranks.",
)
@click.option(
    "--replicas",
    "copies",
    type=click.IntRange(1, MAX_COPIES),
    help="Nodes that hold a copy of each rank's part of the state.  "
    "[default: 2, or what sbatch --ckptless said]",
)
@click.option(
    "--replication-bandwidth",
    metavar="RATE",
    help="As 500MB/s: what each node sends to others of the state at most, or none for no limit.  "
    "[default: what sbatch --ckptless or the site says]",
)
@click.option(
    "--replication-interface",
    metavar="NAME",
    help="As ib0 or 10.1.0.0/16: the interface or network that the state is sent over.  "
    "[default: what sbatch --ckptless or the site says, else that of the nodes' names]",
)
@click.option(
    "--comm-interface",
    metavar="NAME",
    help="As ib0 or 10.1.0.0/16: the interface or network that the ranks talk over.  [default: what the site "
    "says, else torch's and NCCL's own choice; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME count more]",
)
@click.option(
    "--data-budget",
    metavar="SIZE",
    help="As 512MiB: what batches that are made ahead take on a node at most, of each loader.  "
    "[default: what the site says, else as the script says]",
)
@click.option(
    "--data-prefetch",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Batches that are made ahead of each replica at most.  [default: what the site says, else as the "
    "script says]",
)
@click.option(
    "--twins",
    type=click.Choice(["off", "warn", "act"]),
    default="act",
    show_default=True,
    help="Compare, at every commit, what ranks with the same tensors have; where they differ, say so, or go "
    "back to where they agreed.",
)
@click.option(
    "--domains",
    metavar="A,A,B",
    help="With --local: the failure domain of each node, the spares' last.  [default: none are known]",
)
@click.option(
    "--requeue",
    type=click.IntRange(min=0),
    help="In a Slurm job: so often it goes back into the queue where it cannot go on.  [default: 0]",
)
@click.option(
    "--save-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Save steps below this folder, which all nodes see, in the format of torch.distributed.checkpoint; "
    "and go on from the newest one there.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    metavar="STEPS",
    help="Steps between two saves; 0: only at the end, and by ckptctl save.  [default: 0]",
)
@click.option(
    "--save-total-limit", type=click.IntRange(min=1), metavar="N", help="Saved steps to keep.  [default: 3]"
)
@click.option(
    "--start-timeout",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="How long a daemon that starts may do nothing, and how long an agent waits for its node's.  "
    "[default: 30]",
)
@click.option(
    "--shutdown-timeout",
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="What ranks that handle SIGTERM get to end by themselves, before SIGKILL.  "
    "[default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30]",
)
@click.option("--job", default=None, help="The job's name in the ledger.  [default: made up]")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Where ledger and logs go.  [default: under ~/.local/state/ckptless]",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    envvar="PET_LOG_DIR",
    help="In a Slurm job: where a folder ckptless-JOBID for output is made, seen by all nodes.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="TCP port of the daemons; 0: any free one."
)
@_torchruns
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, script_args: tuple[str, ...], **options: object) -> None:
    """Run SCRIPT with its arguments on every rank, and keep it going when a process or a node dies.

    The command line is torchrun's, and a script for torchrun runs unchanged. With ckptless.run in it, the
    processes that are well stay alive through a fault and go on at the same step.
    """
    log.configure("ckptless-run", verbose=bool(options["verbose"]))
    try:
        check_torch()
        if recovers(options, os.environ) and names_ckptless(
            script, Path.cwd(), module=bool(options["module"])
        ):
            try_untested()
        for name in check(options):
            click.echo(f"ckptless-run: {name} is not needed and has no effect", err=True)
        run: LocalRun | SlurmRun | StepRun
        if options["local"]:
            run = LocalRun(local_options(script, script_args, options, os.environ))
        else:
            run = slurm_run(script, script_args, options, os.environ)
        sys.exit(run.run() if isinstance(run, StepRun) else asyncio.run(run.run()))
    except CkptlessError as error:
        click.echo(f"ckptless-run: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    ignore_others()
    command(prog_name="ckptless-run")


if __name__ == "__main__":
    main()
