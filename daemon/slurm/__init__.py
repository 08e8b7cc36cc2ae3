"""What ckptless asks of Slurm: one small protocol, two backends behind it, and a cache in front."""
