"""`python -m tests.slurm.cluster`."""

from .cli import main

if __name__ == "__main__":
    main()
