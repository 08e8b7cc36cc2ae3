"""Ranks that hang, each time in another way: `python -m tests.bench.hangs`; who is named, and how soon.

One job trains, and every so many steps one of its ranks, drawn at random, hangs in a step. Right is: that
rank alone is named in the fault, with what it does, and it alone gets a new process. Where two ranks call
another collective than the two others, both calls are to be named. A machine that is paused is all of a node
at once (daemon, agent, ranks), which goes on later; as the kernel here goes on meanwhile, what it would
answer is dropped (nft, as root). Right is that this node is lost. Such jobs have spares.

Found is when the rank was named, in a fault or before, by the clock that the hang began by.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.protocol.records import FaultRecord
from tests.local.localrun import HERE, Job, wait_until

from .figures import Run, finish, load, quantile, table

RANKS = 4
# Steps between two hangs: a rhythm is of fewer.
EVERY = 40
BAR_STEPS, BAR_S = 3, 5.0
PAUSED_S, BEATS_S = 5.0, 1.0
EACH_DEADLINE_S = 60.0
# As hangs_script.py has them, and what each is.
KINDS: Mapping[str, str] = {
    "stopped": "SIGSTOP",
    "interpreter": "a call that holds the interpreter and computes",
    "interpreter_asleep": "a call that holds the interpreter and sleeps",
    "spin": "a loop that computes for ever",
    "lock": "a lock that nobody lets go of",
    "lock@optimizer": "the same in the optimizer",
    "lock@commit": "the same while a commit asks an object for its state",
    "loader": "a DataLoader whose worker never gives a sample",
    "file": "a file that never answers (a pipe that nobody writes)",
    "native": "a native call that never returns",
    "child": "a child that never ends",
    "other_collective": "another collective than the three others'",
    "half": "two ranks in another collective than the two others",
    "paused": "a machine that is paused",
}
SHORT = ("spin", "lock@commit", "half", "stopped")


@dataclass(frozen=True)
class Hang:
    """One of them: whether the right one was named, after how long, and when all trained again; seconds.

    `said` is the fault's text, and of one that is wrong all that was told.
    """

    kind: str
    rank: int
    right: bool
    found_s: float
    back_s: float
    said: str
    load: float


@dataclass(frozen=True)
class Planned:
    """A hang that is to come: the step, the rank, or the first of the two, and the kind."""

    step: int
    rank: int
    kind: str

    @property
    def ranks(self) -> list[int]:
        """Return all who hang."""
        return [self.rank, (self.rank + 1) % RANKS] if self.kind == "half" else [self.rank]

    @property
    def words(self) -> list[str]:
        """Return it as the script takes it."""
        name = "other_collective" if self.kind == "half" else self.kind
        return [f"{self.step}:{rank}:{name}" for rank in self.ranks]


def plan(kinds: Sequence[str], count: int, draw: random.Random) -> list[Planned]:
    """Return so many hangs of one job, of all kinds in turn."""
    return [
        Planned(EVERY * (number + 1), draw.randrange(RANKS), kinds[number % len(kinds)])
        for number in range(count)
    ]


# -------------------------------------------------------------------------------- ranks that hang


def measure(hangs: Sequence[Planned], home: Path, step_s: float) -> tuple[list[Hang], int]:
    """Run a job with these hangs; also return how many processes were replaced that had not hung."""
    out, steps = home / "out", EVERY * (len(hangs) + 1)
    words = ",".join(word for hang in hangs for word in hang.words)
    options = ["--job", "hangs", "--nodes", RANKS, "--tee", "none"]
    with Job(
        home, options, [HERE / "hangs_script.py", steps, out, words], env={"STEP_S": str(step_s)}
    ) as job:
        loads = sampled(job, out, hangs)
        job.ended(0, EACH_DEADLINE_S * (len(hangs) + 1))
        found = [*judged(job.ledger(), out, hangs, loads)]
    hung = sum(one.kind != "half" for one in hangs)
    pids = {line for file in out.glob("pids-*.txt") for line in file.read_text().split()}
    return found, len(pids) - RANKS - hung


def sampled(job: Job, out: Path, hangs: Sequence[Planned]) -> dict[int, float]:
    """Wait for each hang to begin; return the load at that time, by step."""
    loads: dict[int, float] = {}
    for hang in hangs:
        wait_until((out / f"hang-{hang.step}-{hang.rank}").exists, EACH_DEADLINE_S, job)
        loads[hang.step] = load()
    return loads


def judged(
    ledger: Snapshot, out: Path, hangs: Sequence[Planned], loads: Mapping[int, float]
) -> Iterator[Hang]:
    """Compare what was told with what was done."""
    at = {one.step: max(began(out, one.step, rank) for rank in one.ranks) for one in hangs}
    ends = [*(at[one.step] for one in hangs[1:]), float("inf")]
    faults = sorted((one for one in ledger.faults if one.kind not in ("broken", "exit")), key=seen)
    for hang, end in zip(hangs, ends, strict=True):
        begin = at[hang.step]
        of_this = [one for one in faults if begin <= one.seen_s < end]
        lines = [
            event.at_s
            for event in ledger.events
            if event.kind == "late" and begin <= event.at_s < end and f": rank {hang.rank}: " in event.text
        ]
        told = [one.seen_s for one in of_this] + lines
        right = is_right(hang, of_this)
        yield Hang(
            kind=hang.kind,
            rank=hang.rank,
            right=right,
            found_s=min(told, default=float("inf")) - begin,
            back_s=back(ledger, begin, end) - begin,
            said="; ".join(f"{one.kind} {one.rank}: {one.detail}" for one in of_this[: 1 if right else 9]),
            load=loads[hang.step],
        )


def began(out: Path, step: int, rank: int) -> float:
    """When a rank has begun to hang, in Unix time."""
    return float((out / f"hang-{step}-{rank}").read_text())


def back(ledger: Snapshot, begin: float, end: float) -> float:
    """When all had made a step again, of a recovery that began in between."""
    ends = [
        one.started_s + sum(one.phases.values())
        for one in ledger.recoveries
        if one.outcome == "recovered" and begin <= one.started_s < end
    ]
    return max(ends, default=float("inf"))


def seen(fault: FaultRecord) -> float:
    """Sort by this."""
    return fault.seen_s


def is_right(hang: Planned, faults: Sequence[FaultRecord]) -> bool:
    """Whether these are one fault, which names whom it should, with what it does."""
    if len(faults) != 1:
        return False
    (fault,) = faults
    if hang.kind == "half":
        first, second = sorted(hang.ranks)
        words = [f"ranks {first}, {second} in barrier", "in allreduce"]
        return (fault.kind, fault.rank) == ("stall", None) and all(word in fault.detail for word in words)
    if hang.kind == "other_collective":
        words = [f"rank {hang.rank} in barrier", "in allreduce"]
    elif hang.kind == "stopped":
        # Where it is only py-spy could tell.
        words = ["its process is stopped by a signal"]
    else:
        words = [f" in {hang.kind.partition('@')[0]} (hangs_script.py, line "]
    return (fault.kind, fault.rank) == ("hung", hang.rank) and all(word in fault.detail for word in words)


# ------------------------------------------------------------------------------ paused machines


def paused(count: int, home: Path, draw: random.Random, step_s: float) -> list[Hang]:
    """Run a job of which so many nodes, one after the other, are paused."""
    out, steps = home / "out", EVERY * (count + 4) + round(count * 2 * PAUSED_S / step_s)
    options = ["--job", "paused", "--nodes", RANKS, "--spares", count, "--tee", "none"]
    script = [HERE / "hangs_script.py", steps, out, "0:-1:none"]
    times: list[tuple[int, float, float]] = []
    with Job(home, options, script, env={"STEP_S": str(step_s)}) as job:
        for _ in range(count):
            low = newest(out) + EVERY
            wait_until(lambda low=low: newest(out) >= low, EACH_DEADLINE_S, job)  # type: ignore[misc]
            rank = draw.randrange(RANKS)
            node, pids = machine_of(job, out, rank, RANKS + count)
            with silence(address_of(job, node)):
                times.append((node, time.time(), load()))
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(PAUSED_S)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        job.ended(0, EACH_DEADLINE_S * (count + 1) + steps * 10 * step_s)
        ledger = job.ledger()
    return [*lost(ledger, times)]


def lost(ledger: Snapshot, times: Sequence[tuple[int, float, float]]) -> Iterator[Hang]:
    """Compare what was told with which nodes were paused."""
    # A fault is as old as the last word of the node: a beat is half a second.
    ends = [*(at - BEATS_S for _, at, _ in times[1:]), float("inf")]
    for (node, begin, busy), end in zip(times, ends, strict=True):
        of_this = [one for one in ledger.faults if begin - BEATS_S <= one.seen_s < end]
        told = sorted((one for one in of_this if one.kind not in ("broken", "exit")), key=seen)
        at = [
            event.at_s
            for event in ledger.events
            if event.kind == "node-lost" and begin <= event.at_s < end and f"node-{node} " in event.text
        ]
        yield Hang(
            kind="paused",
            rank=node,
            right=[(one.kind, one.node) for one in told] == [("node-lost", node)],
            found_s=min(at, default=float("inf")) - begin,
            back_s=back(ledger, begin - BEATS_S, end) - begin,
            said="; ".join(f"{one.kind} node-{one.node}: {one.detail}" for one in told),
            load=busy,
        )


def newest(out: Path) -> int:
    """The newest step that rank 0 has done."""
    file = out / "loss-0.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(lines[-1].split()[0]) if lines else 0


def address_of(job: Job, node: int) -> str:
    """A node's loopback address."""
    peers = json.loads((job.state_dir / f"node-{node}" / "daemon.json").read_text())["peers"]
    return str(next(peer["address"] for peer in peers if peer["node"] == node))


@contextlib.contextmanager
def silence(address: str) -> Iterator[None]:
    """Drop all packets of this address. Raises CalledProcessError where that is not allowed."""
    name = f"ckptless_bench_{os.getpid()}"
    hook = "type filter hook output priority 0"
    rules = f"{hook}; ip saddr {address} drop; ip daddr {address} drop"
    nft(f"table inet {name} {{\nchain out {{ {rules}; }}\n}}\n")
    try:
        yield
    finally:
        nft(f"delete table inet {name}")


def nft(commands: str) -> None:
    """Change the packet filter. Raises OSError and CalledProcessError where that cannot be."""
    subprocess.run(["nft", commands], check=True, timeout=10.0, stderr=subprocess.DEVNULL)


def may_pause() -> bool:
    """Whether packets can be dropped here."""
    try:
        with silence("127.255.255.1"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def machine_of(job: Job, out: Path, rank: int, nodes: int) -> tuple[int, list[int]]:
    """The node that a rank is on now, and all processes of that node."""
    pid = int((out / f"pids-{rank}.txt").read_text().split()[-1])
    for node in range(nodes):
        daemon, agent = job.pid_of(node, "daemon"), job.pid_of(node, "agent")
        if daemon is None or agent is None:
            continue
        # The agent first: it is the parent of all the others.
        ours = [agent, *below(agent)]
        if pid in ours:
            return node, [*ours, *({daemon} - {*ours})]
    raise AssertionError(f"rank {rank} (process {pid}) is on no node:\n{job.story()}")


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


# ---------------------------------------------------------------------------------------- tables


def told(runs: Sequence[Run]) -> str:
    """A row for each kind, and one for all."""
    hangs = [hang for run in runs for hang in run["hangs"]]
    by_kind = {words: [one for one in hangs if one["kind"] == kind] for kind, words in KINDS.items()}
    rows = [_row(words, ones) for words, ones in (*by_kind.items(), ("all", hangs)) if ones]
    return table(
        ("kind", "n", "right", "in time", "found: median s", "p99 s", "most s", "trains again s"), rows
    )


def _row(words: str, ones: Sequence[Run]) -> tuple[object, ...]:
    found = [one["found_s"] for one in ones]
    return (
        words,
        len(ones),
        sum(one["right"] for one in ones),
        sum(one["in_time"] for one in ones),
        f"{statistics.median(found):.2f}",
        f"{quantile(found, 0.99):.2f}",
        f"{max(found):.2f}",
        f"{statistics.median(one['back_s'] for one in ones):.2f}",
    )


def run_of(name: str, hangs: Sequence[Hang], step_s: float, others: int) -> Run:
    """One job as it is written down."""
    bar_s = max(BAR_STEPS * step_s, BAR_S)
    return {
        "job": name,
        "step_s": step_s,
        "others_replaced": others,
        "hangs": [{**asdict(one), "in_time": one.found_s <= bar_s} for one in hangs],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hangs", type=int, default=200, help="of all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--per-job", type=int, default=47, help="hangs of one job; paused machines: 4")
    parser.add_argument("--step", type=float, default=0.05, dest="step_s", help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help=f"one of each of {', '.join(SHORT)}")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    args = parser.parse_args()
    kinds, count = (SHORT, len(SHORT)) if args.short else (args.kinds, args.hangs)
    if "paused" in kinds and not may_pause():
        sys.stderr.write("no machine is paused: that takes root, and nft(8)\n")
        kinds = [kind for kind in kinds if kind != "paused"]
    draw = random.Random(args.seed)
    machines = sum(kinds[number % len(kinds)] == "paused" for number in range(count))
    of_ranks, runs = [kind for kind in kinds if kind != "paused"], []
    left = plan(of_ranks, count - machines, draw) if of_ranks else []
    while left or machines:
        with tempfile.TemporaryDirectory() as folder:
            if left:
                some, left = left[: args.per_job], left[args.per_job :]
                some = [Planned(EVERY * number, one.rank, one.kind) for number, one in enumerate(some, 1)]
                found, others = measure(some, Path(folder), args.step_s)
                runs.append(run_of("hangs", found, args.step_s, others))
            else:
                some_machines, machines = min(4, machines), machines - min(4, machines)
                found = paused(some_machines, Path(folder), draw, args.step_s)
                runs.append(run_of("paused", found, args.step_s, 0))
        right = sum(one.right for one in found)
        sys.stderr.write(f"{runs[-1]['job']}: {right} of {len(found)} right, load {load():.1f}\n")
        sys.stderr.writelines(f"wrong: {one}\n" for one in found if not one.right)
        sys.stderr.writelines(
            f"late: {one.kind} {one.found_s:.1f} s\n" for one in found if one.found_s > BAR_S
        )
    finish(runs, args.json, told)


if __name__ == "__main__":
    main()
