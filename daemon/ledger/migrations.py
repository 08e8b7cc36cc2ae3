"""The ledger's schema, as the ordered steps that bring any older file up to this version.

`PRAGMA user_version` in the file counts the steps it has had. A step, once released, is never changed.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, Engine

from ckptless.daemon.api.errors import LedgerError, NewerLedgerError

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE jobs (
            job TEXT PRIMARY KEY, command TEXT NOT NULL, world_size INTEGER NOT NULL, nodes INTEGER NOT NULL,
            spares INTEGER NOT NULL, state TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL,
            exit_code INTEGER, reason TEXT
        ) WITHOUT ROWID""",
        """CREATE TABLE nodes (
            job TEXT NOT NULL, node INTEGER NOT NULL, name TEXT NOT NULL, address TEXT NOT NULL,
            state TEXT NOT NULL, daemon_pid INTEGER, agent_pid INTEGER, updated_s REAL NOT NULL,
            PRIMARY KEY (job, node)
        ) WITHOUT ROWID""",
        """CREATE TABLE slots (
            job TEXT NOT NULL, node INTEGER NOT NULL, slot INTEGER NOT NULL, rank INTEGER,
            generation INTEGER NOT NULL, pid INTEGER, phase TEXT NOT NULL, step INTEGER, loss TEXT,
            updated_s REAL NOT NULL,
            PRIMARY KEY (job, node, slot)
        ) WITHOUT ROWID""",
        """CREATE TABLE generations (
            job TEXT NOT NULL, generation INTEGER NOT NULL, places TEXT NOT NULL, restore_step INTEGER,
            rung TEXT NOT NULL, faults TEXT NOT NULL, leader INTEGER NOT NULL, agreed_s REAL NOT NULL,
            PRIMARY KEY (job, generation)
        )""",
        """CREATE TABLE faults (
            job TEXT NOT NULL, fault TEXT NOT NULL, kind TEXT NOT NULL, node INTEGER NOT NULL, slot INTEGER,
            rank INTEGER, generation INTEGER NOT NULL, detail TEXT NOT NULL, seen_s REAL NOT NULL,
            PRIMARY KEY (job, fault)
        )""",
        """CREATE TABLE recoveries (
            job TEXT NOT NULL, generation INTEGER NOT NULL, rung TEXT NOT NULL, faults TEXT NOT NULL,
            restore_step INTEGER, started_s REAL NOT NULL, phases TEXT NOT NULL, outcome TEXT,
            PRIMARY KEY (job, generation)
        )""",
        # AUTOINCREMENT: no number is used twice, so a follower misses nothing after rows were removed.
        """CREATE TABLE events (
            row INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, event TEXT NOT NULL,
            node INTEGER NOT NULL, at_s REAL NOT NULL, level TEXT NOT NULL, kind TEXT NOT NULL,
            generation INTEGER, text TEXT NOT NULL,
            UNIQUE (job, event)
        )""",
    ),
    (
        # What this daemon has promised and accepted; `state` is a control.decree.Durable as JSON. `identity`
        # is told to the job's agent, which tells it back: a daemon without the row knows that it lost one.
        """CREATE TABLE votes (
            job TEXT PRIMARY KEY, identity TEXT NOT NULL, state TEXT NOT NULL
        ) WITHOUT ROWID""",
    ),
    # Who said that something was broken; nobody knows it of older faults.
    ("ALTER TABLE faults ADD COLUMN source TEXT",),
    (
        # What each node's agent holds of the job's state.
        """CREATE TABLE holdings (
            job TEXT NOT NULL, node INTEGER NOT NULL, tensors TEXT NOT NULL, records TEXT NOT NULL,
            nbytes INTEGER NOT NULL, seq INTEGER NOT NULL, updated_s REAL NOT NULL,
            PRIMARY KEY (job, node)
        ) WITHOUT ROWID""",
    ),
    # How often a rank commits, and what that costs it.
    ("ALTER TABLE slots ADD COLUMN every INTEGER", "ALTER TABLE slots ADD COLUMN share REAL"),
    # What each node has of training data; nobody told of it before.
    ("ALTER TABLE holdings ADD COLUMN rings TEXT NOT NULL DEFAULT '[]'",),
    (
        # Whose each job is, by Slurm's word when its agent came: who may read of it.
        """CREATE TABLE owners (
            job TEXT PRIMARY KEY, uid INTEGER NOT NULL
        ) WITHOUT ROWID""",
        # One job's events are read without a look at those of all others.
        "CREATE INDEX events_by_job ON events (job)",
        # Of whom an event tells; JSON.
        "ALTER TABLE events ADD COLUMN about TEXT NOT NULL DEFAULT 'null'",
    ),
    # Over the rest of the row: SQLite has no checksums, and a vote with a flipped bit is a broken promise.
    # A vote without one is not believed.
    ("ALTER TABLE votes ADD COLUMN digest TEXT NOT NULL DEFAULT ''",),
    # Which run of that name it is of which rows are there; of older ones nobody knows.
    ("ALTER TABLE owners ADD COLUMN launch TEXT NOT NULL DEFAULT ''",),
    # What is told of rings has fewer fields.
    ("UPDATE holdings SET rings = '[]'",),
)


def migrate(engine: Engine, steps: Sequence[Sequence[str]] = STEPS) -> None:
    """Bring the file up to the newest version: each step and its number in one transaction.

    Safe when several processes do it at once. Raises NewerLedgerError.
    """
    while True:
        with engine.begin() as connection:
            version = require_not_newer(connection, len(steps))
            if version == len(steps):
                return
            for statement in steps[version]:
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(f"PRAGMA user_version = {version + 1:d}")


def require_current(engine: Engine, newest: int = len(STEPS)) -> None:
    """Raise LedgerError unless the file is of this version: who only reads cannot bring it up."""
    with engine.begin() as connection:
        version = require_not_newer(connection, newest)
    if version < newest:
        raise LedgerError(
            f"the ledger is of version {version}, older than the {newest} read here:"
            " a daemon of this ckptless brings it up when it opens it"
        )


def require_not_newer(connection: Connection, newest: int) -> int:
    """The file's version; NewerLedgerError if only a newer ckptless knows it."""
    version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if version > newest:
        raise NewerLedgerError(
            f"the ledger is of version {version}, newer than the {newest} known here:"
            " use the ckptless that wrote it, or a later one"
        )
    return version
