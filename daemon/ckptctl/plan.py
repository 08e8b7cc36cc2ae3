"""`ckptctl plan`: whether the nodes of a job that does not run yet can hold its state and send its copies.

And, where one says how often a node fails, what that will cost it.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import click

from ckptless.daemon.ckptctl.shared import render
from ckptless.daemon.ckptctl.shared.options import wants_json, with_json
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_NODES, MOST_RANKS, MOST_SLOTS, size_text
from ckptless.daemon.replication.footprint import Shape, shortest_cadence
from ckptless.daemon.replication.outlook import Outlook, losses_per_s
from ckptless.daemon.settings.option_kinds import memory
from ckptless.daemon.settings.options import RunOptions

Sharding = Literal["fsdp", "hsdp", "ddp"]
# In so many times the nodes a place is looked for where a job does not fit.
MOST_TIMES = 64
EXIT_DOES_NOT_FIT = 1
DAY_S = 86400.0
# A copy in order to the host's pinned memory, bytes per second of each GPU: measured on an H200.
COPY_RATE = 55e9


@dataclass(frozen=True)
class Limits:
    """A node's limits: bytes of memory, bytes per second each way, seconds of a step; None: nobody said."""

    ram_nbytes: int | None
    rate: float | None
    step_s: float | None
    commit_every: int

    def holds(self, shape: Shape) -> bool:
        """Whether the memory suffices."""
        return self.ram_nbytes is None or shape.node_nbytes <= self.ram_nbytes

    def shortest(self, shape: Shape) -> int | None:
        """The fewest steps between two commits that the network keeps up with; None where nobody can say."""
        if self.rate is None or self.step_s is None:
            return None
        return shortest_cadence(shape.commit_s(self.rate), self.step_s)

    def sustains(self, shape: Shape) -> bool:
        """Whether the network keeps up with the commits."""
        return (self.shortest(shape) or 1) <= self.commit_every

    def fits(self, shape: Shape) -> bool:
        """Whether both do."""
        return self.holds(shape) and self.sustains(shape)


_RAM = memory(low=1, high=1 << 50, such_as="512GiB or 512G")
_ABOVE_0 = click.FloatRange(0, 1e18, min_open=True)


def _ram_nbytes(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Bytes as ckptless.yaml has them, 512GiB, or Slurm's --mem, 512G. Raises UsageError."""
    if value is None:
        return None
    return int(_RAM.read_word("--ram", re.sub(r"(?<=\d)[KMGT]\Z", r"\g<0>iB", value)))


def _finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Raises BadParameter for NaN, which is in any range."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("it must be a number")
    return value


@click.command(
    epilog="Exit codes: 0 where it fits, 1 where it does not, 2 for a mistake in how it was called."
)
@click.option(
    "--gpus", type=click.IntRange(1, MOST_RANKS), required=True, help="Ranks that train, one a GPU."
)
@click.option("--gpus-per-node", type=click.IntRange(1, MOST_SLOTS), default=8, show_default=True)
@click.option(
    "--params", type=_ABOVE_0, callback=_finite, required=True, help="Parameters of the model, as 70e9."
)
@click.option(
    "--bytes-per-param",
    type=_ABOVE_0,
    callback=_finite,
    default=12,
    show_default=True,
    help="Of the parameter and what an optimizer keeps of it: Adam in float32 has 4 + 4 + 4.",
)
@click.option("--sharding", type=click.Choice(get_args(Sharding)), default="fsdp", show_default=True)
@click.option(
    "--shard-size",
    type=click.IntRange(1, MOST_RANKS),
    help="With hsdp: ranks that a whole state is sharded over.  Default: those of a node.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=RunOptions().replicas,
    show_default=True,
    help="Nodes that hold a copy of each rank's part of the state, as of ckptless-run.",
)
@click.option(
    "--ram",
    callback=_ram_nbytes,
    metavar="SIZE",
    help="As 1024G: the memory of a node that training itself leaves.",
)
@click.option("--nic", type=_ABOVE_0, callback=_finite, help="Gbit/s of an interface that copies go over.")
@click.option("--nics", type=click.IntRange(1, 64), default=1, show_default=True, help="Such interfaces.")
@click.option("--step-s", type=_ABOVE_0, callback=_finite, help="Seconds that a step takes.")
@click.option(
    "--commit-every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Steps between two commits, as of ckptless.run.",
)
@click.option(
    "--mtbf",
    type=_ABOVE_0,
    callback=_finite,
    help="Days between two failures of one node; with it, what failures will cost.",
)
@click.option(
    "--spares",
    type=click.IntRange(0, MOST_NODES),
    default=RunOptions().spares,
    show_default=True,
    help="Nodes.",
)
@click.option(
    "--recovery-s",
    type=_ABOVE_0,
    callback=_finite,
    default=10,
    show_default=True,
    help="Seconds from a node's failure until training goes on, as of `ckptctl timeline`.",
)
@click.option(
    "--requeue-s",
    type=_ABOVE_0,
    callback=_finite,
    default=900,
    show_default=True,
    help="The same where no spare is left, the wait in the queue included.",
)
@click.option(
    "--repair",
    type=_ABOVE_0,
    callback=_finite,
    default=1,
    show_default=True,
    help="Days until a lost node is a spare again.",
)
@click.option(
    "--commit-s",
    type=click.FloatRange(0, 1e6),
    callback=_finite,
    help="Seconds that a commit holds training up.  Default: a copy in order, at 55 GB/s for each GPU.",
)
@click.option("--days", type=_ABOVE_0, callback=_finite, default=30, show_default=True, help="The job's.")
@with_json
@click.pass_context
def plan(  # noqa: PLR0913  # an option each
    context: click.Context,
    *,
    gpus: int,
    gpus_per_node: int,
    params: float,
    bytes_per_param: float,
    sharding: Sharding,
    shard_size: int | None,
    replicas: int,
    ram: int | None,
    nic: float | None,
    nics: int,
    step_s: float | None,
    commit_every: int,
    mtbf: float | None,
    spares: int,
    recovery_s: float,
    requeue_s: float,
    repair: float,
    commit_s: float | None,
    days: float,
    as_json: bool,
) -> None:
    """Say what memory the versions of a state take on a node, what its commits send, and whether that fits.

    Nothing is asked of any daemon. What is not given is not looked at. Sizes are those of the node that has
    most to do; a commit is taken to send all of a shard, at the whole rate of the interfaces.

    \b
    Example:
        ckptctl plan --gpus 64 --params 70e9 --ram 1024G --nic 400 --step-s 10
        ckptctl plan --gpus 2304 --params 70e9 --nic 400 --step-s 10 --mtbf 154 --spares 2
    """
    shape = Shape(
        ranks=gpus,
        per_node=_per_node(gpus, gpus_per_node),
        shard_ranks=_shard_ranks(sharding, gpus, shard_size or min(gpus, gpus_per_node)),
        copies=replicas,
        state_nbytes=round(params * bytes_per_param),
    )
    rate = None if nic is None else nic * nics * 1e9 / 8
    limits = Limits(ram, rate, step_s, commit_every)
    advice = tuple(_advice(shape, limits))
    failures = None
    if mtbf is not None:
        outlook = Outlook(
            nodes=shape.nodes,
            spares=spares,
            mtbf_s=mtbf * DAY_S,
            recovery_s=recovery_s,
            requeue_s=requeue_s,
            repair_s=repair * DAY_S,
            step_s=_step_s(step_s),
            commit_every=commit_every,
            commit_s=shape.shard_nbytes / COPY_RATE if commit_s is None else commit_s,
        )
        failures = _failures(shape, limits, outlook, days)
    if wants_json(context, as_json=as_json):
        render.show_json(
            plan=_as_json(shape, limits), failures=failures, fits=limits.fits(shape), advice=advice
        )
    else:
        _show(shape, limits)
        for line in () if failures is None else _failure_lines(failures):
            click.echo(line)
        for line in advice or (_good(shape, limits),):
            click.echo(line)
    if not limits.fits(shape):
        context.exit(EXIT_DOES_NOT_FIT)


def _step_s(step_s: float | None) -> float:
    """Raises UsageError where nobody said how long a step takes."""
    if step_s is None:
        raise UsageError("--mtbf asks for --step-s: what a failure costs depends on how long steps are")
    return step_s


def _per_node(gpus: int, per_node: int) -> int:
    """Raises UsageError for nodes that are not alike, and for too many."""
    per_node = min(gpus, per_node)
    if gpus % per_node:
        raise UsageError(f"--gpus {gpus} is no multiple of --gpus-per-node {per_node}: nodes are all alike")
    if gpus // per_node > MOST_NODES:
        raise UsageError(f"{gpus // per_node} nodes; a job has {MOST_NODES} at most")
    return per_node


def _shard_ranks(sharding: Sharding, gpus: int, shard_size: int) -> int:
    """Raises UsageError where no mesh is like that."""
    if sharding != "hsdp":
        return gpus if sharding == "fsdp" else 1
    if gpus % shard_size or gpus == shard_size:
        raise UsageError(
            f"hsdp has several replicas of --shard-size {shard_size} ranks each: --gpus {gpus} must be two "
            "or more times that"
        )
    return shard_size


# ------------------------------------------------------------------------------------- what is said


def _as_json(shape: Shape, limits: Limits) -> dict[str, Any]:
    most = shape.fullest
    return {
        "nodes": shape.nodes,
        "ranks": shape.ranks,
        "replicas": shape.copies,
        "shard_nbytes": shape.shard_nbytes,
        "own_nbytes": shape.memory_nbytes(most.own),
        "replicas_nbytes": shape.memory_nbytes(most.held),
        "node_nbytes": shape.node_nbytes,
        "ram_nbytes": limits.ram_nbytes,
        "sent_nbytes": shape.sent_nbytes,
        "received_nbytes": shape.received_nbytes,
        "commit_s": None if limits.rate is None else shape.commit_s(limits.rate),
        "shortest_commit_every": limits.shortest(shape),
    }


def _show(shape: Shape, limits: Limits) -> None:
    most = shape.fullest
    rows = [
        ("one version of a shard", None, shape.shard_nbytes),
        ("versions of own ranks", most.own, shape.memory_nbytes(most.own)),
        ("replicas for others", most.held, shape.memory_nbytes(most.held)),
        ("memory", most.own + most.held, shape.node_nbytes),
        ("sent at a commit", max(load.sent for load in shape.loads), shape.sent_nbytes),
        ("received at a commit", max(load.held for load in shape.loads), shape.received_nbytes),
    ]
    columns = ("on a node", "shards", "bytes", "for each rank")
    shown = [
        (name, shards, size_text(size), None if shards is None else size_text(size / shape.per_node))
        for name, shards, size in rows
    ]
    render.show_table(columns, shown, words=("on a node",))
    if limits.rate is not None:
        click.echo(f"a commit's copies take {render.span(shape.commit_s(limits.rate))} on the network")


def _failures(shape: Shape, limits: Limits, outlook: Outlook, days: float) -> dict[str, float | None]:
    """Return what nodes' failures will cost: fractions are of the job's time."""
    best = outlook.with_best_spares()
    lost = None
    if limits.rate is not None:
        # Until a lost node's shards, and those that it held for others, are elsewhere.
        window_s = outlook.recovery_s + shape.node_nbytes / limits.rate
        lost = -math.expm1(-losses_per_s(shape.together, outlook.mtbf_s, window_s) * days * DAY_S)
    return {
        "between_failures_s": 1 / outlook.failures_per_s,
        "failure_s": outlook.failure_s,
        "redone_s": outlook.redone_s,
        "no_spare": outlook.no_spare,
        "goodput": outlook.goodput,
        "commits": outlook.commits,
        "spares": outlook.spares,
        "best_spares": best.spares,
        "best_spares_goodput": best.goodput,
        "best_commit_every": outlook.best_commit_every(limits.shortest(shape) or 1),
        "commit_s": outlook.commit_s,
        "days": days,
        "all_copies_lost": lost,
    }


def _failure_lines(told: dict[str, Any]) -> Iterator[str]:
    between, costs = render.span(told["between_failures_s"]), render.span(told["failure_s"])
    spares, best = (f"{n} spare{'s' * (n != 1)}" for n in (told["spares"], told["best_spares"]))
    yield f"a node fails every {between}, and costs {costs}, {render.span(told['redone_s'])} of it done again"
    yield f"with {spares} {told['no_spare']:.2%} of the failures find none; goodput {told['goodput']:.2%}"
    makes = f"{best} make{'s' * (told['best_spares'] == 1)} the most of all nodes"
    yield f"{makes} (goodput {told['best_spares_goodput']:.2%})"
    held_up = f"a commit holds training up for {told['commit_s'] * 1000:.0f} ms"
    yield f"{held_up}; the best is commit_every={told['best_commit_every']}"
    if (lost := told["all_copies_lost"]) is not None:
        yield f"all copies of a shard are lost in {told['days']:g} days with probability {lost:.1g}"


def _good(shape: Shape, limits: Limits) -> str:
    shortest = limits.shortest(shape)
    if limits.ram_nbytes is None and shortest is None:
        return "Give --ram, or --nic and --step-s, to learn whether it fits."
    every = "" if shortest is None else f"; the network keeps up with commit_every={shortest} and more"
    return f"It fits{every}."


def _advice(shape: Shape, limits: Limits) -> Iterator[str]:
    """Yield what to change where it does not fit: a line for the memory, one for the network."""
    if not limits.holds(shape):
        assert limits.ram_nbytes is not None  # or it would
        text = f"Too much for {size_text(limits.ram_nbytes)} of memory"
        yield f"{text}: {' or '.join(_remedies(shape, limits)) or _ELSE}."
    if not limits.sustains(shape):
        other = "".join(f", or {one}" for one in _fewer(shape, limits.sustains))
        yield f"Too much for the network: commits wait; take commit_every={limits.shortest(shape)}{other}."


_ELSE = "shard the state over more ranks (--sharding), or take nodes with more memory"


def _remedies(shape: Shape, limits: Limits) -> Iterator[str]:
    """Yield what makes the memory suffice, the least change of each kind."""
    yield from _fewer(shape, limits.holds)
    times = 2
    while times <= MOST_TIMES and times * shape.ranks <= MOST_RANKS and times * shape.nodes <= MOST_NODES:
        more = replace(shape, ranks=times * shape.ranks, shard_ranks=_grown(shape, times))
        if limits.holds(more):
            yield f"{more.nodes} nodes"
            return
        times *= 2


def _grown(shape: Shape, times: int) -> int:
    """Return the ranks of a shard for more nodes: with FSDP2 all share it, a mesh gets more replicas."""
    return shape.shard_ranks * times if shape.shard_ranks == shape.ranks else shape.shard_ranks


def _fewer(shape: Shape, good: Callable[[Shape], bool]) -> Iterator[str]:
    for copies in range(shape.copies - 1, 0, -1):
        if good(replace(shape, copies=copies)):
            yield f"--replicas {copies}"
            return
