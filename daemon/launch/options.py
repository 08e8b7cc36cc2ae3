"""Make a run of a command line: options are checked, and completed from Slurm's environment and the site.

What is not said on the command line is taken from `sbatch --ckptless`, then from ckptless.yaml.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeAlias

from msgspec.structs import replace

from ckptless.daemon.launch import allocation as slurm
from ckptless.daemon.launch import hostfile
from ckptless.daemon.launch.hosts import HostsRun
from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.meeting import MeetingRun, find_place
from ckptless.daemon.launch.preload import ALWAYS, preloads
from ckptless.daemon.launch.slurm import SlurmRun, make_log_dir, named_log_dir
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.launch.torchrun import count_nodes, count_ranks, shown
from ckptless.daemon.ledger.paths import LATEST
from ckptless.daemon.protocol import saved
from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.daemon.protocol.messages import JobSpec, Limits
from ckptless.daemon.protocol.saving import SaveConfig
from ckptless.daemon.replication.failure_domains import check_name
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.elastic import DEFAULT_GROW_S, check_allowed, check_may_draw, patience_s, sizes
from ckptless.daemon.settings.options import (
    DEFAULT_SHUTDOWN_S,
    NO_HET,
    RUN_ROWS,
    SHUTDOWN_TIMEOUT,
    DataSettings,
    ReplicationSettings,
    RunOptions,
    check_fits,
    run_options,
)
from ckptless.daemon.settings.policy import read_policy
from ckptless.daemon.settings.site import Settings, default_settings, load_settings
from ckptless.daemon.slurm.run_name import restarts

logger = logging.getLogger(__name__)

Given = Mapping[str, object]
Env = Mapping[str, str]

# Slurm sets it in every component of a heterogeneous job.
HET_SIZE = "SLURM_HET_SIZE"
# In every task of a job array.
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
# The same as --tier 1, for whoever cannot change the command.
ROOTLESS = "CKPTLESS_ROOTLESS"
# What makes no sense without recovery, and must not be dropped silently.
_NOT_FOR_TIER_1 = (
    *("spares", "max_restarts", "requeue", "save_dir", "save_every"),
    *("min_nodes", "max_nodes", "step", "sizes", "draw_in", "elastic_policy"),
)
# Why, and what to do.
_NOT_ON_HOSTS = {
    "rehearse": "it is done on this machine; leave the hosts out",
    "rehearse_steps": "leave it out",
    "requeue": "there is no queue; leave it out",
    "draw_in": "nobody gives further nodes; leave it out, and name more hosts as --spares",
    "log_dir": "the logs are below --state-dir",
}
Run: TypeAlias = LocalRun | HostsRun | MeetingRun | SlurmRun | StepRun


def run_of(script: str, script_args: tuple[str, ...], given: Given, env: Env) -> Run:
    """The run that a command line asks for: by --local, --hosts, an address to meet at, else Slurm."""
    if "local" in given and "hosts" in given:
        raise UsageError("--local and --hosts are two ways to run: leave one out")
    if "local" in given:
        return local_run(script, script_args, given, env)
    if "hosts" in given:
        return hosts_run(script, script_args, given, env)
    return (meeting_run if meets(given, env) else slurm_run)(script, script_args, given, env)


def meets(given: Given, env: Env) -> bool:
    """Whether somebody else has started this command on each node, and they are to meet."""
    addressed = given.get("master_addr") or env.get("MASTER_ADDR")
    return bool(addressed) and not ("local" in given or "hosts" in given or slurm.inside_slurm(env))


def local_run(script: str, script_args: tuple[str, ...], given: Given, env: Env) -> LocalRun:
    """A run on nodes that are made here, or UsageError with one sentence that says what to change."""
    options = run_options(given)
    _refuse(options, local=True)
    options, nodes, slots = _counts(options)
    argv = _argv(script, script_args, module=options.module)
    config = _own_config("local", argv, (nodes or 1, slots or 1), given, options, env)
    # The last that may be refused: it is made.
    log_dir = None if options.log_dir is None else named_log_dir(options.log_dir, config.spec.job)
    return LocalRun(
        config, state_dir=options.state_dir, log_dir=log_dir, port=options.port, verbose=options.verbose
    )


def hosts_run(script: str, script_args: tuple[str, ...], given: Given, env: Env) -> HostsRun:
    """A run on hosts that ssh reaches. Raises UsageError."""
    options = run_options(given)
    _refuse_on_hosts(options)
    options, nodes, slots = _counts(options)
    hosts, said = _hosts(options.hosts or Path(), nodes, options.spares)
    if None not in (slots, said) and slots != said:
        raise UsageError(
            f"--hosts {options.hosts} has slots={said}, and --nproc-per-node is {slots}: give one of them"
        )
    argv = _argv(script, script_args, module=options.module)
    shape = (len(hosts) - options.spares, slots or said or 1)
    config = _own_config("hosts", argv, shape, given, options, env)
    config = replace(config, spec=replace(config.spec, names=tuple(host.name for host in hosts)))
    state_dir = None if options.state_dir is None else options.state_dir.absolute()
    return HostsRun(config, hosts, env, state_dir=state_dir, port=options.port, verbose=options.verbose)


def _hosts(path: Path, nodes: int | None, spares: int) -> tuple[tuple[hostfile.Host, ...], int | None]:
    """Return the job's hosts by a hostfile, and the ranks on each if it says so. Raises UsageError."""
    where = f"--hosts {path}"
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{where} cannot be read ({error.strerror}): name a file of hosts") from error
    hosts = hostfile.choose(hostfile.read_hosts(text, where), nodes, spares, where)
    return hosts, hostfile.slots_of(hosts, where)


def meeting_run(script: str, script_args: tuple[str, ...], given: Given, env: Env) -> MeetingRun:
    """This node's part of a run whose nodes somebody else has started. Raises UsageError."""
    options = run_options(given)
    _refuse_on_hosts(options)
    options, nodes, slots = _counts(options)
    place = find_place(options, nodes, env)
    check_fits(options.spares, place.nodes)
    argv = _argv(script, script_args, module=options.module)
    config = _own_config("job", argv, (place.nodes - options.spares, slots or 1), given, options, env)
    return MeetingRun(config, place, state_dir=options.state_dir, verbose=options.verbose)


def _own_config(
    prefix: str, argv: tuple[str, ...], shape: tuple[int, int], given: Given, options: RunOptions, env: Env
) -> SharedConfig:
    """The configuration of a job that Slurm does not know, of this `shape`: nodes that train, ranks on each.

    Raises UsageError.
    """
    recovery, (nodes, slots) = recovers(given, env), shape
    job = options.job or f"{prefix}-{token_hex(3)}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", job) or job == LATEST:
        raise UsageError(
            f"--job {job!r} names a folder: use letters, digits, and _ . - inside, and not {LATEST}"
        )
    settings = default_settings()
    spec = JobSpec(
        job=job,
        command=argv,
        nodes=nodes,
        spares=options.spares,
        slots_per_node=slots,
        limits=_limits(options, settings),
        domains=_local_domains(options, nodes + options.spares),
        run_id=token_hex(16),
        launch=token_hex(16),
        recovers=recovery,
        **_elastic(options, nodes, options.spares, 0, recovery=recovery),
        **_drawing(options, recovery=recovery),
    )
    return _config(spec, argv, given, options, settings, env)


def slurm_run(script: str, script_args: tuple[str, ...], given: Given, env: Env) -> SlurmRun | StepRun:
    """A run on the nodes of the allocation around this process, or this task's part. Raises UsageError."""
    if env.get(HET_SIZE):  # first: beside salloc such a job has its lists of nodes under other names
        raise UsageError(NO_HET)
    if not slurm.inside_slurm(env):
        raise UsageError(
            "no Slurm allocation is around this command: add --local to run on this machine, --hosts FILE to "
            "run on hosts that ssh reaches, or --master-addr where it is started on each node"
        )
    options = run_options(given, env)
    _refuse(options, local=False)
    argv, recovery = _argv(script, script_args, module=options.module), recovers(given, env)
    found, (options, nodes, slots) = slurm.read_allocation(env), _counts(options)
    if options.nodes and count_nodes(options.nodes)[0] != nodes:
        # Between torchrun's two numbers the allocation decides.
        nodes = min(nodes or 0, len(found.names) - options.spares)
    shape = slurm.shape(found, nodes, options.spares, slots)
    if shape.spares and not recovery:
        raise UsageError(
            f"with --tier 1 ({ROOTLESS}=1) the {shape.spares} spares of sbatch --ckptless would do nothing: "
            "add --spares 0 to train on them too, or ask for none"
        )
    settings, in_step = load_settings(), found.step is not None
    elastic = _elastic(options, shape.nodes, shape.spares, restarts(env), recovery=recovery)
    drawing = _drawing(options, recovery=recovery)
    if elastic:
        check_allowed(settings.elastic, env.get("SLURM_JOB_PARTITION", ""), env.get("SLURM_JOB_QOS", ""))
    if drawing:
        check_may_draw(settings.elastic, in_step=in_step, in_array=ARRAY_TASK in env)
    spec = JobSpec(
        job=str(found.job_id),
        command=argv,
        nodes=shape.nodes,
        spares=shape.spares,
        slots_per_node=shape.slots,
        limits=_limits(options, settings),
        names=found.names[: shape.nodes + shape.spares],
        run_id=slurm.run_id(env),
        launch=slurm.launch_id(env) if in_step else token_hex(16),
        recovers=recovery,
        **elastic,
        **drawing,
    )
    config = _config(spec, argv, given, options, settings, env)
    log_dir, job = _log_dir(options, found)  # the last that may be refused: it is made
    config = replace(
        config,
        spec=replace(config.spec, job=job),
        log_dir=str(log_dir),
        outcome_dir=str(log_dir),
        draw_dir=str(log_dir),
        restarts=restarts(env),
        in_step=in_step,
    )
    if found.step is None:
        return SlurmRun(config, env, options.verbose, settings.domains, options.requeue)
    if options.requeue:
        raise UsageError("--requeue is for a batch script: a task of srun cannot tell when all are over")
    # Failure domains stay unknown here: each task would find them out for itself, and all must say the same.
    first = found.step.local_id == 0
    says = first and found.step.node_id == 0
    return StepRun(config, env, first=first, says=says, verbose=options.verbose)


def _config(
    spec: JobSpec, argv: tuple[str, ...], given: Given, options: RunOptions, settings: Settings, env: Env
) -> SharedConfig:
    """Return what both ways to run tell their agents. Raises UsageError.

    `argv` is what is run; `spec.command` is for people, and may have been shortened.
    """
    config = SharedConfig(
        spec=spec,
        argv=argv,
        module=options.module,
        cwd=str(Path.cwd()),
        daemon_socket=settings.daemon.socket,
        log_dir="",
        preload=_preload(spec, argv, options),
        tee=shown(options, max((spec.nodes, *spec.sizes)), spec.slots_per_node),
        copies=options.replicas,
        twins=options.twins,
        replication=replication_of(options, settings.replication),
        comm_interface=options.comm_interface or settings.comm.interface,
        data=data_of(options, settings.data),
        shutdown_s=shutdown_s(options, env),
        start_s=float(options.start_timeout),
        policy=_policy(spec, options),
        log_format=options.log_format,
    )
    save = save_config(given, options, spec.nodes * spec.slots_per_node)
    return replace(config, save=save, spec=replace(spec, saved_step=saved_step(save)))


def _policy(spec: JobSpec, options: RunOptions) -> str:
    """Return what the ranks are told of --elastic-policy; "" without one. Raises UsageError."""
    path = options.elastic_policy
    return "" if path is None else read_policy(path, spec.sizes or (spec.nodes,))


def _refuse(options: RunOptions, *, local: bool) -> None:
    """Raise UsageError for what belongs to the other way to run."""
    for row in RUN_ROWS:
        option = row.option
        if not getattr(options, row.name):
            continue
        if local and option.slurm_only:
            raise UsageError(f"{row.flags[-1]} is for a Slurm job: {option.slurm_only}")
        if not local and option.local_only:
            raise UsageError(f"{row.flags[-1]} is for --local: leave it out in a Slurm job")


def _refuse_on_hosts(options: RunOptions) -> None:
    """Raise UsageError for what belongs to Slurm, or to one machine alone."""
    for name, why in _NOT_ON_HOSTS.items():
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is not for hosts without Slurm: {why}")


def recovers(given: Given, env: Env) -> bool:
    """Whether faults are answered (tier 4), or process groups start without a root and that is all (tier 1).

    By the option, else by the environment. Raises UsageError.
    """
    tier = given.get("tier")
    if tier is None:
        text = env.get(ROOTLESS, "")
        if text not in ("", "0", "1"):
            raise UsageError(f"{ROOTLESS} is {text[:40]!r}: it must be 1, or 0, or not be set")
        tier = "1" if text == "1" else "4"
    if tier == "4":
        return True
    wrong = [name for name in _NOT_FOR_TIER_1 if given.get(name)]
    if wrong:
        name = wrong[0].replace("_", "-")
        raise UsageError(f"--{name} is for runs that recover: leave it out with --tier 1 ({ROOTLESS}=1)")
    return False


def _counts(options: RunOptions) -> tuple[RunOptions, int | None, int | None]:
    """Nodes that train, and ranks on each, where they are said. Raises UsageError.

    torchrun's `--nnodes MIN:MAX` is MAX nodes, and is in the options that come back as `min_nodes`.
    """
    nodes, ranks = None, options.nproc_per_node
    if options.nodes is not None:
        least, nodes = count_nodes(options.nodes)
        if ":" in options.nodes and options.min_nodes not in (None, least):
            raise UsageError(f"--nnodes {options.nodes} says --min-nodes, too: say it in one of these ways")
        options = options if least == nodes else dataclasses.replace(options, min_nodes=least)
    return options, nodes, None if ranks is None else count_ranks(ranks)


def _elastic(options: RunOptions, nodes: int, spares: int, started: int, *, recovery: bool) -> dict[str, Any]:
    """Return what `JobSpec` has of an elastic job; nothing for another one. Raises UsageError.

    `started`: how often Slurm had started the job before.
    """
    found = sizes(options, nodes, spares, again=started > 0)
    if not found:
        return {}
    if not recovery:
        raise UsageError(
            f"with --tier 1 ({ROOTLESS}=1) a job has the same nodes to its end: give --nnodes one number, "
            "and leave out min-nodes, max-nodes, step and sizes, in sbatch --ckptless too"
        )
    after_s = options.scale_up_after_s
    return {"sizes": found, "grow_after_s": DEFAULT_GROW_S if after_s is None else after_s}


def _limits(options: RunOptions, settings: Settings) -> Limits:
    """Return the deadlines, some of which are said for themselves."""
    found = settings.limits(options.max_stall_s, options.max_restarts)
    join_s = found.join_s if options.scale_timeout_s is None else options.scale_timeout_s
    leave_s = found.leave_s if options.graceful_s is None else options.graceful_s
    return replace(found, join_s=join_s, leave_s=leave_s)


def _drawing(options: RunOptions, *, recovery: bool) -> dict[str, Any]:
    """Return what `JobSpec` has of a job that may draw nodes in, if it may. Raises UsageError."""
    draw_s = patience_s(options)
    if not options.draw_in:
        return {}
    if not recovery:
        raise UsageError(
            f"with --tier 1 ({ROOTLESS}=1) a job has the same nodes to its end: add --draw-in 0, or leave "
            "draw-in out of sbatch --ckptless"
        )
    return {"late": options.draw_in, "draw_s": draw_s}


def _log_dir(options: RunOptions, found: slurm.Allocation) -> tuple[Path, str]:
    """The folder of this run, and the run's name. Raises UsageError."""
    parent = options.log_dir or Path()
    if found.step is None:
        return make_log_dir(parent, found.job_id)
    run = f"{found.job_id}.{found.step.run}"
    return named_log_dir(parent, run), run


def _argv(script: str, script_args: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    if (
        re.fullmatch(r"python[0-9.]*", Path(script).name)
        and script_args[script_args[:1] == ("-u",) :]
        and not module
    ):
        # `srun --ckptless python train.py`: the plugin puts ckptless-run in front of all of it.
        # Of python's own options -u alone is usual, and the agent's pipes need it no more.
        script, *rest = script_args[1:] if script_args[0] == "-u" else script_args
        script_args = tuple(rest)
        if script == "-m" and rest:
            raise UsageError(f"write ckptless-run -m {rest[0]}, without python in between")
    if module:
        return (script, *script_args)
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script}: name one that there is, or -m MODULE")
    return (os.path.abspath(script), *script_args)  # noqa: PTH100  # a link stays the name that the user gave


def _local_domains(options: RunOptions, count: int) -> tuple[str, ...]:
    """`JobSpec.domains` of a local run. Raises UsageError."""
    if options.domains is None:
        return ()
    names = tuple(options.domains.split(","))
    if len(names) != count:
        raise UsageError(f"--domains has {len(names)} names for {count} nodes: give one for each, spares too")
    return tuple(check_name(name) for name in names)


def shutdown_s(options: RunOptions, env: Env) -> float:
    """Seconds that ranks get to end after SIGTERM, by the option, or as torchrun by the environment."""
    if options.shutdown_timeout is not None:
        return float(options.shutdown_timeout)
    text = env.get(SHUTDOWN_TIMEOUT, "")
    if not re.fullmatch(r"\d{0,6}", text, re.ASCII):
        raise UsageError(f"{SHUTDOWN_TIMEOUT} is {text[:40]!r}: it must be a whole number of seconds")
    return float(text) if text else DEFAULT_SHUTDOWN_S


def _preload(spec: JobSpec, argv: tuple[str, ...], options: RunOptions) -> tuple[str, ...]:
    if not spec.recovers:
        # ckptless.run is plain PyTorch then, and so is what is imported.
        return (*ALWAYS, *options.preload)
    return preloads(argv, Path.cwd(), options.preload, module=options.module)


def replication_of(options: RunOptions, site: ReplicationSettings) -> ReplicationSettings:
    """Return how copies go to other nodes: as the run says, else as the site does."""
    own = options.replication_bandwidth_rate
    return ReplicationSettings(
        bandwidth_rate=(site.bandwidth_rate if own is None else own) or None,
        interface=options.replication_interface or site.interface,
    )


def data_of(options: RunOptions, site: DataSettings) -> DataSettings:
    """Return what training data may take: the lower of what the run and the site say."""
    return DataSettings(
        budget_nbytes=_lower(options.data_budget_nbytes, site.budget_nbytes),
        prefetch=_lower(options.data_prefetch, site.prefetch),
    )


def _lower(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


# ------------------------------------------------------------------------------------ saved steps


def save_config(given: Given, options: RunOptions, world_size: int) -> SaveConfig | None:
    """Return where steps are saved and which one to go on from; None without --save-dir. UsageError."""
    if options.save_dir is None:
        if options.save_every or "save_total_limit" in given:
            raise UsageError("--save-every and --save-total-limit need --save-dir")
        return None
    directory = options.save_dir.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = newest(directory)
    except OSError as error:
        raise UsageError(f"--save-dir {directory}: {error.strerror}") from error
    if found is not None:
        folder, ranks = found
        other = f", which {ranks} ranks have saved, with {world_size}" if ranks != world_size else ""
        logger.warning("going on from %s%s", folder, other)
    return SaveConfig(
        directory=str(directory),
        every=options.save_every,
        keep=options.save_total_limit,
        resume="" if found is None else str(found[0]),
    )


def saved_step(config: SaveConfig | None) -> int | None:
    """The step that is gone on from, where memory has no newer one."""
    return saved.step_of(Path(config.resume)) if config is not None and config.resume else None


def newest(directory: Path) -> tuple[Path, int] | None:
    """Return the newest saved step that is whole, and how many ranks have saved it. Raises OSError."""
    for _step, folder in saved.steps_in(directory):
        try:
            manifest = saved.read_manifest(folder)
        except (ProtocolError, FileNotFoundError) as error:
            logger.warning("%s is not used: %s", folder, error)
            continue
        return folder, manifest.world_size
    return None
