"""The ledger's schema in a file: made whole, and which version of it a file has (`PRAGMA user_version`).

No release has written an older version yet. What changes the tables after one raises VERSION, and has a step
here that brings an older file up.
"""

from sqlalchemy import Connection, Engine

from ckptless.daemon.ledger.models import METADATA
from ckptless.daemon.protocol.errors import DamagedLedgerError, LedgerError, NewerLedgerError

VERSION = 15


def migrate(engine: Engine) -> None:
    """Make the tables of a new file, in one transaction; several processes may do it at once.

    Raises NewerLedgerError, and DamagedLedgerError for a file that no release has written.
    """
    with engine.begin() as connection:
        version = _require_not_newer(connection)
        if version == 0:
            METADATA.create_all(connection, checkfirst=False)
            connection.exec_driver_sql(f"PRAGMA user_version = {VERSION:d}")
        elif version < VERSION:
            raise DamagedLedgerError(f"the ledger is of version {version}, which no release has written")


def require_current(engine: Engine) -> None:
    """Raise LedgerError unless the file is of this version: who only reads cannot bring it up."""
    with engine.begin() as connection:
        version = _require_not_newer(connection)
    if version < VERSION:
        raise LedgerError(
            f"the ledger is of version {version}, older than the {VERSION} read here:"
            " a daemon of this ckptless brings it up when it opens it"
        )


def _require_not_newer(connection: Connection) -> int:
    """Return the file's version. Raises NewerLedgerError if only a newer ckptless knows it."""
    version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if version > VERSION:
        raise NewerLedgerError(
            f"the ledger is of version {version}, newer than the {VERSION} known here:"
            " use the ckptless that wrote it, or a later one"
        )
    return version
