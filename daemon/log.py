"""Logging of the daemon, agent and launcher: one line per event on standard error."""

import logging
import sys


def configure(name: str, *, verbose: bool = False, level: str = "info") -> None:
    """Log to standard error from `level` on (`verbose`: all), each line with time, `name` and level."""
    form = f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(message)s"
    logging.basicConfig(
        level=logging.DEBUG if verbose else level.upper(), stream=sys.stderr, format=form, datefmt="%H:%M:%S"
    )
