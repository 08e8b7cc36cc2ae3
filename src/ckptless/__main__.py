"""`ckptless --version`: which ckptless this is, and which commands it has."""

import click

from ckptless import __version__
from ckptless.daemon.protocol.codec import PROTOCOL


@click.command(no_args_is_help=True)
@click.version_option(__version__, "-V", "--version", message=f"ckptless (protocol {PROTOCOL}) %(version)s")
def main() -> None:
    """Make the death of a GPU, process or node a local event for PyTorch jobs on Slurm.

    \b
    ckptless-run     start a training script, on Slurm or on this machine
    ckptctl          see and steer jobs
    ckptless-doctor  check whether this machine is ready
    ckptlessd        the daemon of a node

    Each has --help and a manual page. Those fit that speak the same protocol.
    """


if __name__ == "__main__":
    main()
