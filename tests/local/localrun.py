"""Start `ckptless-run --local` on a script, wait for it, and see what it did and what it left behind."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptless.daemon.ledger.event_kinds import KINDS
from ckptless.daemon.ledger.merge import Snapshot, read_all

HERE = Path(__file__).parent
TOY = HERE / "toy.py"
RANKS = 4
STEPS = 170

# In the environment of everything that a run starts, whatever becomes of its parents.
MARK = "CKPTLESS_TEST_RUN"
# A file that every job's faults and recoveries are written to at its end: of a machine that one has once.
STORIES = os.environ.get("CKPTLESS_TEST_STORIES")
LAUNCHER = ("-m", "ckptless.daemon.launch.main")
LEAVE_DEADLINE_S = 15.0
POLL_S = 0.03
FAULTY_DEADLINE_S = 200.0
LISTEN = "0A"  # /proc/net/tcp's word for a listening socket

Fault = dict[str, Any]
Lines = dict[tuple[int, int], set[str]]


def wait_until(what: Callable[[], object], deadline_s: float, job: Job) -> None:
    """Fails, with the run's story, where `what` stays false or the run ends before."""
    limit = time.monotonic() + deadline_s
    while not what():
        if job.launcher.poll() is not None:
            raise AssertionError(f"it has ended with {job.launcher.returncode}:\n{job.story()}")
        if time.monotonic() > limit:
            raise AssertionError(f"not within {deadline_s:.0f} s:\n{job.story()}")
        time.sleep(POLL_S)


class Job:
    """One launcher and everything that it starts; a context manager that leaves nothing running."""

    def __init__(
        self,
        home: Path,
        options: Sequence[object],
        script: Sequence[object],
        env: Mapping[str, str] | None = None,
        *,
        state_dir: Path | None = None,
        cwd: Path | None = None,
        launcher: Sequence[str] = LAUNCHER,
        way: Sequence[object] = ("--local",),
    ) -> None:
        self.state_dir = state_dir or home / "state"
        command = [sys.executable, *launcher, *map(str, way)]
        command += ["--state-dir", str(self.state_dir), *map(str, options), *map(str, script)]
        self._begin(home, command, env or {}, cwd)

    def _begin(self, home: Path, command: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> None:
        self.home = home
        self.mark = secrets.token_hex(8)
        home.mkdir(parents=True, exist_ok=True)
        self._out, self._err = home / "stdout.txt", home / "stderr.txt"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TOY_", "CKPTLESS_"))}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**inherited, **env, MARK: self.mark},
                cwd=cwd,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if STORIES:
            with Path(STORIES).open("a") as stories:
                stories.write(self.facts())
        limit = time.monotonic() + LEAVE_DEADLINE_S
        while (pids := self.processes()) and time.monotonic() < limit:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.poll()
            time.sleep(POLL_S)
        self.launcher.wait(LEAVE_DEADLINE_S)
        if kind is None:
            # What people are told of stands in docs/events.md.
            unknown = {event.kind for event in self.ledger().events} - KINDS.keys()
            assert not unknown, f"daemon/ledger/event_kinds.py does not have {sorted(unknown)}"

    # ------------------------------------------------------------------------------- what it says

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, deadline_s: float = 100.0) -> int:
        """The launcher's exit code."""
        try:
            return self.launcher.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end in {deadline_s:.0f} s:\n{self.story()}") from None

    def ledger(self) -> Snapshot:
        return read_all(self.state_dir)

    def story(self) -> str:
        """Everything that tells why a run went wrong."""
        events = [
            f"{e.at_s:.3f} node-{e.node} g{e.generation} {e.kind}: {e.text}" for e in self.ledger().events
        ]
        logs = [
            f"--- {path.relative_to(self.state_dir)}\n{text[-1500:]}"
            for path in sorted(self.state_dir.glob("node-*/**/*.log"))
            if (text := path.read_text(errors="replace"))
        ]
        return "\n".join([self.stderr, *events[-60:], *logs])

    def facts(self) -> str:
        """Faults, recoveries with their phases (seconds), and events."""
        found = self.ledger()
        lines = [f"==== {os.environ.get('PYTEST_CURRENT_TEST')}"]
        lines += [
            f"{e.at_s:.3f} node-{e.node} g{e.generation} {e.kind}: {e.text[:300]}" for e in found.events
        ]
        lines += [f"fault {one.kind} rank {one.rank}: {one.detail[:300]}" for one in found.faults]
        lines += [f"recovery {one.outcome} {one.rung} {json.dumps(one.phases)}" for one in found.recoveries]
        return "\n".join([*lines, ""])

    # -------------------------------------------------------------------------- what is left of it

    def processes(self) -> list[int]:
        """Every living process of this run, zombies left out."""
        mark, home = os.fsencode(f"{MARK}={self.mark}"), os.fsencode(self.state_dir)
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            except OSError:
                continue
            if (mark in words or home in words) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        return found

    def pid_of(self, node: int, what: str) -> int | None:
        """The process of a node's "daemon" or "agent"."""
        config = os.fsencode(self.state_dir / f"node-{node}" / f"{what}.json")
        program = f"ckptless.daemon.{'agent' if what == 'agent' else 'ckptlessd'}.main".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().split(b"\0")
                if config in line and program in line:
                    return int(entry.name)
        return None

    def sockets(self) -> list[str]:
        """Abstract Unix sockets and listening TCP ports of this run."""
        configs = [json.loads(path.read_text()) for path in self.state_dir.glob("node-*/daemon.json")]
        prefixes = {re.sub(r"-\d+-daemon$", "-", config["socket"]) for config in configs}
        unix = Path("/proc/net/unix").read_text().splitlines()
        found = [line for line in unix if any(prefix in line for prefix in prefixes)]
        own = {peer["address"] for config in configs for peer in config["peers"]}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address = str(ipaddress.ip_address(int.from_bytes(bytes.fromhex(local[:8]), "little")))
            if state == LISTEN and address in own:
                found.append(f"{address}:{int(local[9:], 16)} listens")
        return found

    def nothing_left(self, deadline_s: float = LEAVE_DEADLINE_S) -> None:
        """Fails where a process or socket outlives the run for so long."""
        limit = time.monotonic() + deadline_s
        while (left := [*map(_describe, self.processes()), *self.sockets()]) and time.monotonic() < limit:
            self.launcher.poll()
            time.sleep(POLL_S)
        assert not left, "left behind:\n" + "\n".join(left)

    def ended(self, code: int, deadline_s: float = 100.0) -> None:
        """Waits for the end, which must be this one and leave nothing."""
        found = self.wait(deadline_s)
        assert found == code, f"exit code {found}, not {code}:\n{self.story()}"
        self.nothing_left()

    def refused(self, code: int, *words: str) -> None:
        """It does not start: the exit code, and one sentence that has these words."""
        self.ended(code, 30.0)
        errors = [line for line in self.stderr.splitlines() if "rror:" in line]
        assert len(errors) == 1, self.stderr
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in errors[0], self.stderr


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"
    return f"process {pid}"


def lose_node(job: Job, node: int) -> None:
    """The daemon goes first, so that nobody can say goodbye; the agent's death takes its ranks."""
    for what in ("daemon", "agent"):
        pid = job.pid_of(node, what)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


# ----------------------------------------------------------------------------------------- the toy


@dataclass(frozen=True)
class Result:
    """What a run of the toy left: its loss lines, the end of each rank, and the faults that struck."""

    losses: Lines
    finals: dict[int, str]
    struck: frozenset[int]
    generations: frozenset[int]


def read_toy(out: Path) -> Result:
    losses: Lines = {}
    generations: set[int] = set()
    for path in out.glob("loss-*.txt"):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            step, loss, seen, _when, generation = line.split()
            losses.setdefault((rank, int(step)), set()).add(f"{loss} {seen}")
            generations.add(int(generation))
    return Result(
        losses=losses,
        finals={int(p.stem.split("-")[1]): p.read_text() for p in out.glob("final-*.txt")},
        struck=frozenset(int(path.name.split("-")[1]) for path in out.glob("struck-*")),
        generations=frozenset(generations),
    )


@contextlib.contextmanager
def toy(
    home: Path,
    faults: Sequence[Fault] = (),
    *,
    nodes: int = RANKS,
    spares: int = 0,
    per_node: int = 1,
    steps: int = STEPS,
    options: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = LAUNCHER,
) -> Iterator[Job]:
    """A running toy; every time limit follows from --max-stall 60 (a stopped process is seen in 2 s)."""
    words = ["--nodes", nodes, "--spares", spares, "--nproc-per-node", per_node, "--max-stall", 60]
    words += ["--tee", "none", *options]
    script = [TOY, steps, home / "out", json.dumps(list(faults))]
    with Job(home, words, script, env, launcher=launcher) as job:
        yield job


@functools.cache
def reference(steps: int = STEPS, ranks: int = RANKS, parallel: str = "ddp", device: str = "cpu") -> Result:
    """The fault-free run that all others are compared with; made once."""
    with tempfile.TemporaryDirectory(prefix="ckptless-reference-") as scratch:
        home = Path(scratch)
        with toy(home, nodes=ranks, steps=steps, env={"TOY_PARALLEL": parallel, **on(device)}) as job:
            job.ended(0)
        found = read_toy(home / "out")
    assert set(found.losses) == {(rank, step) for rank in range(ranks) for step in range(1, steps + 1)}
    assert all(len(lines) == 1 for lines in found.losses.values())
    assert set(found.finals) == set(range(ranks))
    assert found.generations == {1}
    return found


def on(device: str) -> dict[str, str]:
    """Return the toy's environment for a type of device; a script imports from its own folder alone, else."""
    return {} if device == "cpu" else {"TOY_DEVICE": device, "PYTHONPATH": str(HERE.parents[1])}


def newest_loss(home: Path) -> int:
    """The newest step of which any rank of this run has written its loss; 0 before there is one."""
    return max((step for _, step in read_toy(home / "out").losses), default=0)


def same_as_reference(
    job: Job,
    faults: Sequence[Fault],
    steps: int = STEPS,
    ranks: int = RANKS,
    parallel: str = "ddp",
    device: str = "cpu",
) -> Snapshot:
    """Every loss of every rank, redone ones too, and the end of every rank are those without a fault."""
    clean, found, ledger = reference(steps, ranks, parallel, device), read_toy(job.home / "out"), job.ledger()
    assert found.struck == frozenset(range(len(faults))), (
        f"did not strike: {[f for n, f in enumerate(faults) if n not in found.struck]}\n{job.story()}"
    )
    wrong = {where: lines for where, lines in found.losses.items() if lines != clean.losses.get(where)}
    assert not wrong, f"other losses than without a fault: {sorted(wrong.items())[:8]}\n{job.story()}"
    assert set(found.losses) == set(clean.losses), "losses are missing"
    assert found.finals == clean.finals, "other parameters, buffers or moments at the end"
    (row,) = ledger.jobs
    assert (row.state, row.exit_code) == ("done", 0)
    assert not ledger.problems
    return ledger


def recovered(ledger: Snapshot) -> list[Any]:
    """Recoveries that came to their end; each must have every phase."""
    whole = [recovery for recovery in ledger.recoveries if recovery.outcome == "recovered"]
    for recovery in whole:
        assert list(recovery.phases) == ["detect", "stop", "leave", "agree", "join", "restore", "first step"]
    return whole


def fault(where: str, kind: str, rank: int, step: int | None = None, **more: Any) -> Fault:
    """One of the toy's faults."""
    at = {} if step is None else {"step": step}
    return {"where": where, "kind": kind, "rank": rank, **at, **more}


@dataclass(frozen=True)
class Shape:
    """How a toy is run: its nodes, what it trains ("ddp", "fsdp", "hsdp"), on what, with which `overlap`."""

    nodes: int = RANKS
    per_node: int = 1
    steps: int = STEPS
    parallel: str = "ddp"
    overlap: str = "off"
    device: str = "cpu"


def check(
    home: Path,
    faults: Sequence[Fault],
    spares: int = 0,
    *,
    shape: Shape = Shape(),  # frozen
    options: Sequence[object] = (),
) -> Counter[str]:
    """Run the toy with these faults, compare with a run without, and count the ledger's faults by kind."""
    env = {"TOY_PARALLEL": shape.parallel, "TOY_OVERLAP": shape.overlap, **on(shape.device)}
    sizes: dict[str, Any] = {"nodes": shape.nodes, "per_node": shape.per_node, "steps": shape.steps}
    with toy(home, faults, spares=spares, options=options, env=env, **sizes) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ranks = shape.nodes * shape.per_node
        ledger = same_as_reference(job, faults, shape.steps, ranks, shape.parallel, shape.device)
    generations = [g.generation for g in ledger.generations]
    assert generations == list(range(1, len(generations) + 1))
    known = {f.fault for f in ledger.faults}
    assert all(set(g.faults) <= known and g.faults for g in ledger.generations[1:])
    assert len(ledger.recoveries) == len(generations) - 1
    others = [r for r in ledger.recoveries if r.outcome not in ("recovered", "superseded")]
    assert not others, f"{others}\n{job.story()}"
    assert recovered(ledger)
    # Deadlines are there for what nobody foresaw; a fault of ours that only a deadline finds is a bug.
    waited = [f for f in ledger.faults if f.kind == "stall" or " in 60 s" in f.detail]
    assert not waited, f"{waited}\n{job.story()}"
    return Counter(f.kind for f in ledger.faults)
