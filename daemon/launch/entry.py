"""What `ckptless-run` runs first: from here on no signal of a user's own ends it, while the rest loads."""

from ckptless.daemon.agent.ranks.signals import ignore_others


def main() -> None:
    """Entry point."""
    ignore_others()
    from ckptless.daemon.launch.main import main as launch

    launch()
