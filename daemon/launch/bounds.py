"""The rules for what a run may ask for. `slurm_ext/spank/options.c` has the same, in the same words."""

import importlib.util
import sys
from collections.abc import Mapping

from ckptless.daemon.api.errors import UsageError

MAX_SPARES = 1024
MAX_COPIES = 64
MIN_STALL_S, MAX_STALL_S = 5.0, 86_400.0
# Slurm sets it in every component of such a job.
HET_SIZE = "SLURM_HET_SIZE"
NO_HET = (
    "a heterogeneous job (with : or hetjob) cannot train with ckptless, which would use its first component "
    "alone; submit one job whose nodes are all alike"
)


def check_fits(spares: int, nodes: int) -> None:
    """Raise UsageError where no node of the job's `nodes` is left to train on."""
    if spares < nodes:
        return
    spare, node = "spare" if spares == 1 else "spares", "node" if nodes == 1 else "nodes"
    raise UsageError(
        f"with {spares} {spare}, a job of {nodes} {node} has none left to train on; "
        "ask for more nodes (-N) or for fewer spares"
    )


def check_alike(env: Mapping[str, str]) -> None:
    """Raise UsageError in a heterogeneous job."""
    if env.get(HET_SIZE):
        raise UsageError(NO_HET)


def check_torch() -> None:
    """Raise UsageError where the ranks, which run with this same Python, could not import torch."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"torch is not installed for {sys.executable}, which the ranks run with: "
            "install ckptless into the environment that has torch, or torch into this one"
        )


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise UsageError where a value of the environment, called `name`, is out of its range."""
    if value is not None and not low <= value <= high:
        raise UsageError(f"{name} is {value:g}: it must be from {low:g} to {high:g}")
