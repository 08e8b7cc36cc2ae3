"""The paths of ledgers: the default state directory, and the ledger files under one."""

import os
from pathlib import Path

from ckptless.daemon.protocol.errors import UsageError

LEDGER = "ledger.db"
LATEST = "latest"


def default_state_dir() -> Path:
    """Return where `ckptctl` looks unasked: `latest`, a link to local mode's newest run.

    Raises UsageError where no home folder can be told.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not Path(base).is_absolute():  # unset, or relative, which the XDG specification says to ignore
        try:
            base = str(Path.home() / ".local" / "state")
        except RuntimeError as error:
            raise UsageError("no home folder is known: give --state-dir or set CKPTLESS_STATE_DIR") from error
    return Path(base) / "ckptless" / LATEST


def ledger_files(state_dir: Path) -> tuple[Path, ...]:
    """The ledgers of a state directory: its own, then those of the nodes in it, by name."""
    own = state_dir / LEDGER
    try:
        return (*((own,) if own.exists() else ()), *sorted(state_dir.glob(f"*/{LEDGER}")))
    except PermissionError as error:
        raise UsageError(f"you may not read {state_dir}: ask for its owner's rights, or as root") from error
