"""Pure: what Slurm's environment says of the allocation, and which of its nodes train and which wait."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptless.daemon.api.errors import ProtocolError, UsageError
from ckptless.daemon.launch.bounds import MAX_SPARES, check_fits, check_range
from ckptless.daemon.slurm.hostlist import expand

# Set by the SPANK plugin (`sbatch --ckptless`).
SPARES = "CKPTLESS_SPARES"
REPLICAS = "CKPTLESS_REPLICAS"
MAX_STALL = "CKPTLESS_MAX_STALL"
# slurm.h: the batch script, an interactive step and others of Slurm's own have numbers from here on.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, in Slurm's order. `tasks` and `gpus` per node are None where Slurm was not told.

    `step` is there where this is a task of one (not of the batch script's own, or of an interactive one).
    """

    job_id: int
    names: tuple[str, ...]
    tasks: int | None
    gpus: int | None
    step: "Step | None" = None


@dataclass(frozen=True)
class Step:
    """A task of a step: `run` names the step among all of its job's, `local_id` this task on its node."""

    run: str
    node_id: int
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
    step = _step(env)
    listed = env.get("SLURM_STEP_NODELIST") if step is not None else None
    try:
        names = expand(listed or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
    except ProtocolError as error:
        raise UsageError(f"SLURM_JOB_NODELIST is damaged ({error}): run this in a job") from error
    if not names or not env["SLURM_JOB_ID"].isdecimal():
        raise UsageError(
            "SLURM_JOB_ID or SLURM_JOB_NODELIST is damaged: run this in a job, or unset them for --local"
        )
    return Allocation(
        job_id=int(env["SLURM_JOB_ID"]),
        names=names,
        tasks=_first_number(env.get("SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_NTASKS_PER_NODE")),
        gpus=_gpus(env),
        step=step,
    )


def _step(env: Mapping[str, str]) -> Step | None:
    names = ("SLURM_STEP_ID", "SLURM_NODEID", "SLURM_LOCALID")
    numbers = [int(env[name]) for name in names if env.get(name, "").isdecimal()]
    if len(numbers) < len(names) or numbers[0] >= FIRST_SPECIAL_STEP:
        return None
    restarts = env.get("SLURM_RESTART_COUNT", "0")
    again = f"r{restarts}" if restarts.isdecimal() and int(restarts) else ""
    return Step(run=f"s{numbers[0]}{again}", node_id=numbers[1], local_id=numbers[2])


def number(env: Mapping[str, str], name: str) -> float | None:
    """A number that the SPANK plugin has set, or None. Raises UsageError."""
    text = env.get(name, "")
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|", text):
        raise UsageError(f"{name} is {text[:40]!r}: it must be a number")
    return float(text) if text else None


def whole_number(env: Mapping[str, str], name: str) -> int | None:
    """The same for what is counted. Raises UsageError."""
    found = number(env, name)
    if found is not None and found != int(found):
        raise UsageError(f"{name} is {found}: it must be a whole number")
    return None if found is None else int(found)


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
        spares = whole_number(env, SPARES) or 0
        check_range(SPARES, spares, 0, MAX_SPARES)
    check_fits(spares, total)
    if nodes is None:
        nodes = total - spares
    if nodes + spares > total:
        raise UsageError(
            f"--nodes {nodes} and --spares {spares} are more than the {total} of the allocation: "
            f"ask sbatch for --nodes={nodes + spares}"
        )
    return Shape(nodes=nodes, spares=spares, slots=slots or allocation.tasks or allocation.gpus or 1)
