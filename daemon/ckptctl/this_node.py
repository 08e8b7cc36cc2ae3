"""`ckptctl health` and `ckptctl kept`: what the daemon of this node has to say of the node itself."""

import sys
import time

import click

from ckptless.daemon.ckptctl.shared import render
from ckptless.daemon.ckptctl.shared.ask import ask, sockets
from ckptless.daemon.ckptctl.shared.options import Asked, common, of_job, watched
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.health import HealthReport, ProbeState, VerdictRecord, WhatIsWell
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.messages import PROTOCOL

UNWELL = 1


@click.command()
@common
@watched
@click.option("--all", "everything", is_flag=True, help="Also what is over.")
@click.option(
    "--exit-code",
    is_flag=True,
    help=f"Exit with {UNWELL} where the node is unwell: something stands that is worth more than a note.",
)
def health(asked: Asked, everything: bool, exit_code: bool) -> None:
    """Show how this node is, as the probes of its daemon see it.

    Everybody may ask; what was read word for word, some of it in the kernel's log, only root sees.

    \b
    Examples:
        ckptctl health
        ckptctl health --exit-code || echo "keep jobs away"
    """
    name = sockets(asked)[-1]
    answer = ask(name, WhatIsWell(protocol=PROTOCOL), HealthReport)
    shown = [one for one in answer.verdicts if everything or one.ended_s is None]
    unwell = any(one.ended_s is None and one.action != "note" for one in answer.verdicts)
    if asked.as_json:
        document = {"node": answer.node, "act": answer.act, "well": not unwell}
        render.show_json(socket=name, **document, probes=answer.probes, verdicts=shown)
    elif answer.act is None:
        raise PeerError(f"the daemon at {name} is a local run's, which looks at no node's health")
    else:
        _show(answer, shown, unwell=unwell)
    if exit_code and unwell:
        sys.exit(UNWELL)


def _show(answer: HealthReport, shown: list[VerdictRecord], *, unwell: bool) -> None:
    well = "is not well" if unwell else "is well"
    click.echo(f"{render.harmless(answer.node)} {well}; at most done for a finding: {answer.act}\n")
    if shown:
        words = ("since", "probe", "finding", "where", "action", "done", "evidence")
        render.show_table((*words[:4], "times", *words[4:]), map(_verdict, shown), words=words)
        click.echo()
    columns = ("probe", "state", "looks", "ago", "ms", "why")
    render.show_table(columns, map(_probe, answer.probes), words=("probe", "state", "why"))


def _verdict(one: VerdictRecord) -> tuple[object, ...]:
    since = render.span(time.time() - one.begun_s) if one.ended_s is None else "over"
    return since, one.probe, one.code, one.where, one.count, one.action, one.done or one.text, one.evidence


def _probe(one: ProbeState) -> tuple[object, ...]:
    ago = render.span(one.age_s) if one.age_s is not None else ""
    return one.name, one.state, one.looks or "", ago, render.ms(one.cost_s) if one.looks else "", one.text


@click.command()
@of_job
def kept(asked: Asked) -> None:
    """Show the memory that the daemon of this node keeps of ended jobs, for their next start.

    Root sees all of it, others what is their own. With JOB, only that run's, or those of that Slurm job.

    \b
    Example:
        ckptctl kept --json
    """
    name = sockets(asked)[-1]
    answer = ask(name, WhatIsKept(protocol=PROTOCOL), KeptList)
    mine = [one for one in answer.kept if asked.job in (None, one.run, one.run.partition(".")[0])]
    if asked.as_json:
        render.show_json(socket=name, limit_nbytes=answer.limit_nbytes, kept=mine)
        return
    rows = [
        (one.run, one.uid, f"{one.nbytes / 2**20:.1f}", render.span(one.age_s), render.span(one.left_s))
        for one in mine
    ]
    render.show_table(("job", "uid", "MiB", "age", "left"), rows, words=("job",))
