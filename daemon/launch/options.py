"""From the command line to a run: options checked, and completed from Slurm's environment."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ckptless.daemon.agent.config import DEFAULT_SHUTDOWN_S, SharedConfig
from ckptless.daemon.agent.versions.twin_check import TwinsMode
from ckptless.daemon.api.errors import UsageError
from ckptless.daemon.api.messages import JobSpec
from ckptless.daemon.control.domains import check_name
from ckptless.daemon.launch import allocation as slurm
from ckptless.daemon.launch.bounds import MAX_COPIES, MAX_STALL_S, MIN_STALL_S, check_alike, check_range
from ckptless.daemon.launch.data import data_config
from ckptless.daemon.launch.identity import launch_id, run_id
from ckptless.daemon.launch.local import LocalOptions
from ckptless.daemon.launch.preload import ALWAYS, preloads
from ckptless.daemon.launch.ready import DEFAULT_START_S
from ckptless.daemon.launch.replication import comm_interface, replication_config
from ckptless.daemon.launch.requeue import restarts
from ckptless.daemon.launch.saving import save_config, saved_step
from ckptless.daemon.launch.slurm import SlurmRun, make_log_dir, step_log_dir
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.launch.tier import check_spares, recovers
from ckptless.daemon.launch.torchrun import counted, shown
from ckptless.daemon.ledger.paths import LATEST
from ckptless.daemon.settings import DataSettings, ReplicationSettings, load_settings

Options = Mapping[str, object]

# torchrun's own name for it.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

DEFAULT_MAX_STALL_S = 300.0


def local_options(
    script: str, script_args: tuple[str, ...], options: Options, env: Mapping[str, str]
) -> LocalOptions:
    """Checked options, or UsageError with one sentence that says what to change."""
    answers_faults, options = recovers(options, env), counted(options)
    nodes, spares = _number(options, "nodes") or 1, _number(options, "spares") or 0
    slots = _number(options, "nproc_per_node") or 1
    job = str(options["job"] or f"local-{secrets.token_hex(3)}")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", job) or job == LATEST:
        raise UsageError(
            f"--job {job!r} names a folder: use letters, digits, and _ . - inside, and not {LATEST}"
        )
    if options["requeue"]:
        raise UsageError("--requeue is for a Slurm job: leave it out with --local")
    for name in ("replication_interface", "comm_interface"):
        if options[name]:
            text = "is for a Slurm job: with --local each node has an address of its own"
            raise UsageError(f"--{name.replace('_', '-')} {text}")
    state_dir, argv = options["state_dir"], _argv(script, script_args, options)
    return LocalOptions(
        argv=argv,
        domains=_local_domains(options, nodes + spares),
        module=bool(options["module"]),
        nodes=nodes,
        spares=spares,
        slots=slots,
        start_tries=_number(options, "max_restarts") or 0,
        max_stall_s=_max_stall(options) or DEFAULT_MAX_STALL_S,
        recovers=answers_faults,
        preload=_preload(argv, options, recovers=answers_faults),
        tee=shown(options, nodes, slots),
        copies=_number(options, "copies") or 2,
        twins=_twins(options),
        job=job,
        state_dir=state_dir if isinstance(state_dir, Path) else None,
        port=_number(options, "port") or 0,
        verbose=bool(options["verbose"]),
        save=save_config(options, nodes * slots),
        replication=replication_config(options, {}, ReplicationSettings()),
        data=data_config(options, DataSettings()),
        shutdown_s=shutdown_s(options, env),
        start_s=float(_number(options, "start_timeout") or DEFAULT_START_S),
    )


def slurm_run(
    script: str, script_args: tuple[str, ...], options: Options, env: Mapping[str, str]
) -> SlurmRun | StepRun:
    """A run on the nodes of the allocation around this process, or this task's part. Raises UsageError."""
    check_alike(env)  # first: beside salloc such a job has its lists of nodes under other names
    if not slurm.inside_slurm(env):
        raise UsageError("no Slurm allocation is around this command: add --local to run on this machine")
    for name in ("job", "state_dir", "port", "domains"):
        if options[name]:
            raise UsageError(f"--{name.replace('_', '-')} is for --local: leave it out in a Slurm job")
    argv, answers_faults = _argv(script, script_args, options), recovers(options, env)
    found, options = slurm.read_allocation(env), counted(options)
    shape = slurm.shape(
        found, env, _number(options, "nodes"), _number(options, "spares"), _number(options, "nproc_per_node")
    )
    check_spares(shape.spares, recovers=answers_faults)
    settings = load_settings()
    limits = settings.limits(_slurm_max_stall(options, env), _number(options, "max_restarts") or 0)
    tee, copies = shown(options, shape.nodes, shape.slots), _number(options, "copies") or _slurm_copies(env)
    replication = replication_config(options, env, settings.replication)
    comm = comm_interface(options, settings.comm)
    save, data = save_config(options, shape.nodes * shape.slots), data_config(options, settings.data)
    log_dir, job = _log_dir(options, found)  # the last that may be refused: it is made
    spec = JobSpec(
        job=job,
        command=argv,
        nodes=shape.nodes,
        spares=shape.spares,
        slots_per_node=shape.slots,
        limits=limits,
        names=found.names[: shape.nodes + shape.spares],
        run_id=run_id(env),
        launch=launch_id(env, in_step=found.step is not None),
        saved_step=saved_step(save),
        recovers=answers_faults,
    )
    config = SharedConfig(
        spec=spec,
        argv=argv,
        module=bool(options["module"]),
        cwd=str(Path.cwd()),
        daemon_socket=settings.daemon.socket,
        log_dir=str(log_dir),
        preload=_preload(argv, options, recovers=answers_faults),
        tee=tee,
        copies=copies,
        twins=_twins(options),
        outcome_dir=str(log_dir),
        save=save,
        replication=replication,
        restarts=restarts(env),
        comm_interface=comm,
        data=data,
        shutdown_s=shutdown_s(options, env),
        start_s=float(_number(options, "start_timeout") or DEFAULT_START_S),
        in_step=found.step is not None,
    )
    if found.step is not None:
        return _step_run(config, env, options, found.step)
    again, verbose = _number(options, "requeue") or 0, bool(options["verbose"])
    return SlurmRun(config=config, env=env, verbose=verbose, domains=settings.domains, requeue=again)


def _step_run(config: SharedConfig, env: Mapping[str, str], options: Options, step: slurm.Step) -> StepRun:
    if options["requeue"]:
        raise UsageError("--requeue is for a batch script: a task of srun cannot tell when all are over")
    # Failure domains stay unknown here: each task would find them out for itself, and all must say the same.
    first = step.local_id == 0
    says = first and step.node_id == 0
    return StepRun(config, env, first=first, says=says, verbose=bool(options["verbose"]))


def _slurm_max_stall(options: Options, env: Mapping[str, str]) -> float | None:
    """The job's own, if it has one. Raises UsageError."""
    asked = slurm.number(env, slurm.MAX_STALL)
    check_range(slurm.MAX_STALL, asked, MIN_STALL_S, MAX_STALL_S)
    return _max_stall(options) or asked


def _slurm_copies(env: Mapping[str, str]) -> int:
    """Raises UsageError."""
    asked = slurm.whole_number(env, slurm.REPLICAS)
    check_range(slurm.REPLICAS, asked, 1, MAX_COPIES)
    return 2 if asked is None else asked


def _log_dir(options: Options, found: slurm.Allocation) -> tuple[Path, str]:
    """The folder of this run, and the run's name. Raises UsageError."""
    parent = options["log_dir"] if isinstance(options["log_dir"], Path) else Path()
    if found.step is None:
        return make_log_dir(parent, found.job_id)
    return step_log_dir(parent, f"{found.job_id}.{found.step.run}")


def _argv(script: str, script_args: tuple[str, ...], options: Options) -> tuple[str, ...]:
    if (
        re.fullmatch(r"python[0-9.]*", Path(script).name)
        and script_args[script_args[:1] == ("-u",) :]
        and not options["module"]
    ):
        # `srun --ckptless python train.py`: the plugin puts ckptless-run in front of all of it.
        # Of python's own options -u alone is usual, and the agent's pipes need it no more.
        script, *rest = script_args[1:] if script_args[0] == "-u" else script_args
        script_args = tuple(rest)
        if script == "-m" and rest:
            raise UsageError(f"write ckptless-run -m {rest[0]}, without python in between")
    if options["module"]:
        return (script, *script_args)
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script}")
    return (os.path.abspath(script), *script_args)  # noqa: PTH100  # a link stays the name that the user gave


def _number(options: Options, name: str) -> int | None:
    value = options[name]
    return int(value) if isinstance(value, int) else None


def _twins(options: Options) -> TwinsMode:
    mode: TwinsMode = msgspec.convert(options["twins"], TwinsMode)
    return mode


def _local_domains(options: Options, count: int) -> tuple[str, ...]:
    """`JobSpec.domains` of a local run. Raises UsageError."""
    if not isinstance(text := options["domains"], str):
        return ()
    names = tuple(text.split(","))
    if len(names) != count:
        raise UsageError(f"--domains has {len(names)} names for {count} nodes: give one for each, spares too")
    return tuple(check_name(name) for name in names)


def shutdown_s(options: Options, env: Mapping[str, str]) -> float:
    """Seconds that ranks get to end after SIGTERM, by the option, or as torchrun by the environment."""
    given = options["shutdown_timeout"]
    if isinstance(given, int):
        return float(given)
    text = env.get(SHUTDOWN_TIMEOUT, "")
    if not re.fullmatch(r"\d{0,6}", text, re.ASCII):
        raise UsageError(f"{SHUTDOWN_TIMEOUT} is {text[:40]!r}: it must be a whole number of seconds")
    return float(text) if text else DEFAULT_SHUTDOWN_S


def _max_stall(options: Options) -> float | None:
    value = options["max_stall"]
    return float(value) if isinstance(value, int | float) else None


def _preload(argv: tuple[str, ...], options: Options, *, recovers: bool) -> tuple[str, ...]:
    given = options["preload"] if isinstance(options["preload"], tuple) else ()
    names = tuple(map(str, given))
    # Without recovery ckptless.run is plain PyTorch, and so is what is imported.
    return (
        preloads(argv, Path.cwd(), names, module=bool(options["module"])) if recovers else (*ALWAYS, *names)
    )
