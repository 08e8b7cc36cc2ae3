"""Launch on a cluster: a single-node step on each node of the allocation, an agent in each; wait for the end.

One step per node, since a multi-node step is aborted as a whole when one of its nodes comes back from a power
cycle before Slurm has noticed, whatever its flags say. Output goes to files: what srun carries is lost, and
blocks its task, when the batch host dies. The job outlives this process; then the daemons end it.
"""

import asyncio
import contextlib
import logging
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ckptless.daemon.agent.ranks.console import rank_log_path
from ckptless.daemon.agent.ranks.prctl import set_pdeathsig
from ckptless.daemon.agent.ranks.signals import ENDING, USERS
from ckptless.daemon.ckptlessd.planning.plan import EXIT_UNRECOVERABLE
from ckptless.daemon.ckptlessd.recovery.fencing import FORMING_DEADLINE_S
from ckptless.daemon.launch.console import Follower, log_end, tell_end
from ckptless.daemon.launch.draw_in import DrawIn
from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.protocol.errors import CkptlessError, StartError, UsageError
from ckptless.daemon.protocol.forming import clear, has_begun, nodes_up
from ckptless.daemon.protocol.log import LOG_PREFIX
from ckptless.daemon.protocol.messages import JobSpec, Outcome
from ckptless.daemon.protocol.outcome import read_outcome, write_outcome
from ckptless.daemon.replication.failure_domains import by_members
from ckptless.daemon.settings.agent_config import AGENT_CONFIG, SharedConfig, encoded
from ckptless.daemon.settings.elastic import check_grows
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import from_message
from ckptless.daemon.slurm.hostlist import compress
from ckptless.daemon.slurm.requeue import requeue, stay, why_requeue
from ckptless.daemon.slurm.run_name import slurm_job_id
from ckptless.daemon.slurm.text import read_topology

logger = logging.getLogger(__name__)

POLL_S = 0.1
# How an agent ends that has not come as far as to be heard.
CANNOT_START = (UsageError.exit_code, StartError.exit_code)
# What an agent and its step may take for their end, beyond what its ranks and the last save may. Slurm's own
# KillWait is 30 s by default.
LEAVE_GRACE_S = 15.0
KILL_DEADLINE_S = 5.0
CONFIG_DEADLINE_S = 10.0
MAX_RUNS = 10_000
# Slurm starts a task with the default for all signals: one may come before an agent can say what it ignores.
DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")
# Under load Slurm may fail to launch a step ("Socket timed out on send/recv operation").
STEP_TRIES, STEP_PAUSE_S = 3, 2.0
# srun takes these for options of its own.
NOT_FOR_STEPS = frozenset(
    (
        *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE"),
        *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_NTASKS_PER_GPU"),
        *("SLURM_GPU_BIND", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU"),
    )
)
# While a run forms: how often to look, the first line about it, and the longest pause to the next one.
LOOK_S, FIRST_S, LONGEST_S = 1.0, 5.0, 60.0
TOPOLOGY_DEADLINE_S = 10.0
# They go to the agents with all the rest in one variable of the environment, where 128 KiB is the end: longer
# names become numbers.
MOST_TEXT = 16_000


@dataclass
class NodeStep:
    """One node's srun, and the files its agent writes to."""

    name: str
    console: Path
    log: Path
    process: asyncio.subprocess.Process | None = None
    tries: int = 1
    again_s: float | None = None
    # Training has begun without its node: at the job's end it is not waited for. An srun that was about to
    # launch its step when the node died stays for a minute or more.
    given_up: bool = False

    @property
    def state(self) -> str:
        """The knowledge of it while its agent is not up."""
        if self.process is not None and self.process.returncode is not None:
            return f"its step has ended with {self.process.returncode}: {_last_line(self.log)}"
        if not self.log.exists():
            return "its step has not begun"
        # Without time and name: nodes that say the same are told of together.
        return f"its agent starts up: {LOG_PREFIX.sub('', _last_line(self.log))}"

    @property
    def running(self) -> bool:
        """Whether its srun is still there."""
        return self.process is not None and self.process.returncode is None


def waiting_text(spec: JobSpec, missing: Mapping[str, str], waited_s: float) -> str:
    """The line for nodes that are `missing`, each with what is known of it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in missing.items():
        reasons.setdefault(reason, []).append(name)
    who = "; ".join(f"{compress(names)} ({reason})" for reason, names in reasons.items())
    total = spec.nodes + spec.spares
    if len(missing) <= spec.spares:
        allowed = "1 spare allows" if spec.spares == 1 else f"{spec.spares} spares allow"
        end = f"the job begins without, as its {allowed}"
    else:
        end = "the job ends (never-formed)"
    return (
        f"waiting for {who}; {total - len(missing)} of {total} nodes are up after {waited_s:.0f} s. "
        f"After {FORMING_DEADLINE_S:.0f} s, or when Slurm has them down, {end}"
    )


class Forming:
    """Says in the job's own output whom it waits for before its first generation, and what will end that.

    Owned by the launcher's event loop; `state` says of a node's step what is known of it.
    """

    def __init__(self, spec: JobSpec, log_dir: Path, state: Callable[[str], str], began_s: float) -> None:
        self._spec, self._log_dir, self._state = spec, log_dir, state
        self._began_s, self._looked_s = began_s, began_s
        self._next_s, self._pause_s = began_s + FIRST_S, FIRST_S
        self.over = False

    def missing(self) -> tuple[str, ...]:
        """The nodes whose agents are not up, in the job's order."""
        up = nodes_up(self._log_dir)
        return tuple(name for name in self._spec.names if name not in up)

    def look(self, now_s: float) -> tuple[str, ...]:
        """Now and then: say what has become of it. The nodes without which training has just begun."""
        if self.over or now_s - self._looked_s < LOOK_S:
            return ()
        self._looked_s = now_s
        begun = has_begun(self._log_dir)
        if not begun and now_s < self._next_s:
            return ()
        missing = self.missing()
        if begun:
            self.over = True
            if missing:
                logger.warning("training begins without %s", compress(missing))
            clear(self._log_dir)
            return missing
        if missing:
            states = {name: self._state(name) for name in missing}
            logger.warning("%s", waiting_text(self._spec, states, now_s - self._began_s))
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
            self._next_s = now_s + self._pause_s
        return ()


@dataclass
class SlurmRun:
    """One `ckptless-run` in a batch script (or beside salloc).

    `domains` is the site's table of failure domains, if it has one. `requeue`: how often the job may go back
    into the queue where it cannot go on.
    """

    config: SharedConfig
    env: Mapping[str, str]
    verbose: bool = False
    domains: Mapping[str, tuple[str, ...]] | None = None
    requeue: int = 0
    binding: tuple[str, ...] = ()
    _steps: list[NodeStep] = field(default_factory=list)
    _stop: signal.Signals | None = None

    @property
    def log_dir(self) -> Path:
        """The folder of output and outcome, on a file system that every node sees."""
        return Path(self.config.log_dir)

    async def run(self) -> int:
        """Start the agents, pass their output on, and wait for the end. The exit code."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._stopped, number)
        for number in USERS:
            loop.add_signal_handler(number, self._signal, number)
        spec = self.config.spec
        shape = f"nodes {spec.nodes}, spares {spec.spares}"
        logger.info("job %s: %s; output in %s", spec.job, shape, self.log_dir)
        # no deadline: each has its own
        slurm, domains = await asyncio.gather(slurm_config(), find_domains(spec.names, self.domains))
        if spec.late:
            check_grows(slurm)
        self.binding = cpu_binding(slurm)
        # Once, here: all agents must tell the same.
        self.config = replace(self.config, spec=replace(spec, domains=domains))
        try:
            for name in spec.names:
                self._steps.append(await self._start(name))
            await self._wait()
        finally:
            await self._end_all()
        await self._requeue()
        code = self._result()
        if self._ended_by_signal:
            await stay(slurm_job_id(self.config.spec.job))
        return code

    @property
    def _ended_by_signal(self) -> bool:
        """Whether the agents, or this process, got a signal that may be Slurm's; Ctrl-C is the user's."""
        outcome = self.outcome()
        if outcome is not None and outcome.why != "cancelled":
            return False
        return outcome is not None or self._stop is signal.SIGTERM

    def _stopped(self, number: signal.Signals) -> None:
        if self._stop is None:
            self._stop = number

    async def _start(self, name: str) -> NodeStep:
        step = NodeStep(name, self.log_dir / f"console-{name}.out", self.log_dir / f"agent-{name}.log")
        await self._launch(step)
        return step

    async def _launch(self, step: NodeStep) -> None:
        # Slurm writes through to the file as it comes, and the agent's own log is line by line.
        words = [
            *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={step.name}"),
            *("--overlap", "--open-mode=append"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none", *self.binding),
            *(f"--output={step.console}", f"--error={step.log}", "--quiet", "--job-name=ckptless"),
            *(*DEAF, sys.executable, "-m", "ckptless.daemon.agent.main", "--slurm"),
        ]
        if self.verbose:
            words.append("--verbose")
        try:
            step.process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                env=step_env(self.env, self.config),
                preexec_fn=_tie,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise StartError("there is no srun in PATH: is this a node of the cluster?") from None

    async def _wait(self) -> None:
        """Wait until every agent's step is over, or is late: after the job's end, or the user's signal."""
        loop = asyncio.get_running_loop()
        follower = Follower([step.console for step in self._steps], sys.stdout.buffer)
        told, deadline = False, None
        states = {step.name: step for step in self._steps}
        forming = Forming(self.config.spec, self.log_dir, lambda name: states[name].state, loop.time())
        draws = self._draws(follower)
        while any(step.running and not step.given_up for step in self._steps) or self._starts_again:
            await asyncio.sleep(POLL_S)
            follower.pass_on()
            if self._stop is not None and not told:
                logger.warning("%s: ending the job", self._stop.name)
                told, deadline = True, loop.time() + self._leave_s
                self._signal(signal.SIGTERM)
            if self.outcome() is None:
                given_up = forming.look(loop.time())
                for step in self._steps:
                    step.given_up |= step.name in given_up
                await self._mend_start(forming, loop.time())
                if forming.over and self._stop is None:
                    ended = {n for n, step in enumerate(self._steps) if not step.running}
                    await draws.look(loop.time(), ended)
            elif deadline is None:
                deadline = loop.time() + self._leave_s
            if deadline is not None and loop.time() > deadline:
                late = ", ".join(step.name for step in self._steps if step.running and not step.given_up)
                logger.warning("the steps on %s do not end; they are killed", late)
                break
        await draws.close()
        follower.pass_on(last=True)

    def _draws(self, follower: Follower) -> DrawIn:
        spec = self.config.spec
        late = LateNodes(len(spec.names), spec.late)

        async def start(name: str) -> None:
            known = self.config.spec
            self.config = replace(self.config, spec=replace(known, names=(*known.names, name)))
            step = await self._start(name)
            self._steps.append(step)
            follower.add(step.console)

        return DrawIn(slurm_job_id(spec.job), late, self.log_dir, spec.names, start)

    @property
    def _leave_s(self) -> float:
        return self.config.leave_s + LEAVE_GRACE_S

    @property
    def _starts_again(self) -> bool:
        """Whether there is a step that Slurm is to launch once more, and the job is not over."""
        return any(step.again_s is not None for step in self._steps) and self.outcome() is None

    async def _mend_start(self, forming: Forming, now_s: float) -> None:
        """Start what Slurm could not launch once more; the others would wait for it in vain.

        An agent that could not start tells so by its exit code: StartError.
        """
        ended = [] if forming.over else [s for s in self._steps if s.process is not None and not s.running]
        missing = forming.missing() if ended else ()
        for step in ended:
            assert step.process is not None
            if step.name not in missing or self._stop is not None:
                step.again_s = None
            elif step.process.returncode in CANNOT_START:
                raise StartError(f"{step.name}: {_last_line(step.log)}")
            elif step.again_s is None and step.tries < STEP_TRIES:
                step.again_s = now_s + STEP_PAUSE_S * step.tries
                logger.warning("%s: %s; it is started again", step.name, step.state)
            elif step.again_s is not None and now_s >= step.again_s:
                step.tries, step.again_s = step.tries + 1, None
                await self._launch(step)

    def _signal(self, number: signal.Signals) -> None:
        for step in self._steps:
            if step.running and step.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    step.process.send_signal(number)

    async def _end_all(self) -> None:
        """srun passes SIGTERM on to its agent; SIGKILL ends what is left of the steps."""
        for number, patience_s in ((signal.SIGTERM, LEAVE_GRACE_S), (signal.SIGKILL, KILL_DEADLINE_S)):
            running = [step.process for step in self._steps if step.running and step.process is not None]
            if not running:
                return
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.gather(*(process.wait() for process in running))

    # ----------------------------------------------------------------------------------- the end

    async def _requeue(self) -> None:
        """The last rung. Where nobody is left who knows better, this process says how this start ended."""
        outcome, spec = self.outcome(), self.config.spec
        why = None if self._stop is not None else why_requeue(outcome, self.requeue, self.env)
        if why is None or not await requeue(slurm_job_id(spec.job), why):
            return
        if outcome is None:
            failed = Outcome(state="failed", exit_code=EXIT_UNRECOVERABLE, reason=why, why="no-quorum")
            write_outcome(self.log_dir, spec.job, failed, spec.launch)

    def outcome(self) -> Outcome | None:
        """The end as agents wrote it, in the log directory that they share with this process."""
        return read_outcome(self.log_dir, self.config.spec.job, self.config.spec.launch)

    def _result(self) -> int:
        outcome = self.outcome()
        if outcome is None:
            if self._stop is not None:
                return 128 + self._stop
            raise StartError(f"no agent is left, and none could say why; their logs are in {self.log_dir}")
        log = rank_log_path(self.log_dir, outcome.rank) if outcome.rank is not None else None
        return tell_end(self.config.spec.job, outcome, log, str(self.log_dir))


def _tie() -> None:
    """Runs in the child before exec: srun is to end when this process does, and by no signal of a user's."""
    set_pdeathsig(signal.SIGKILL)
    for number in USERS:
        signal.signal(number, signal.SIG_IGN)


async def slurm_config() -> dict[str, str]:
    """Return the settings of Slurm that scontrol shows, by name; none where it does not answer."""
    try:
        async with asyncio.timeout(CONFIG_DEADLINE_S):
            pipe = asyncio.subprocess.PIPE
            asked = await asyncio.create_subprocess_exec("scontrol", "show", "config", stdout=pipe)
            text, _ = await asked.communicate()
    except (OSError, TimeoutError):
        return {}
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text.decode(errors="replace"), re.MULTILINE))


def cpu_binding(config: Mapping[str, str]) -> tuple[str, ...]:
    """An agent's ranks share its step, which must not be bound to one task's CPUs (if Slurm binds at all)."""
    plugins = config.get("TaskPlugin", "affinity")
    return ("--cpu-bind=none",) if "affinity" in plugins or "cgroup" in plugins else ()


def step_env(env: Mapping[str, str], config: SharedConfig) -> dict[str, str]:
    """The environment of a node's srun, and so of its agent and ranks.

    What sbatch says of a task's share would shrink the step to that, and what it says of the whole job does
    not fit on one node: an agent has all that the job has on its node.
    """
    kept = {name: value for name, value in env.items() if name not in NOT_FOR_STEPS}
    kept[AGENT_CONFIG] = encoded(config)
    return kept


def make_log_dir(parent: Path, job_id: int) -> tuple[Path, str]:
    """A folder of this run alone, and the run's name: 4711, then 4711.1 for the job's next run or start.

    Making it decides: two runs of one job cannot get the same. Raises UsageError.
    """
    for number in range(MAX_RUNS):
        name = f"{job_id}.{number}" if number else str(job_id)
        folder = parent / f"ckptless-{name}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror}; choose another --log-dir") from error
        return folder.absolute(), name
    raise UsageError(f"{parent} holds {MAX_RUNS} runs of job {job_id}: choose another --log-dir")


def named_log_dir(parent: Path, run: str) -> Path:
    """The folder of a run of this name; whichever task of a step comes first makes it. Raises UsageError."""
    folder = parent / f"ckptless-{run}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}; choose another --log-dir") from error
    return folder.absolute()


def _last_line(path: Path) -> str:
    try:
        lines = log_end(path)
    except OSError:
        lines = []
    return lines[-1] if lines else "its agent did not start, and said nothing"


# ------------------------------------------------------------------------------- failure domains


async def find_domains(names: Sequence[str], site: Mapping[str, Sequence[str]] | None) -> tuple[str, ...]:
    """`JobSpec.domains` for nodes of these names: from the site's own table, or from Slurm's topology.

    Says in a line of the log what it found. Raises nothing of Slurm's or ours: then no domain is known.
    """
    found, source = by_members(names, site or {}), "the settings"
    if site is None:
        try:
            found, source = by_members(names, await _topology()), "Slurm's topology"
        except CkptlessError as error:
            logger.info("failure domains are not known: %s", error)
            return ()
    if not found:
        logger.info("failure domains are not known: every node counts as one of its own")
        return ()
    known = sorted({domain for domain in found if domain})
    parts = [
        f"{domain} {compress(name for name, its in zip(names, found, strict=True) if its == domain)}"
        for domain in known[:8]
    ]
    more = f", and {len(known) - 8} more" if len(known) > 8 else ""
    logger.info("failure domains, from %s: %s%s", source, ", ".join(parts), more)
    if sum(map(len, found)) > MOST_TEXT:
        found = tuple(str(known.index(domain)) if domain else "" for domain in found)
    return found


async def _topology() -> dict[str, tuple[str, ...]]:
    done = await Commands().command(Deadline(TOPOLOGY_DEADLINE_S), "scontrol", "show", "topology")
    if done.status != 0:
        raise from_message("show its topology", done.err or done.out)
    return read_topology(done.out)
