"""`ckptlessd`: the per-node daemon."""

import asyncio
import gc
import signal
import sys
from pathlib import Path

import click

from ckptless import __version__
from ckptless.daemon import log, system
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.cluster import LocalCluster
from ckptless.daemon.config import LocalConfig, load, read_key
from ckptless.daemon.peers.vouch import KeyVouch
from ckptless.daemon.service import Service, serve_forever

GC_THRESHOLD = (50_000, 10, 10)


async def _run_local(config: LocalConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster = LocalCluster(config.node, config.peers, Path(config.state_dir))
    return await serve_forever(
        Service(config.daemon, cluster, KeyVouch(read_key(Path(config.key_file)))), stop
    )


@click.command()
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    help="The cluster's settings.  [default: /etc/ckptless/ckptless.yaml]",
)
@click.option("--local", type=click.Path(path_type=Path), hidden=True, help="A node of local mode.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def command(path: Path | None, local: Path | None, verbose: bool) -> None:
    """Decide, record and watch for the jobs of one node."""
    try:
        if local is None:
            sys.exit(system.run(path, verbose=verbose))
        config = load(local, LocalConfig)
        log.configure(f"ckptlessd[{config.daemon.name}]", verbose=verbose)
        sys.exit(asyncio.run(_run_local(config)))
    except CkptlessError as error:
        click.echo(f"ckptlessd: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    # Of a large job it keeps a million values in no cycle: looking for one took longer than to plan.
    gc.set_threshold(*GC_THRESHOLD)
    command(prog_name="ckptlessd")


if __name__ == "__main__":
    main()
