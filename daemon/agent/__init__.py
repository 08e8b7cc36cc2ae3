"""The agent: one per node inside the job; starts, watches and restarts ranks, and owns their versions."""
