"""How much memory a daemon has at its peak, the leader, and any other one, while one node is replaced.

`python -m tests.sim.scale_memory 256 12500 [--json FILE]`: each is a process of its own, with what a daemon
imports, and what it hears as it comes over the wire: of the leader every agent's report, in training and at
the recovery, and what it plans by them; of any other the decrees before and after.
"""

import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ckptless.daemon.ckptlessd.consensus.packing import digest_of, pack, unpack
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.main import GC_THRESHOLD
from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.planning.faults import Fault, NodeView
from ckptless.daemon.ckptlessd.planning.sources import Same, once
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decree

from . import scale_parts as parts

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Peaks:
    """Of one size, the most that each has ever had, in bytes; `bare`: before it hears of the job."""

    nodes: int
    bare_nbytes: int
    leader_nbytes: int
    other_nbytes: int


def peak_nbytes() -> int:
    """Of this process so far (`proc_pid_status(5)`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def lead(nodes: int) -> None:
    """Be the leader: hear all train, then what all hold, and plan without one of them."""
    spec = parts.spec_of(nodes)
    views = {n: NodeView(n, m.Introduction(info=parts.info_of(n), pid=4711)) for n in range(nodes)}
    for node, view in views.items():
        view.state = heard(node, nodes, frozen=False)
    first = plan.first_assignment(spec, views, 1, 0)
    same: Same = {}
    for node, view in views.items():
        state = heard(node, nodes, frozen=True)
        assert state.holdings is not None
        view.state = msgspec.structs.replace(state, holdings=once(state.holdings, same))
    views[nodes // 2 + 1].lost = "its agent is gone"
    faults = [Fault("g1.t1.1", finding) for finding in GenerationProgress.of(first, views).findings[:1]]
    GenerationProgress.of(first, views)
    same.clear()
    following = plan.next_assignment(plan.Situation(spec, views, first, faults, parts.STEP, 1, 0))
    old, new = (
        Decree(index=1, voters=(0,), assignment=first),
        Decree(index=2, voters=(0,), assignment=following),
    )
    digest_of(new)
    assert pack(new, old) is not None


def heard(node: int, nodes: int, *, frozen: bool) -> m.AgentState:
    """A report as it is decoded."""
    report = e.Report(node, parts.state_of(node, nodes, parts.STEP, frozen=frozen))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=e.Report).message
    assert isinstance(state, m.AgentState)
    return state


def decrees_of(nodes: int) -> list[tuple[bytes, str]]:
    """The first generation's and the next one's, as they are sent."""
    now, _ = parts.after_a_loss(nodes)
    known = first_decree(tuple(range(nodes)))
    found: list[tuple[bytes, str]] = []
    for index, assignment in enumerate((now.current, plan.next_assignment(now)), start=1):
        decree = Decree(index=index, voters=known.voters, assignment=assignment)
        body = pack(decree, known)
        assert body is not None
        found.append((body, digest_of(decree)))
        known = decree
    return found


def follow(nodes: int) -> None:
    """Be any other: learn both decrees, which come by the standard input."""
    known, told = first_decree(tuple(range(nodes))), []
    for body, digest in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[tuple[bytes, str]]):
        known = unpack(body, known, digest, range(nodes))
        told.append(known)


def measure(nodes: int) -> Peaks:
    """Each in its process."""
    said = msgspec.msgpack.encode(decrees_of(nodes))
    found: dict[str, int] = {}
    for role in ("bare", "leader", "other"):
        command = [sys.executable, "-m", "tests.sim.scale_memory", f"--{role}", str(nodes)]
        done = subprocess.run(command, cwd=ROOT, input=said, stdout=subprocess.PIPE, check=True)
        found[role] = int(done.stdout)
    return Peaks(nodes, found["bare"], found["leader"], found["other"])


def main() -> None:
    """Entry point; `--bare`, `--leader`, `--other`: be one of them, and say its peak."""
    gc.set_threshold(*GC_THRESHOLD)
    sizes = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if sys.argv[1] in ("--bare", "--leader", "--other"):
        if sys.argv[1] != "--bare":
            (lead if sys.argv[1] == "--leader" else follow)(sizes[0])
        print(peak_nbytes())
        return
    peaks = [measure(size) for size in sizes]
    for one in peaks:
        print(json.dumps(asdict(one)), flush=True)
    if "--json" in sys.argv:
        path = Path(sys.argv[sys.argv.index("--json") + 1])
        path.write_text(json.dumps([asdict(one) for one in peaks], indent=1) + "\n")


if __name__ == "__main__":
    main()
