"""Runs first in `ckptless-run`: no signal of a user's own ends it from here on, while the rest loads."""

from ckptless.daemon.agent.ranks.signals import ignore_others


def main() -> None:
    """Entry point."""
    ignore_others()
    from ckptless.daemon.launch.main import main as launch

    launch()
