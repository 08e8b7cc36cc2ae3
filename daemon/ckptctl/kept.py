"""`ckptctl kept`: the memory that this node's daemon keeps for jobs that start again."""

import click

from ckptless.daemon.ckptctl import render
from ckptless.daemon.ckptctl.ask import ask, sockets
from ckptless.daemon.ckptctl.options import Asked, of_job
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.messages import PROTOCOL


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
