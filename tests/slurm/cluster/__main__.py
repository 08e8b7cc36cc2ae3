"""`python tests/slurm/cluster`, or `python -m cluster` beside it."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster.cli import main

if __name__ == "__main__":
    main()
