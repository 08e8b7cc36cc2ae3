"""Pure: what Slurm's environment says of the allocation, and which of its nodes train and which wait."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptless.daemon.api.errors import UsageError
from ckptless.daemon.slurm.hostlist import expand

# Set by the SPANK plugin (`sbatch --ckptless`).
SPARES = "CKPTLESS_SPARES"
REPLICAS = "CKPTLESS_REPLICAS"
MAX_STALL = "CKPTLESS_MAX_STALL"


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, in Slurm's order. `tasks` and `gpus` per node are None where Slurm was not told."""

    job_id: int
    names: tuple[str, ...]
    tasks: int | None
    gpus: int | None
    in_step: bool
    local_id: int


@dataclass(frozen=True)
class Shape:
    """How a run uses its nodes: the first `nodes` train, the next `spares` wait; further ones stay unused."""

    nodes: int
    spares: int
    slots: int


def inside_slurm(env: Mapping[str, str]) -> bool:
    """Whether this process has an allocation around it."""
    return "SLURM_JOB_ID" in env and ("SLURM_JOB_NODELIST" in env or "SLURM_NODELIST" in env)


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Raises UsageError where Slurm's variables make no sense."""
    names = expand(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
    if not names or not env["SLURM_JOB_ID"].isdecimal():
        raise UsageError(
            "SLURM_JOB_ID or SLURM_JOB_NODELIST is damaged: run this in a job, or unset them for --local"
        )
    return Allocation(
        job_id=int(env["SLURM_JOB_ID"]),
        names=names,
        tasks=_first_number(env.get("SLURM_NTASKS_PER_NODE")),
        gpus=_gpus(env),
        in_step=env.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in env,
        local_id=int(env.get("SLURM_LOCALID", "0")),
    )


def number(env: Mapping[str, str], name: str) -> float | None:
    """A number that the SPANK plugin has set, or None. Raises UsageError."""
    text = env.get(name, "")
    if not re.fullmatch(r"\d+(\.\d+)?|", text):
        raise UsageError(f"{name} is {text!r}: it must be a number")
    return float(text) if text else None


def _first_number(text: str | None) -> int | None:
    """Of "2", or "2(x4)" as Slurm writes what is the same on many nodes."""
    found = re.match(r"\d+", text or "")
    return int(found.group()) if found else None


def _gpus(env: Mapping[str, str]) -> int | None:
    count = _first_number(env.get("SLURM_GPUS_ON_NODE"))
    return count or None


def shape(
    allocation: Allocation, env: Mapping[str, str], nodes: int | None, spares: int | None, slots: int | None
) -> Shape:
    """From the options where they are given, else from --ckptless, else from Slurm. Raises UsageError."""
    total = len(allocation.names)
    if spares is None:
        spares = int(number(env, SPARES) or 0)
    if nodes is None:
        nodes = total - spares
    if nodes < 1:
        raise UsageError(
            f"{spares} spares in an allocation of {total} nodes leave none that train: ask for more nodes"
        )
    if nodes + spares > total:
        raise UsageError(
            f"{nodes} nodes and {spares} spares are more than the {total} of the allocation: "
            f"ask sbatch for --nodes={nodes + spares}"
        )
    return Shape(nodes=nodes, spares=spares, slots=slots or allocation.tasks or allocation.gpus or 1)
