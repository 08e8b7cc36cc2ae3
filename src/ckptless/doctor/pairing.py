"""`ckptless-doctor --pairs`: a process on each node of an allocation; they try the network in pairs.

Node 0 gathers the others, tells both of each pair to dial the other, round by round, and hears how it went.
All connections are those of daemons (`transport/link.py`), whose ends prove that they hold the run's token.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import xxhash

from ckptless.daemon.launch.allocation import StepTask, inside_slurm, read_allocation
from ckptless.daemon.launch.slurm import NOT_FOR_STEPS, cpu_binding, slurm_config
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, StartError, UsageError
from ckptless.daemon.protocol.limits import Digest, Name, NodeNumber, Port, Seconds
from ckptless.daemon.protocol.messages import Message
from ckptless.daemon.settings.bind import by_name, choose, interfaces, listen_address
from ckptless.daemon.settings.site import load_settings
from ckptless.daemon.slurm.hostlist import compress, expand
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import HANDSHAKE_DEADLINE_S, Link, Route
from ckptless.daemon.transport.listener import Listener
from ckptless.daemon.transport.tasks import Tasks, end_all
from ckptless.doctor.findings import Finding
from ckptless.doctor.pairs import Pair, Tried, Way, schedule, slow, verdict

logger = logging.getLogger(__name__)

TOKEN, SHORTEST = "CKPTLESS_PAIRS_TOKEN", 16
# A node's number and all nodes, where its step is its own.
AMONG = "CKPTLESS_PAIRS_AMONG"
# Of the time limit: what steps have with their start and without; of the latter, until all have come, all is
# tried, and what was slow is tried again.
STEPS_SHARE, NODES_SHARE = 0.9, 0.75
MEET_SHARE, TRIED_SHARE, AGAIN_SHARE = 0.4, 0.7, 0.9
# A round has an equal part of what is left, and no less than this; of it, the pair.
SHORTEST_ROUND_S, PAIR_SHARE = 2.0, 0.8
# A node that is busy is late with its word; both ways of a last pair are over before all is.
LATE_SHARE = 0.04
# Node 0 is found by its name and the token, below the ports that kernels give away.
FIRST_PORT, PORTS = 20_000, 10_000
AGAIN_S, PINGS, MOST_TEXT = 0.2, 5, 300


class Here(Message, frozen=True, kw_only=True):
    """First word of a node to node 0: where it can be tried."""

    address: Name
    port: Port


class Try(Message, frozen=True, kw_only=True):
    """Node 0's word: dial that one, and say in so many seconds how it went."""

    node: NodeNumber
    address: Name
    port: Port
    within_s: Seconds


class Probe(Message, frozen=True, kw_only=True):
    """First word of a node that dials: answer now or, with `bulk`, when the bytes that follow have come."""

    bulk: bool = False


class Answer(Message, frozen=True, kw_only=True):
    """All has come; `digest` says what."""

    digest: Digest = ""


Said: TypeAlias = Here | Way | Probe | Try | Answer


@dataclass(frozen=True)
class Asked:
    """The options of a run; `interface` None is that of the daemons."""

    interface: str | None
    mib: int
    every: bool
    limit_s: float


@dataclass(frozen=True)
class Place:
    """A node of a run: its number among `names`, and its address; `token` is the run's."""

    names: Sequence[str]
    node: int
    address: str
    token: str
    asked: Asked

    @property
    def port(self) -> int:
        """Where node 0 gathers."""
        return FIRST_PORT + int.from_bytes(hashlib.sha256(self.token.encode()).digest()[:4], "big") % PORTS


def pairs(asked: Asked, env: Mapping[str, str]) -> list[Finding]:
    """Start this on each node, or be one; only node 0 has findings then. Raises UsageError, StartError."""
    if not inside_slurm(env):
        raise UsageError("--pairs tries the nodes of an allocation: run it in sbatch or salloc")
    here = read_allocation(env)
    if AMONG in env:
        node, _, listed = env[AMONG].partition(" ")
        here = replace(here, names=expand(listed), step=StepTask("", int(node), 0))
    if len(here.names) < 2:
        raise UsageError("--pairs tries nodes with each other: give it an allocation of two nodes or more")
    if here.step is None:
        return _start(here.names, asked, env)
    return asyncio.run(Node(_place(here.names, here.step, asked, env)).run())


def _start(names: Sequence[str], asked: Asked, env: Mapping[str, str]) -> list[Finding]:
    """Start a step on each node, and return what node 0 says. Raises StartError.

    One step of all would be ended as a whole where one node cannot begin it.
    """
    more = [f"--interface={asked.interface}"] if asked.interface else []
    more += ["--all"] if asked.every else []
    words = [
        *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--input=none", "--quiet"),
        *("--job-name=ckptless-pairs", *cpu_binding(asyncio.run(slurm_config()))),
    ]
    program = [sys.executable, "-m", "ckptless.doctor", "--pairs", "--json", f"--mib={asked.mib}", *more]
    program.append(f"--time-limit={NODES_SHARE * asked.limit_s:g}")
    kept = {name: value for name, value in env.items() if name not in NOT_FOR_STEPS}
    kept[TOKEN], listed, end = secrets.token_hex(32), compress(names), time.monotonic() + asked.limit_s
    steps: list[subprocess.Popen[bytes]] = []
    try:
        for node, name in enumerate(expand(listed)):
            steps.append(
                subprocess.Popen(
                    [*words, f"--nodelist={name}", *program],
                    env={**kept, AMONG: f"{node} {listed}"},
                    stdout=subprocess.DEVNULL if node else subprocess.PIPE,
                )
            )
        said, _ = steps[0].communicate(timeout=STEPS_SHARE * asked.limit_s)
        return [Finding(**one) for one in json.loads(said)["findings"]]
    except FileNotFoundError:
        raise StartError("there is no srun in PATH: is this a node of the cluster?") from None
    except subprocess.TimeoutExpired:
        text = f"no end in {STEPS_SHARE * asked.limit_s:g} s"
    except ValueError:
        text = f"its step ended with {steps[0].returncode} before it could say how it went"
    finally:
        _end(steps, end)
    return [Finding(expand(listed)[0], "broken", text, "see what srun and the nodes have said on stderr")]


def _end(steps: Sequence["subprocess.Popen[bytes]"], end: float) -> None:
    """Wait for steps until then; who is left has hung."""
    for step in steps:
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(max(0.0, end - time.monotonic()))
        with step:  # no deadline: it is killed
            step.kill()


def _place(names: Sequence[str], step: StepTask, asked: Asked, env: Mapping[str, str]) -> Place:
    """Return this task's. Raises UsageError."""
    if step.local_id:
        raise UsageError("--pairs is one task on each node: give srun --ntasks-per-node=1")
    token = env.get(TOKEN, "")
    if len(token) < SHORTEST:
        raise UsageError(
            f"{TOKEN} is not set: run ckptless-doctor --pairs without srun, which it calls itself, or set it "
            f"to {SHORTEST} random characters or more"
        )
    name = names[step.node_id]
    if asked.interface is not None:
        address = choose(asked.interface, interfaces(), "--interface")
    else:
        address = listen_address(load_settings().daemon.bind, name)
    if ipaddress.ip_address(address).is_unspecified:
        address = by_name(name)  # others dial it
    return Place(names, step.node_id, address, token, asked)


class Node:
    """One node of a run; owned by the event loop, and over with the run's time limit."""

    def __init__(self, place: Place) -> None:
        self._place, self._key = place, KeyCredentials(place.token.encode())
        self._data = secrets.token_bytes(1 << 20) * place.asked.mib
        self._listener, self._tasks = Listener(self._came), Tasks()
        self._here: dict[int, Here] = {}
        self._links: dict[int, Link[Said]] = {}
        self._more = asyncio.Event()

    async def run(self) -> list[Finding]:
        """Return what node 0 has found, nothing on others. Raises StartError, UsageError."""
        limit_s = self._place.asked.limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await (self._follow() if self._place.node else self._lead())
        except TimeoutError:
            raise StartError(f"no end in {limit_s:g} s: raise --time-limit") from None
        finally:
            for link in self._links.values():
                link.close()
            await self._listener.close()
            await end_all(self._tasks)

    def _listen(self) -> int:
        place = self._place
        try:
            if place.node:
                return self._listener.open(place.address)
            # Others come to its name, and to where it is tried.
            family = socket.getaddrinfo(place.names[0], None, type=socket.SOCK_STREAM)[0][0]
            return self._listener.open("::" if family == socket.AF_INET6 else "0.0.0.0", place.port)
        except OSError as error:
            text = f"cannot listen at {place.address} (node 0: port {place.port}): {error.strerror}"
            raise StartError(f"{text}; run it again, for another port, or give an --interface") from error

    async def _dial(self, route: Route, kind: object) -> Link[Said]:
        return await Link.dial(route, (TOKEN, self._place.node), self._key, kind, HANDSHAKE_DEADLINE_S)

    async def _try(self, order: Try) -> Way:
        route = Route((order.address, order.port), self._place.address, order.node)
        rtt_ms, began, cut = 0.0, None, False
        try:
            async with asyncio.timeout(order.within_s):
                with contextlib.closing(await self._dial(route, Answer)) as link:
                    rtt_ms = await ping(link)
                    began = time.monotonic()
                    took_s = await send(link, self._data)
        except (OSError, CkptlessError) as error:
            cut = isinstance(error, TimeoutError) and began is not None
            if began is None or not cut:
                return Way(error=str(error)[:MOST_TEXT] or f"no answer in {order.within_s:.1f} s")
            took_s = time.monotonic() - began
        return Way(mib_s=self._place.asked.mib / took_s, rtt_ms=rtt_ms, cut=cut)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._take((reader, writer)))

    async def _take(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Answer one that has proved who it is until it hangs up; one that says where it is stays."""
        try:
            kind = Here | Way | Probe
            link: Link[Said] = await Link.accept(streams, lambda _: self._place.node, self._key, kind)
            while isinstance(said := await link.receive(), Probe):
                await answer(link, said, len(self._data))
        except (OSError, CkptlessError) as error:
            logger.debug("%s: %s", streams[1].get_extra_info("peername"), error)
            streams[1].close()
            return
        if not isinstance(said, Here) or link.node >= len(self._place.names):
            link.close()
        else:
            self._here[link.node], self._links[link.node] = said, link
            self._more.set()

    # ------------------------------------------------------------------------------ all but node 0

    async def _follow(self) -> list[Finding]:
        """Do as node 0 says until it hangs up."""
        port = self._listen()
        with contextlib.suppress(ConnectionError), contextlib.closing(await self._meet()) as link:
            link.send(Here(address=self._place.address, port=port))
            while isinstance(order := await link.receive(), Try):
                link.send(await self._try(order))
        return []

    async def _meet(self) -> Link[Said]:
        """Dial node 0 until it is there."""
        limit = time.monotonic() + MEET_SHARE * self._place.asked.limit_s
        where = (self._place.names[0], self._place.port)
        while True:
            try:
                return await self._dial(Route(where, node=0), Try)
            except (OSError, CkptlessError) as error:
                if time.monotonic() > limit:
                    raise StartError(f"node 0 does not answer at {where[0]}:{where[1]}: {error}") from error
            await asyncio.sleep(AGAIN_S)

    # -------------------------------------------------------------------------------------- node 0

    async def _lead(self) -> list[Finding]:
        """Gather the others, have them try each other, and judge."""
        place, began = self._place, time.monotonic()
        limit_s, everybody = place.asked.limit_s, range(len(place.names))
        self._here[0] = Here(address=place.address, port=self._listen())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEET_SHARE * limit_s):
                while len(self._here) < len(everybody):
                    self._more.clear()
                    await self._more.wait()
        missing = {node: "it has not come" for node in everybody if node not in self._here}
        rounds = [
            [pair for pair in each if missing.keys().isdisjoint(pair)]
            for each in schedule(len(everybody), every=place.asked.every)
        ]
        tried = await self._all(rounds, began + TRIED_SHARE * limit_s)
        # It may have been this moment's, and not the network's.
        again = filter(None, [sorted(slow(tried).intersection(each)) for each in rounds])
        tried |= await self._all([*again], began + AGAIN_SHARE * limit_s)
        return verdict(place.names, tried, missing, sum(map(len, rounds)))

    async def _all(self, rounds: Sequence[Sequence[Pair]], end: float) -> dict[Pair, Tried]:
        """Try round after round, as many as there is time for."""
        tried: dict[Pair, Tried] = {}
        for number, each in enumerate(rounds):
            left_s = end - time.monotonic()
            if left_s < SHORTEST_ROUND_S:
                break
            within_s = max(left_s / (len(rounds) - number), SHORTEST_ROUND_S)
            # no deadline: `within_s`
            found = await asyncio.gather(*(self._ask(pair, within_s) for pair in each))
            tried.update(zip(each, found, strict=True))
        return tried

    async def _ask(self, pair: Pair, within_s: float) -> Tried:
        """Have both dial the other, one after the other."""
        lower, higher = pair
        there = await self._way(lower, higher, within_s / 2)
        return there, await self._way(higher, lower, within_s / 2)

    async def _way(self, dials: int, other: int, within_s: float) -> Way:
        there = self._here[other]
        order = Try(node=other, address=there.address, port=there.port, within_s=PAIR_SHARE * within_s)
        if dials == 0:
            return await self._try(order)
        link = self._links[dials]
        try:
            async with asyncio.timeout(within_s + LATE_SHARE * self._place.asked.limit_s):
                link.send(order)
                said = await link.receive()
        except (OSError, CkptlessError):
            # What it may still say would be taken for another pair's.
            link.close()
            said = None
        return said if isinstance(said, Way) else Way(error=f"{self._place.names[dials]} has gone")


async def ping(link: Link[Said]) -> float:
    """Return the median of some round trips, in milliseconds. Raises OSError, CkptlessError."""
    laps = []
    for _ in range(PINGS):
        began = time.monotonic()
        link.send(Probe())
        await link.receive()
        laps.append(time.monotonic() - began)
    return 1000 * median(laps)


async def send(link: Link[Said], data: bytes) -> float:
    """Send bytes there; return how long it took, in seconds. Raises OSError, CkptlessError."""
    link.send(Probe(bulk=True))
    began = time.monotonic()
    await link.send_bulk(memoryview(data))
    await link.receive()
    took_s = time.monotonic() - began
    if await link.receive() != Answer(digest=xxhash.xxh3_64_hexdigest(data)):
        raise PeerError("what came is not what was sent")
    return took_s


async def answer(link: Link[Said], said: Probe, nbytes: int) -> None:
    """Do the other half of `ping`, or of `send`. Raises OSError, CkptlessError."""
    into = bytearray(nbytes if said.bulk else 0)
    await link.receive_bulk(memoryview(into))
    link.send(Answer())
    if said.bulk:
        link.send(Answer(digest=xxhash.xxh3_64_hexdigest(into)))
