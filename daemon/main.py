"""`ckptlessd`: the per-node daemon."""

import asyncio
import signal
import sys
from pathlib import Path

import click

from ckptless.daemon import log
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.config import DaemonConfig, load
from ckptless.daemon.service import serve_forever


async def _run(config: DaemonConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve_forever(config, stop)


@click.command()
@click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="YAML file, see etc/ckptlessd.yaml.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def command(path: Path, verbose: bool) -> None:
    """Decide, record and watch for the jobs of one node."""
    try:
        config = load(path, DaemonConfig)
        log.configure(f"ckptlessd[{config.me.name}]", verbose=verbose)
        sys.exit(asyncio.run(_run(config)))
    except CkptlessError as error:
        click.echo(f"ckptlessd: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    command(prog_name="ckptlessd")


if __name__ == "__main__":
    main()
