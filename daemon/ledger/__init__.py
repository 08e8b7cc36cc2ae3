"""The ledger: what happened to every job, in SQLite."""
