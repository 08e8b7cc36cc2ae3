"""Pure: the texts of ours that stand in Slurm, as the reason of a node's state."""

import re

from ckptless.daemon.slurm.adapter import MAX_REASON

_UNFIT = re.compile(r"[^ -~]|[\"'`\\]")


def reason_text(reason: str) -> str:
    """Return the text that stands in `sinfo -R`: ours, printable and short enough."""
    return _UNFIT.sub(" ", f"ckptless: {reason}")[:MAX_REASON]
