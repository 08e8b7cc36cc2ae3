"""The calls of Slurm: through its commands or pyslurm, with a cache in front."""
