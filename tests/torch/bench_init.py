"""How long `init_process_group("gloo")` and a first all_reduce take, from a cold start in any order.

    python tests/torch/bench_init.py --ranks 32 --rounds 5

Side by side: torch's default (rank 0 has the TCPStore), a TCPStore that runs before any rank does, and the
agents' stores with the environment that agents give to ranks. In every round all of them have the same random
delays of their ranks' starts. A time is from the last rank's start to the last rank's end: what comes before
is the wait for that start, whoever serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon.agent.environment import GLOO

DEADLINE_S = 120.0
LOCALHOST = "127.0.0.1"
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
# "Here I am", as a port number, from a server's process.
READY_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Way:
    """One way to come together: servers to start, and the variables of a rank. None: rank 0 serves."""

    name: str
    servers: Callable[[], contextlib.AbstractContextManager[list[int]]]
    env: dict[str, str]


# ------------------------------------------------------------------------------------ the servers


async def serve_stores(count: int) -> None:
    """`count` agents' stores in this process, until standard input ends; their ports on standard output."""
    from ckptless.daemon.agent.store_guard import StoreGuard
    from ckptless.daemon.agent.store_server import StoreServer

    # The ranks are this process's siblings here.
    guard = StoreGuard(lambda _kind, text: print(text, file=sys.stderr), root=os.getppid())
    stores = [StoreServer(guard.refuses) for _ in range(count)]
    print(json.dumps([await store.start(LOCALHOST) for store in stores]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for store in stores:
        await store.close()


def serve_tcp_store() -> None:
    """torch's own, until standard input ends."""
    import torch.distributed as dist

    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    print(json.dumps([store.port]), flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def server(what: str) -> Iterator[list[int]]:
    """A process of this file that serves; its ports."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            if not select.select([process.stdout], [], [], READY_DEADLINE_S)[0]:
                raise TimeoutError(f"{what} did not come up in {READY_DEADLINE_S:.0f} s")
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                process.wait(READY_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def none() -> Iterator[list[int]]:
    """A free port, on which rank 0 will listen."""
    with socket.create_server((LOCALHOST, 0)) as probe:
        port = probe.getsockname()[1]
    yield [port]


WAYS = (
    Way("torch's default", none, {}),
    Way("a running TCPStore", lambda: server("tcp"), {SHARED: "True"}),
    Way("a running TCPStore, lazy Gloo", lambda: server("tcp"), {SHARED: "True", **GLOO}),
    Way("agents' stores, stock Gloo", lambda: server("stores"), {SHARED: "True"}),
    Way("agents' stores", lambda: server("stores"), {SHARED: "True", **GLOO}),
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


def one_round(way: Way, world: int, delays_s: Sequence[float], out: Path) -> float:
    """Seconds from the last start to the last end. Raises TimeoutError, with what the ranks have said."""
    reader, writer = os.pipe()
    with way.servers() as ports, out.open("w") as log:
        at = time.monotonic() + 0.01 * world
        pids: list[int] = []
        try:
            for rank in range(world):
                pid = os.fork()
                if pid == 0:
                    os.close(reader)
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    port = ports[rank * len(ports) // world]
                    os.environ.update(way.env, MASTER_ADDR=LOCALHOST, MASTER_PORT=str(port))
                    with contextlib.suppress(KeyboardInterrupt):
                        rank_process(rank, world, delays_s[rank], at, writer)
                    os._exit(1)
                pids.append(pid)
            os.close(writer)
            return collect(reader, world, out)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            os.close(reader)


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


# --------------------------------------------------------------------------------------- the whole


def measure(world: int, rounds: int, spread_s: float, seed: int) -> dict[str, list[float]]:
    """Seconds of each round, by way; the ways take turns, so that a noisy minute is everybody's."""
    chance = random.Random(seed)
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    log = Path(f"/tmp/bench-init-{os.getpid()}.log")
    for _ in range(rounds):
        delays_s = [chance.uniform(0, spread_s) for _ in range(world)]
        for way in WAYS:
            found[way.name].append(one_round(way, world, delays_s, log))
    log.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", type=float, default=0.3, help="seconds over which the ranks start")
    parser.add_argument("--stores", type=int, default=1, help="agents' stores to deal the ranks out to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", choices=["tcp", "stores"])
    options = parser.parse_args()
    if options.serve == "tcp":
        serve_tcp_store()
        return
    if options.serve == "stores":
        asyncio.run(serve_stores(options.stores))
        return
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed  # loaded once, for all ranks

    torch.set_num_threads(1)
    found = measure(options.ranks, options.rounds, options.spread, options.seed)
    base, running = (statistics.median(found[way.name]) for way in WAYS[:2])
    print(f"{options.ranks} ranks, {options.rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ms = " ".join(f"{one * 1e3:.0f}" for one in sorted(seconds))
        print(f"{name:32} {median * 1e3:7.0f} ms  x{median / base:.2f}  x{median / running:.2f}   ({ms})")


if __name__ == "__main__":
    main()
