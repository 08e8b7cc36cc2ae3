"""Slurm's side of ckptless: the SPANK plugin, prolog and epilog, and the adapter to slurmctld."""
