"""Sets a damaged ledger aside, for whoever wants to look into it."""

import time
from pathlib import Path

from ckptless.daemon.ledger.engine import beside
from ckptless.daemon.protocol.errors import LedgerError

MARK = ".corrupt-"
# On a disk that goes bad: the newest ones are kept.
MOST_KEPT = 3


def set_aside(path: Path) -> Path:
    """Rename the ledger, and what SQLite has beside it, so that a new one can begin; its new name.

    Nobody may have it open to write. Raises LedgerError.
    """
    base = f"{path.name}{MARK}{time.strftime('%Y%m%dT%H%M%S')}"
    try:
        taken = {found.name for found in path.parent.glob(f"{path.name}{MARK}*")}
        name = next(n for n in (base, *(f"{base}.{i}" for i in range(1, 1000))) if n not in taken)
        aside = path.with_name(name)
        # First the log: without it a file that is left behind is only older, never a mix of two.
        for old, new in zip((*beside(path), path), (*beside(aside), aside), strict=True):
            if old.exists():
                old.rename(new)
        _forget_the_oldest(path)
    except OSError as error:
        text = f"{path}: the ledger is damaged, and cannot be renamed: {error.strerror}"
        raise LedgerError(text) from error
    return aside


def _forget_the_oldest(path: Path) -> None:
    kept = [p for p in path.parent.glob(f"{path.name}{MARK}*") if not p.name.endswith(("-wal", "-shm"))]
    kept.sort(key=lambda p: (p.stat().st_mtime_ns, p.name))
    for old in kept[:-MOST_KEPT]:
        for part in (*beside(old), old):
            part.unlink(missing_ok=True)
