"""What ckptless asks of Slurm and tells it: through its commands or pyslurm, with a cache in front."""
