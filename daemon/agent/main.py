"""The agent's program, `python -m ckptless.daemon.agent.main`; the launcher starts it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from ckptless.daemon.agent.ranks.prctl import set_process_name
from ckptless.daemon.agent.ranks.signals import ENDING, USERS, ignore_others
from ckptless.daemon.agent.ranks.socket_folder import RANKS, SocketFolder
from ckptless.daemon.agent.service import Agent
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.protocol.messages import Cancel
from ckptless.daemon.settings.agent_config import AgentConfig, of_this_node
from ckptless.daemon.settings.config import load
from ckptless.daemon.slurm.requeue import stay
from ckptless.daemon.slurm.run_name import slurm_job_id


@contextlib.contextmanager
def _with_socket(config: AgentConfig) -> Iterator[AgentConfig]:
    """The configuration with a socket for the ranks, which is gone afterwards."""
    if config.rank_socket:
        yield config
        return
    folder = SocketFolder(config.spec.job)
    try:
        yield replace(config, rank_socket=folder.socket(RANKS))
    finally:
        folder.close()


async def _run(config: AgentConfig, zygote: tuple[int, int] | None, *, forwards: bool) -> int:
    loop = asyncio.get_running_loop()
    cancelled: asyncio.Future[Cancel] = loop.create_future()

    def cancel(number: signal.Signals) -> None:
        if not cancelled.done():
            reason = number.name if config.restarts is not None else f"{number.name} from the user"
            cancelled.set_result(Cancel(exit_code=128 + number, reason=reason, restarts=config.restarts))

    for number in ENDING:
        loop.add_signal_handler(number, cancel, number)
    agent = Agent(config, zygote)
    for number in USERS if forwards else ():
        loop.add_signal_handler(number, agent.forward, number)
    code = await agent.run(cancelled)
    if config.in_step and code == 128 + signal.SIGTERM and agent.first:
        # The batch script is waiting in srun: what is true of a launcher is true of this step.
        await stay(slurm_job_id(config.spec.job))
    return code


def _of_file(path: Path) -> AgentConfig:
    """Local mode. Raises UsageError."""
    config = load(path, AgentConfig)
    return msgspec.structs.replace(config, env={**os.environ, **config.env})


@click.command()
@click.option("--local", "path", type=click.Path(path_type=Path), help="Local mode, by this file.")
@click.option("--slurm", is_flag=True, help="In a step of ckptless-run, by its environment.")
@click.option("--zygote-pid", type=int, hidden=True)
@click.option("--zygote-fd", type=int, hidden=True)
@click.option("-v", "--verbose", is_flag=True)
def command(
    path: Path | None, slurm: bool, zygote_pid: int | None, zygote_fd: int | None, verbose: bool
) -> None:
    """Start, watch and restart the ranks of one node."""
    try:
        if (path is None) is not slurm:
            raise UsageError("agents are started by ckptless-run")
        config = _of_file(path) if path else of_this_node(os.environ, len(os.sched_getaffinity(0)))
        log.configure(f"agent[{config.name}]", verbose=verbose, log_format=config.log_format)
        log.always(job=config.spec.job)
        set_process_name("ckptless-agent")
        zygote = (zygote_pid, zygote_fd) if zygote_pid is not None and zygote_fd is not None else None
        ignore_others()
        with _with_socket(config) as ready:
            # In a step Slurm has sent it to the ranks as well.
            sys.exit(asyncio.run(_run(ready, zygote, forwards=not slurm)))
    except CkptlessError as error:
        click.echo(f"ckptless agent: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    command(prog_name="ckptless-agent")


if __name__ == "__main__":
    main()
