"""The cluster as a command: what `api.Cluster` can do, one subcommand each."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .api import Cluster
from .plan import CONTROLLER, SHARED, ClusterError, Plan, Service, Share

DIRECTORY = Path(__file__).resolve().parents[3] / "out" / "slurm-cluster"
TRY = f"""\
You are {{user}} on {{machine}}, in a cluster of {{nodes}} nodes that share {SHARED} and your home. Try
    sinfo
    srun -N{{nodes}} hostname
and in another terminal, as root,
    {{command}} power-off node02
    {{command}} status
"""


class Words(click.Group):
    """Turns the cluster's own errors into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ClusterError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Words)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=DIRECTORY,
    envvar="SLURM_CLUSTER_DIR",
    show_default="out/slurm-cluster of the checkout",
    help="Where the cluster lives; clusters in different directories know nothing of each other.",
)
@click.pass_context
def main(ctx: click.Context, directory: Path) -> None:
    """Bring up a Slurm cluster in namespaces of this machine, and break it. Needs root."""
    ctx.obj = directory


def _existing(directory: Path) -> Cluster:
    if not (directory / "cluster.json").exists():
        raise ClusterError(f"no cluster in {directory}: bring one up first")
    return Cluster(directory)


def _pairs(what: str, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r}: want {what}")
    return dict(value.split("=", 1) for value in values)


def _share(value: str) -> Share:
    path, _, mode = value.partition(":")
    if mode not in ("", "rw") or not Path(path).exists():
        raise click.BadParameter(f"{value!r}: want an existing PATH or PATH:rw")
    return Share(path=str(Path(path).resolve()), writable=mode == "rw")


@main.command()
@click.option("--nodes", default=5, show_default=True, help="Compute nodes, beside the controller.")
@click.option("--cpus", default=8, show_default=True, help="CPUs that each node declares.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="In slurm.conf; empty: no such line."
)
@click.option("--line", "lines", multiple=True, help="Add a line to slurm.conf.")
@click.option("--node-options", default="", help="Add to the nodes' line, such as Gres=gpu:2.")
@click.option("--share", "shares", multiple=True, metavar="PATH[:rw]", help="Have PATH on all machines.")
@click.option(
    "--file", "texts", multiple=True, metavar="/etc/PATH=FILE", help="A file in /etc of all machines."
)
@click.option(
    "--service", "services", multiple=True, metavar="NAME=COMMAND", help="Runs on every node, as root."
)
@click.option(
    "--ckptless", is_flag=True, help="Have this checkout and its virtual environment on all machines."
)
@click.option("--rootfs", default="", metavar="DIR", help="The root of another system, with its own Slurm.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds until all nodes must be there.")
@click.pass_obj
def up(directory: Path, /, timeout: float, texts: tuple[str, ...], ckptless: bool, **options: Any) -> None:
    """Bring the cluster up, or boot whatever of it is off."""
    files = _pairs("/etc/PATH=FILE", texts)
    commands = _pairs("NAME=COMMAND", options["services"])
    plan = Plan(
        nodes=options["nodes"],
        cpus=options["cpus"],
        conf=_pairs("KEY=VALUE", options["settings"]),
        lines=options["lines"],
        node_options=options["node_options"],
        shares=tuple(map(_share, options["shares"])),
        services=tuple(Service(name=name, argv=tuple(shlex.split(argv))) for name, argv in commands.items()),
        rootfs=str(Path(options["rootfs"]).resolve()) if options["rootfs"] else "",
    )
    contents = {path: Path(file).read_bytes() for path, file in files.items()}
    Cluster(directory, plan, ckptless=ckptless, files=contents).up(timeout)
    click.echo(f"{plan.nodes} nodes are up in {directory}", err=True)


@main.command()
@click.option("--purge", is_flag=True, help="Delete the directory too.")
@click.pass_obj
def down(directory: Path, purge: bool) -> None:
    """Cut the power of all machines. Nothing is left running or mounted."""
    Cluster(directory).down(purge=purge)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_obj
def status(directory: Path, as_json: bool) -> None:
    """What is on, plugged in, registered and running."""
    found = _existing(directory).status()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(machine) for machine in found]))
        return
    for machine in found:
        power = "on" if machine.pid else "off"
        lacks = "".join(f" no-{name}" for name, pid in machine.services.items() if pid is None)
        place = f"{machine.machine:8} {machine.address:12} {power:4} pid={machine.pid or '-':<8}"
        click.echo(f"{place} link={machine.link:5} slurm={machine.slurm or '-'}{lacks}")


@main.command()
@click.option("--timeout", default=60.0, show_default=True, help="Seconds.")
@click.pass_obj
def wait(directory: Path, timeout: float) -> None:
    """Wait until every node that is on is idle."""
    _existing(directory).wait_idle(timeout_s=timeout)


@main.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-u", "--user", default="root", show_default=True)
@click.option("-C", "--cwd", help="Default: the user's home.")
@click.argument("machine")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def execute(directory: Path, user: str, cwd: str | None, machine: str, argv: tuple[str, ...]) -> None:
    """Run a command on a machine, on this terminal; its exit code is this one's."""
    _existing(directory).replace_process(machine, argv, user, cwd)


@main.command()
@click.option("-u", "--user", default="tester", show_default=True)
@click.argument("machine", default=CONTROLLER)
@click.pass_obj
def shell(directory: Path, user: str, machine: str) -> None:
    """A prompt on a machine, the controller unless named."""
    cluster = _existing(directory)
    command = f"{sys.executable} -m tests.slurm.cluster --dir {directory}"
    click.echo(TRY.format(user=user, machine=machine, nodes=cluster.plan.nodes, command=command), err=True)
    cluster.replace_process(machine, ["bash", "-i"], user)


def _on_machine(name: str, text: str, do: Callable[[Cluster, str], None]) -> None:
    @main.command(name, help=text)
    @click.argument("machine")
    @click.pass_obj
    def command(directory: Path, machine: str) -> None:
        do(_existing(directory), machine)


_on_machine(
    "power-off", "A power failure: no FIN, no RST, then all of the machine is gone.", Cluster.power_off
)
_on_machine("boot", "Power on again; with ReturnToService=1 Slurm then wants `resume`.", Cluster.boot)
_on_machine("cycle", "Power off and on at once.", Cluster.cycle)
_on_machine("unplug", "Pull the network cable.", Cluster.unplug)
_on_machine("plug", "Put the network cable back in.", Cluster.plug)
_on_machine("resume", "Have Slurm use a node again that is down or drained.", Cluster.resume)


@main.command()
@click.argument("machine")
@click.argument("name")
@click.argument("action", type=click.Choice(["start", "stop", "crash", "kill"]))
@click.pass_obj
def service(directory: Path, machine: str, name: str, action: str) -> None:
    """A service of a machine, such as slurmctld, slurmd, munged.

    `stop` is SIGTERM and `crash` SIGKILL, and the service stays down; `kill` is SIGKILL, and it comes back if
    it is one that does.
    """
    cluster = _existing(directory)
    if action == "start":
        cluster.service_start(machine, name)
    elif action == "kill":
        cluster.service_kill(machine, name)
    else:
        cluster.service_stop(machine, name, signal.SIGTERM if action == "stop" else signal.SIGKILL)
