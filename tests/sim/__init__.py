"""A deterministic simulator of a whole job: the shipped control plane, everything around it invented.

One seed gives the job, the timing and the faults. `python -m tests.sim SEED` tells the story of one.
"""
