"""`ckptctl`: reads the ledger for people and scripts."""
