"""A prompt on a cluster with ckptless installed, for people who want to try it: `make slurm-shell`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from .cluster import requirements
from .cluster.plan import ClusterError
from .training import ROOT, make_site

WELCOME = """
{nodes} nodes with Slurm, MUNGE, ckptlessd and the SPANK plugin; you are `tester` on the controller. Try

    cd /shared
    sbatch --ckptless=spares=1 --nodes={nodes} --wrap "ckptless-run {demo} --steps 200"
    squeue; sinfo; tail -f slurm-*.out

and in a second terminal, as root of this machine:

    {cluster} power-off node02
    {cluster} exec node01 ckptctl --state-dir /var/lib/ckptless timeline

The cluster goes when you leave this prompt.
"""


def welcome(nodes: int, command: str) -> str:
    """Return what can be tried on a cluster of so many nodes; `command`: how it is reached from outside."""
    return WELCOME.format(nodes=nodes, demo=ROOT / "docs/demo/train_gpt.py", cluster=command)


@click.command()
# Less would leave nothing to show: one that trains on the batch host, one that is lost, one spare.
@click.option("--nodes", default=5, show_default=True, type=click.IntRange(3, 20))
def main(nodes: int) -> None:
    """Bring it up, give a prompt, take it down."""
    lacks = requirements.missing()
    if lacks:
        raise click.ClickException(f"it takes {', '.join(lacks)}")
    with tempfile.TemporaryDirectory(prefix="ckptless-slurm-") as scratch:
        place = Path(scratch)
        command = f"{sys.executable} -m tests.slurm.cluster --dir {place / 'cluster'}"
        try:
            with make_site(place / "cluster", place / "build", nodes):
                click.echo(welcome(nodes, command))
                subprocess.run([*command.split(), "shell", "--user", "tester", "ctl"], check=False, cwd=ROOT)
        except ClusterError as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
