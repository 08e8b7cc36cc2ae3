"""How long `init_process_group("gloo")` and a first all_reduce take, from a cold start in any order.

    python -m tests.bench.init_ranks --ranks 32 --rounds 5    prints JSON, a line for each round and way

Side by side: torch's default (rank 0 has the TCPStore), a TCPStore that runs before any rank does, and the
agents' stores with the environment that agents give to ranks. In every round all of them have the same random
delays of their ranks' starts. A time is from the last rank's start to the last rank's end: what comes before
is the wait for that start, whoever serves. Every rank is forked with torch imported.

torch's clients and its server look up each peer's name (of `::ffff:127.0.0.1`, which is not in /etc/hosts),
and a name server that does not answer one of so many questions at once costs 5 s. As root all of this is done
in a mount namespace in which names come from files only, or it would be a comparison of the resolver.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckptless.daemon.agent.kvstore.guard import StoreGuard
from ckptless.daemon.agent.ranks.environment import GLOO
from ckptless.daemon.agent.ranks.prctl import set_pdeathsig
from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from tests.unit.daemon.facades import HOST, Facade

ROOT = Path(__file__).resolve().parents[2]

DEADLINE_S = 120.0
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
READY_DEADLINE_S = 60.0
RANKS_PER_NODE = 8
# How names are looked up, for the process that has seen to that.
NAMES = "BENCH_INIT_NAMES"


@dataclass(frozen=True)
class Way:
    """One way to come together: servers (from the number of ranks to ports), and the ranks' variables."""

    name: str
    servers: Callable[[int], contextlib.AbstractContextManager[list[int]]]
    env: dict[str, str]


# ------------------------------------------------------------------------------------ the servers


async def serve_agent(number: int, ranks: int) -> None:
    """What the agent of a node of 8 ranks has for the store, until standard input ends.

    Its ports go to standard output; the ports for agents of all nodes come in over standard input.
    """
    facade = Facade(number, silence_s=DEADLINE_S)
    # The ranks are this process's siblings here.
    refuses = StoreGuard(lambda _kind, text: print(text, file=sys.stderr), root=os.getppid()).refuses
    facade.store.server.refuses = refuses
    await facade.start()
    try:
        print(json.dumps([facade.port, facade.info.agent_port]), flush=True)
        ports = json.loads(await asyncio.to_thread(sys.stdin.readline))
        infos = [
            NodeInfo(node=n, name=f"n{n}", address=HOST, agent_port=port) for n, port in enumerate(ports)
        ]
        places = [Place(node=rank * len(ports) // ranks, slot=0) for rank in range(ranks)]
        assignment = Assignment(
            job="job",
            generation=1,
            term=1,
            leader=0,
            places=tuple(places),
            nodes=tuple(infos),
            restore_step=None,
        )
        facade.store.follow(assignment, None)
        print(json.dumps("ready"), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await facade.close()


def serve_tcp_store() -> None:
    """torch's own, until standard input ends."""
    from ckptless.pytorch_hooks.torch_private.calls import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    print(json.dumps([store.port]), flush=True)
    sys.stdin.read()


class Server:
    """A process of this file that serves; in `with`."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-m", "tests.bench.init_ranks", *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def hear(self) -> Any:
        """The next line that it says. Raises TimeoutError."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], READY_DEADLINE_S)[0]:
            raise TimeoutError(f"{self._process.args!r} did not come up in {READY_DEADLINE_S:.0f} s")
        return json.loads(self._process.stdout.readline())

    def tell(self, what: object) -> None:
        """A line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(READY_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def tcp_store(_ranks: int) -> Iterator[list[int]]:
    """torch's own store in a process of its own; its port."""
    with Server("--serve-tcp") as server:
        yield server.hear()


@contextlib.contextmanager
def agents(ranks: int) -> Iterator[list[int]]:
    """An agent's store for every 8 ranks, each in a process of its own; their ports."""
    count = max(1, ranks // RANKS_PER_NODE)
    with contextlib.ExitStack() as stack:
        words = ("--ranks", ranks, "--serve-agent")
        servers = [stack.enter_context(Server(*words, number)) for number in range(count)]
        ports = [server.hear() for server in servers]
        for server in servers:
            server.tell([agent for _, agent in ports])
        for server in servers:
            assert server.hear() == "ready"
        yield [port for port, _ in ports]


@contextlib.contextmanager
def nobody(_ranks: int) -> Iterator[list[int]]:
    """A free port, on which rank 0 will listen."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    yield [port]


WAYS = (
    Way("torch's default", nobody, {}),
    Way("a running TCPStore", tcp_store, {SHARED: "True"}),
    Way("a running TCPStore, lazy Gloo", tcp_store, {SHARED: "True", **GLOO}),
    Way("agents' stores, stock Gloo", agents, {SHARED: "True"}),
    Way("agents' stores", agents, {SHARED: "True", **GLOO}),
)


# -------------------------------------------------------------------------------------- the ranks


def rank_process(rank: int, world: int, delay_s: float, at: float, out: int) -> None:
    """In a forked process: waits for its start, does it, and says when it began and ended."""
    import torch
    import torch.distributed as dist

    time.sleep(max(0.0, at + delay_s - time.monotonic()))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    began = time.monotonic()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    ended = time.monotonic()
    assert value.item() == world
    os.write(out, json.dumps([began, ended]).encode() + b"\n")
    # Rank 0's store, and everybody's sockets, stay until all have said so.
    signal.pause()


def one_round(way: Way, world: int, delays_s: Sequence[float], out: Path) -> tuple[float, float]:
    """Seconds from the last start to the last end, and CPU seconds of all ranks.

    Raises TimeoutError, with what the ranks have said.
    """
    reader, writer = os.pipe()
    spent = 0.0
    with way.servers(world) as ports, out.open("w") as log:
        at = time.monotonic() + 0.01 * world
        pids: list[int] = []
        try:
            for rank in range(world):
                pid = os.fork()
                if pid == 0:
                    set_pdeathsig(signal.SIGKILL)
                    os.close(reader)
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    port = ports[rank * len(ports) // world]
                    os.environ.update(way.env, MASTER_ADDR=HOST, MASTER_PORT=str(port))
                    with contextlib.suppress(KeyboardInterrupt):
                        rank_process(rank, world, delays_s[rank], at, writer)
                    os._exit(1)
                pids.append(pid)
            os.close(writer)
            took_s = collect(reader, world, out)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                _, _, used = os.wait4(pid, 0)
                spent += used.ru_utime + used.ru_stime
            os.close(reader)
    return took_s, spent


def collect(reader: int, world: int, log: Path) -> float:
    limit, text = time.monotonic() + DEADLINE_S, b""
    while text.count(b"\n") < world:
        left = limit - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise TimeoutError(f"{text.count(10)} of {world} ranks came: {log.read_text()[-2000:]}")
        data = os.read(reader, 65536)
        if not data:
            raise RuntimeError(f"ranks ended: {log.read_text()[-2000:]}")
        text += data
    times = [json.loads(line) for line in text.splitlines()]
    return float(max(end for _, end in times) - max(begin for begin, _ in times))


# --------------------------------------------------------------------------------------- the names


def names_from_files(module: str) -> str:
    """Go on as a process of `module` that asks no name server, where that can be; where names are from."""
    if os.environ.get(NAMES) == "files":
        return "names from files"
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "names by this machine's resolver, whose time is part of torch's"
    os.environ[NAMES] = "files"
    # Bound over what the C library reads; nobody outside the namespace sees it.
    script = 'mount --bind "$0" /etc/nsswitch.conf && rm "$0" && exec "$@"'
    with tempfile.NamedTemporaryFile("w", prefix="nsswitch-", delete=False) as file:
        file.write("passwd: files\ngroup: files\nhosts: files\n")
    command = ["unshare", "--mount", "sh", "-c", script, file.name, sys.executable, "-m", module]
    command += sys.argv[1:]
    return os.execvp(command[0], command)


# --------------------------------------------------------------------------------------- the whole


def measure(world: int, rounds: int, spread_s: float, seed: int) -> None:
    """Print each round; the ways take turns, so that a noisy minute is everybody's."""
    chance = random.Random(seed)
    log = Path(f"/tmp/bench-init-{os.getpid()}.log")
    for turn in range(rounds):
        delays_s = [chance.uniform(0, spread_s) for _ in range(world)]
        for way in WAYS:
            took_s, spent_s = one_round(way, world, delays_s, log)
            run = {"kind": "ranks", "way": way.name, "ranks": world, "turn": turn, "load": os.getloadavg()[0]}
            print(json.dumps({**run, "s": took_s, "cpu_s": spent_s}), flush=True)
    log.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", type=float, default=0.1, help="seconds over which the ranks start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-tcp", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve-agent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_tcp:
        serve_tcp_store()
        return
    if options.serve_agent is not None:
        asyncio.run(serve_agent(options.serve_agent, options.ranks))
        return
    print(names_from_files("tests.bench.init_ranks"), file=sys.stderr)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed  # loaded once, for all ranks

    torch.set_num_threads(1)
    measure(options.ranks, options.rounds, options.spread, options.seed)


if __name__ == "__main__":
    main()
