"""What is measured: ckptless and its peers, each started on the workload, in an environment of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
ENVIRONMENTS = Path(__file__).parents[2] / "build" / "peers"
TORCH = "torch==2.13.0"
# Without torch's own dependencies: those are torch's.
PACKAGES: Mapping[str, Sequence[str]] = {
    "nvrx": (
        "nvidia-resiliency-ext==0.4.1",
        "defusedxml",
        "nvidia-ml-py",
        "packaging",
        "psutil",
        "pynvml",
        "pyyaml",
    ),
    "torchft": ("torchft==0.2.0",),
    "torchft-nightly": ("torchft-nightly==2026.10.26",),
    "lmr": ("lm-resiliency==0.2.0",),
    "streaming": ("mosaicml-streaming==0.13.0",),
    "torchdata": ("torchdata==0.11.0",),
}
OPENTELEMETRY = (
    "opentelemetry-exporter-otlp-proto-http>=1.39",
    "opentelemetry-sdk>=1.39",
    "opentelemetry-api>=1.39",
)
# With their own dependencies; of streaming what it imports, and not what it reads clouds with.
BESIDE: Mapping[str, Sequence[str]] = {
    "torchft": OPENTELEMETRY,
    "torchft-nightly": OPENTELEMETRY,
    "streaming": (
        "numpy<2.2",
        "xxhash<4",
        "transformers<5",
        "brotli",
        "python-snappy",
        "zstd",
        "catalogue",
        "matplotlib",
        "tqdm",
    ),
    "torchdata": ("requests", "urllib3"),
}
# In the environment of everything that a run starts, whatever becomes of its parents.
MARK = "CKPTLESS_BENCH_RUN"
END_DEADLINE_S = 20.0
POLL_S = 0.02


@dataclass(frozen=True)
class Case:
    """A training: so many ranks, ddp or fsdp, a size of workload.py, a save after so many steps."""

    ranks: int
    layout: str
    size: str
    every: int = 1

    def __str__(self) -> str:
        return f"{self.layout}, {self.ranks} ranks, {self.size}"


@dataclass
class Running:
    """A run: where its ranks note their steps, and who looks after it."""

    out: Path
    case: Case
    saves: Path
    mark: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    # Called again and again: starts what the system leaves to somebody else to start again.
    tend: Callable[[], None] = lambda: None
    # Ranks whose process nobody may kill, for then the job ends.
    spared: frozenset[int] = frozenset()

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, log: str = "log") -> None:
        """Start a process of this run, in a session of its own."""
        whole = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCH_OUT": str(self.out),
            "BENCH_LAYOUT": self.case.layout,
            "BENCH_SIZE": self.case.size,
            "BENCH_EVERY": str(self.case.every),
            "BENCH_SAVE": str(self.saves),
            "BENCH_RANKS": str(self.case.ranks),
            MARK: self.mark,
            **(env or {}),
        }
        with (self.out / f"{log}.txt").open("ab") as file:
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=whole,
                    start_new_session=True,
                )
            )

    def pid(self, rank: int) -> int:
        """The process that is this rank."""
        return int((self.out / f"pid-{rank}").read_text())

    def logs(self, nbytes: int = 3000) -> str:
        """The ends of what its processes have written."""
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-nbytes:]}" for p in self.out.glob("*.txt")
        )

    def end(self) -> None:
        """Kill every process of this run, and wait until none is left."""
        limit = time.monotonic() + END_DEADLINE_S
        while pids := marked(self.mark):
            if time.monotonic() > limit:
                raise TimeoutError(f"processes {pids} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        for process in self.processes:
            process.wait(END_DEADLINE_S)


def marked(mark: str) -> list[int]:
    """Every living process that has this mark in its environment."""
    word = os.fsencode(f"{MARK}={mark}")
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def free_port() -> int:
    """A port that nobody has; the next one is as likely to be free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(run: Running, python: str, script: str, *options: str, **env: str) -> None:
    """Start a script under `torchrun --standalone`."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts=100"]
    command += [f"--nproc-per-node={run.case.ranks}", *options, str(SCRIPTS / script)]
    run.start(command, env)


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made where it is missing."""
    folder = ENVIRONMENTS / peer
    if not (folder / ".ready").exists():
        sys.stderr.write(f"making an environment for {PACKAGES[peer][0]} ...\n")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, TORCH, "numpy"], check=True)
        subprocess.run([*pip, "--no-deps", *PACKAGES[peer]], check=True)
        if peer in BESIDE:
            subprocess.run([*pip, *BESIDE[peer]], check=True)
        (folder / ".ready").touch()
    return str(folder / "bin/python")


# ------------------------------------------------------------------------------------- the systems


def ckptless(run: Running, **env: str) -> None:
    """Two nodes of this machine, as `ckptless-run --local` has them, so that copies have somewhere to be."""
    command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--local", "--nodes", "2"]
    command += ["--nproc-per-node", str(run.case.ranks // 2), "--max-stall", "60", "--tee", "none"]
    command += ["--state-dir", str(run.out / "state"), str(SCRIPTS / "train_ckptless.py")]
    run.start(command, env)


def plain(run: Running) -> None:
    """Nobody saves anything."""
    torchrun(run, sys.executable, "train_dcp.py", **{"BENCH_SAVE": ""})


def dcp(run: Running, **env: str) -> None:
    """torchrun as it is."""
    torchrun(run, sys.executable, "train_dcp.py", **env)


def dcp_tuned(run: Running) -> None:
    """Without a store that ranks of two starts share, and with the shortest look at its processes."""
    shortest = "--monitor-interval=0.05"
    torchrun(run, sys.executable, "train_dcp.py", shortest, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def lmr(run: Running) -> None:
    """On torchrun at its best."""
    shortest = "--monitor-interval=0.05"
    torchrun(run, python_of("lmr"), "train_lmr.py", shortest, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def nvrx(run: Running, reserve: int = 3, **env: str) -> None:
    """Ranks in reserve take the places of killed ones; nothing starts again."""
    port = free_port()
    world = run.case.ranks + reserve
    for rank in range(world):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
        }
        own |= {"MASTER_PORT": str(port), **env}
        run.start([python_of("nvrx"), str(SCRIPTS / "train_nvrx.py")], own, f"log-{rank}")
    # Its stores are in the process of the first rank.
    run.spared = frozenset({0})


def nvrx_local(run: Running) -> None:
    """Its local checkpoints, on torchrun."""
    torchrun(run, python_of("nvrx"), "train_nvrx_local.py")


def nvrx_tuned(run: Running) -> None:
    """Its intervals as short as they work, and an abort that knows Gloo."""
    nvrx(run, BENCH_ABORT="sockets")


def torchft(run: Running, *lighthouse: str, peer: str = "torchft") -> None:
    """A lighthouse, and groups of one rank; one that has died is started again at once."""
    python = python_of(peer)
    port = free_port()
    command = [str(Path(python).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
    # Those that are left go on meanwhile.
    fewest = max(1, run.case.ranks // 2)
    run.start([*command, "--min_replicas", str(fewest), *lighthouse], log="lighthouse")
    groups: dict[int, subprocess.Popen[bytes]] = {}

    def start(rank: int) -> None:
        env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "REPLICA_GROUP_ID": str(rank)}
        env["BENCH_FEWEST"] = str(fewest)
        run.start([python, str(SCRIPTS / "train_torchft.py")], env, f"log-{rank}")
        groups[rank] = run.processes[-1]

    def tend() -> None:
        for rank, process in groups.items():
            if process.poll() is not None:
                start(rank)

    for rank in range(run.case.ranks):
        start(rank)
    run.tend = tend


# Heartbeats and ticks as short as they work on a busy machine.
SHORT = ("--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "20")


def torchft_tuned(run: Running) -> None:
    """At its best."""
    torchft(run, *SHORT)


def torchft_nightly(run: Running) -> None:
    """A nightly at its best."""
    torchft(run, *SHORT, peer="torchft-nightly")


@dataclass(frozen=True)
class System:
    """A system that is measured: how it is started, and which layouts it has."""

    name: str
    start: Callable[[Running], None]
    layouts: frozenset[str] = frozenset({"ddp", "fsdp"})
    # Whether the same step is summed up over the same ranks whatever has happened.
    same_ranks: bool = True


SYSTEMS = {
    "ckptless": System("ckptless", ckptless),
    "torchrun": System("torchrun + DCP, as it is", dcp),
    "torchrun-tuned": System("torchrun + DCP, at its best", dcp_tuned),
    "lmr": System("lm-resiliency 0.2.0 on torchrun", lmr),
    "nvrx": System("nvidia-resiliency-ext 0.4.1, as it is", nvrx),
    "nvrx-tuned": System("nvidia-resiliency-ext 0.4.1, at its best", nvrx_tuned),
    "torchft": System("torchft 0.2.0, as it is", torchft, frozenset({"ddp"}), same_ranks=False),
    "torchft-tuned": System(
        "torchft 0.2.0, at its best", torchft_tuned, frozenset({"ddp"}), same_ranks=False
    ),
    "torchft-nightly": System(
        "torchft nightly of 2026-10-26, at its best", torchft_nightly, frozenset({"ddp"}), same_ranks=False
    ),
}


@contextlib.contextmanager
def running(start: Callable[[Running], None], case: Case) -> Iterator[Running]:
    """A run of a case, all of which is gone afterwards."""
    out = Path(tempfile.mkdtemp(prefix="ckptless-bench-"))
    saves = Path(tempfile.mkdtemp(prefix="ckptless-bench-", dir="/dev/shm"))
    run = Running(out, case, saves, secrets.token_hex(8))
    try:
        start(run)
        yield run
    finally:
        run.end()
        shutil.rmtree(saves, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
