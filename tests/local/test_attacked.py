"""A job loses a rank while another user attacks it: its losses are the same, and a third one is answered.

A's job is local mode's, as root; B attacks all that it listens at and the daemon of the node, where C asks
for what `ckptctl status` and `events` show of a job of his. Beside that daemon is one that nobody attacks.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.transport import handshake
from tests.unit.edges import attackers as a
from tests.unit.edges.test_attacks import Daemon
from tests.unit.edges.test_service import hello

from .localrun import LISTEN, Job, fault, newest_loss, recovered, same_as_reference, toy, wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot act as other users"),
    pytest.mark.timeout(300),
]

# Of C, or so many times what he waits at the daemon that nobody attacks; and however loaded the machine is.
ANSWER_S, TIMES, MOST_S = 1.0, 5.0, 10.0
ATTACK_S = 8.0
# The rank that is lost meanwhile comes back through all that is attacked.
FAULTS = [fault("forward", "kill", 1, 60)]


def ports_of(job: Job) -> list[tuple[str, int]]:
    """Return where it listens, as anybody finds out."""
    found = []
    own = {line.split(":")[0] for line in job.sockets()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address = str(ipaddress.ip_address(int.from_bytes(bytes.fromhex(local[:8]), "little")))
        if state == LISTEN and address in own:
            found.append((address, int(local[9:], 16)))
    return found


def break_in(job_state: Path, sockets: list[str], done: int) -> None:
    """Its sockets, files and processes are its owner's: told through `done` is what could be opened."""
    opened = []
    files = [job_state, *(job_state / "node-0" / name for name in ("ledger.db", "agent.json", "daemon.json"))]
    for path in [*sockets, *map(str, files), str(job_state / "key")]:
        with contextlib.suppress(OSError):
            a.connected(path)
            opened.append(path)
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            opened.append(path)
    for pid in [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == 0:
                os.kill(pid, 0)
                opened.append(f"process {pid}")
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == 0:
                opened += [str(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
    os.write(done, "\n".join(opened).encode() or b"nothing")


def squat(label: str) -> None:
    """Names like those of its folder of sockets: folders, links to elsewhere, FIFOs, until it is killed."""
    for number in range(200):
        path = f"/tmp/ckptless-0-{label}-{os.getpid()}-{number}"
        made = (os.mkdir, os.mkfifo, functools.partial(os.symlink, "/etc"))[number % 3]
        made(path)
    time.sleep(3600)


def floods(daemon: Daemon) -> list[Callable[[], object]]:
    """Return the attacks of B on the daemon of the node."""
    at = daemon.address
    monster = msgspec.to_builtins(hello("1"))
    monster["spec"]["slots_per_node"] = 20_000_000
    forged = m.AgentEvent(level="info", kind="k", text="x\n12:00:00.000 ckptlessd INFO all is well\x1b[2J")
    wide = msgspec.to_builtins(hello("1"))
    wide["spec"]["names"] = [f"host{number}.example" for number in range(60_000)]

    def again(do: Callable[[], object]) -> Callable[[], object]:
        def on_and_on() -> None:
            while True:
                do()
                time.sleep(0.05)

        return on_and_on

    return [
        lambda: a.pass_lingering(at, 20),
        lambda: a.pour(at, 40, 15 << 20),
        lambda: a.be_silent(at, 600),
        again(lambda: a.make_noise(at, 20)),
        again(lambda: a.say(at, monster, deadline_s=2.0)),
        again(lambda: a.say(at, wide, deadline_s=2.0)),
        again(lambda: a.say(at, hello("1"), *[forged] * 500, deadline_s=2.0)),
        again(lambda: a.run_many(at, [hello(f"1.{number}") for number in range(40)])),
        lambda: a.read_slowly(at),
    ]


@contextlib.contextmanager
def attacks(*works: Callable[[], object]) -> Iterator[list[int]]:
    children = [a.forked(a.ATTACKER, work) for work in works]
    try:
        yield children
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for left in Path("/tmp").glob(f"ckptless-0-x-{child}-*"):
                left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()


@contextlib.contextmanager
def daemons() -> Iterator[tuple[Daemon, Daemon]]:
    with contextlib.ExitStack() as stack:
        both = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-")))
            folder.chmod(0o755)
            both.append(Daemon(folder))
            stack.callback(both[-1].close)
        yield both[0], both[1]


def answers(daemon: Daemon, seconds: float) -> tuple[int, int]:
    """C asks for so long; the process that does, and the pipe in which it says how long each answer took."""
    reader, writer = os.pipe()

    def ask() -> None:
        times = a.reads(daemon.address, "2", seconds)
        os.write(writer, " ".join(f"{one:.4f}" for one in times).encode())

    child = a.forked(a.VICTIM, ask)
    os.close(writer)
    return child, reader


def told(child: int, reader: int) -> list[float]:
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return [float(one) for one in said.split()]


def test_everybody_goes_on(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow)}
    with daemons() as (attacked, twin), toy(tmp_path, FAULTS, env=env) as job:
        for daemon in (attacked, twin):
            # C's job, of which there is something to tell.
            child = a.forked(a.VICTIM, functools.partial(a.say, daemon.address, hello("2"), deadline_s=2.0))
            assert os.waitpid(child, 0)[1] == 0
        wait_until(lambda: newest_loss(tmp_path) >= 20, 100.0, job)
        ports = ports_of(job)
        assert len(ports) >= 12, ports
        sockets = [str(path) for path in Path("/tmp").glob("ckptless-0-*/*")]
        reader, writer = os.pipe()
        opening = handshake.encode(handshake.opening("job", 2))
        with attacks(
            *floods(attacked),
            lambda: a.hold_many(ports, 20),
            lambda: a.hold_many(ports, 20, opening),
            lambda: a.slam(ports, opening[:9]),
            lambda: a.pour_over(ports, b"\xff\xff\xff\xff"),
            lambda: squat("x"),
            lambda: break_in(job.state_dir, sockets, writer),
        ):
            os.close(writer)
            before = newest_loss(tmp_path)
            asked = [answers(daemon, ATTACK_S) for daemon in (attacked, twin)]
            there, here = (told(*one) for one in asked)
            # The others have the pipe's other end, too: no end of file comes.
            assert select.select([reader], [], [], 60.0)[0]
            assert os.read(reader, 1 << 16) == b"nothing"
            os.close(reader)
            wait_until(lambda: newest_loss(tmp_path) >= max(before + 10, 75), 100.0, job)
        slow.unlink()
        job.ended(0, 200.0)
        ledger = same_as_reference(job, FAULTS)
        assert len(recovered(ledger)) == 1
    print(
        f"C waited {max(there):.3f} s, n={len(there)}; where nobody attacks {max(here):.3f} s, n={len(here)}"
    )
    late = [one for one in there if one > max(ANSWER_S, TIMES * max(here))]
    # Of a loaded machine; an attack that works is in the way of all.
    assert len(late) <= 1 + len(there) // 50, late
    assert max(there) < MOST_S
