"""Everything of ckptless that is not in the training process: daemon, agent, launcher, ledger, ckptctl."""
