"""Pure: what Slurm's environment says of the job: its nodes, which train and which wait, and its identity."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.daemon.settings.options import check_fits
from ckptless.daemon.slurm.hostlist import expand
from ckptless.daemon.slurm.run_name import RESTARTS, restarts

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
    step: "StepTask | None" = None


@dataclass(frozen=True)
class StepTask:
    """A task of a step: `run` names the step among all of its job's, `local_id` this task on its node."""

    run: str
    node_id: int
    local_id: int


@dataclass(frozen=True)
class Shape:
    """The use of a run's nodes: the first `nodes` train, the next `spares` wait; further ones stay unused."""

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


def _step(env: Mapping[str, str]) -> StepTask | None:
    names = ("SLURM_STEP_ID", "SLURM_NODEID", "SLURM_LOCALID")
    numbers = [int(env[name]) for name in names if env.get(name, "").isdecimal()]
    if len(numbers) < len(names) or numbers[0] >= FIRST_SPECIAL_STEP:
        return None
    again = f"r{restarts(env)}" if restarts(env) else ""
    return StepTask(run=f"s{numbers[0]}{again}", node_id=numbers[1], local_id=numbers[2])


def _first_number(text: str | None) -> int | None:
    """Return the first number of "2", or "2(x4)" as Slurm writes what is the same on many nodes."""
    found = re.match(r"\d+", text or "")
    return int(found.group()) if found else None


def _gpus(env: Mapping[str, str]) -> int | None:
    count = _first_number(env.get("SLURM_GPUS_ON_NODE"))
    return count or None


def shape(allocation: Allocation, nodes: int | None, spares: int, slots: int | None) -> Shape:
    """Return how the run uses the allocation, by options, else by what Slurm says. Raises UsageError."""
    total = len(allocation.names)
    check_fits(spares, total)
    if nodes is None:
        nodes = total - spares
    if nodes + spares > total:
        raise UsageError(
            f"--nodes {nodes} and --spares {spares} are more than the {total} of the allocation: "
            f"ask sbatch for --nodes={nodes + spares}"
        )
    return Shape(nodes=nodes, spares=spares, slots=slots or allocation.tasks or allocation.gpus or 1)


# ------------------------------------------------------------------ what tells a run from others


# The same in every task of the job, and after a requeue. Slurm tells a job no time of submission, and what it
# tells others changes with a requeue; the SPANK plugin does, where the job was submitted with --ckptless.
# Without it an older job of the same number, user and cluster has the same run id.
JOB = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_SPANK_CKPTLESS_SUBMITTED")
# The same in every task of a step. Slurm tells the time of a job's start since 23.02; before, and without the
# plugin, it is srun's port that tells steps of one number apart.
STEP = (
    *JOB,
    *(RESTARTS, "SLURM_STEP_ID", "SLURM_JOB_START_TIME"),
    *("SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_PORT"),
)


def run_id(env: Mapping[str, str]) -> str:
    """`JobSpec.run_id` of a run in a Slurm job: the same for all runs of the job, requeued or not."""
    return _digest(env, JOB)


def launch_id(env: Mapping[str, str]) -> str:
    """`JobSpec.launch` of a run that is a step: its tasks each find the same one."""
    return _digest(env, STEP)


def _digest(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(env.get(name, "") for name in names).encode())
