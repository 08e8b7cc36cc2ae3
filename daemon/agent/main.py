"""The agent's program: `python -m ckptless.daemon.agent.main --config FILE`; the launcher starts it."""

import asyncio
import signal
import sys
from pathlib import Path

import click

from ckptless.daemon import log
from ckptless.daemon.agent.config import AgentConfig
from ckptless.daemon.agent.prctl import set_process_name
from ckptless.daemon.agent.service import Agent
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.api.messages import Cancel
from ckptless.daemon.config import load


async def _run(config: AgentConfig) -> int:
    loop = asyncio.get_running_loop()
    cancelled: asyncio.Future[Cancel] = loop.create_future()

    def cancel(number: signal.Signals) -> None:
        if not cancelled.done():
            cancelled.set_result(Cancel(exit_code=128 + number, reason=f"{number.name} from the user"))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, cancel, number)
    return await Agent(config).run(cancelled)


@click.command()
@click.option("--config", "path", required=True, type=click.Path(path_type=Path))
@click.option("-v", "--verbose", is_flag=True)
def command(path: Path, verbose: bool) -> None:
    """Start, watch and restart the ranks of one node."""
    try:
        config = load(path, AgentConfig)
        log.configure(f"agent[{config.name}]", verbose=verbose)
        set_process_name("ckptless-agent")
        sys.exit(asyncio.run(_run(config)))
    except CkptlessError as error:
        click.echo(f"ckptless agent: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    command(prog_name="ckptless-agent")


if __name__ == "__main__":
    main()
