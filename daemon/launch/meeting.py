"""`ckptless-run --master-addr A`, started on each node by Kubernetes, mpirun or a script: where nodes meet.

Node 0 listens there. The others tell it their addresses, and get the table of all; both ends prove that they
hold the job's key, as daemons do. Then each runs its node (`host.py`). Node 0 goes on listening: who comes
once the job has begun, a pod that was started again, say, is told that it cannot join.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import fields, replace

from ckptless.daemon.agent.ranks.signals import ENDING
from ckptless.daemon.launch import wire
from ckptless.daemon.launch.host import HostNode, Part, held_port
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, StartError, UsageError
from ckptless.daemon.protocol.messages import JobSpec
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.config import Peer, read_key
from ckptless.daemon.settings.options import RunOptions
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import HANDSHAKE_DEADLINE_S, GreetingCutError, Link, Route
from ckptless.daemon.transport.listener import Listener
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

KEY_FILE = "CKPTLESS_JOB_KEY_FILE"
# torchrun's.
DEFAULT_PORT = 29500
# Pods may wait for machines that are still being made.
MEET_S, AGAIN_S = 900.0, 1.0
# Of those that prove nothing so many are logged: anybody can connect.
MOST_TOLD = 50
# What is not a job's, and not a daemon's: the place where nodes meet.
MEETING = "ckptless meeting"
# What is node 0's to say; all else must be the same on each command line.
_NODE_0S = ("job", "run_id", "launch", "names", "saved_step")
# The number of a process, of all and of those on its node: Open MPI, and what comes from MPICH.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)

Member: TypeAlias = Link[wire.Met]


@dataclass(frozen=True)
class Place:
    """Where `nodes` nodes meet, spares among them; which of them this is, and what it says of itself."""

    address: str
    port: int
    nodes: int
    node: int
    key: bytes
    local_addr: str | None = None
    daemon_port: int = 0


def find_place(options: RunOptions, nodes: int | None, env: Mapping[str, str]) -> Place:
    """Return where to meet, by the options, else by the environment. Raises UsageError."""
    rank, size = _by_mpi(env)
    nodes = nodes or _number(env, "NNODES") or size
    if nodes is None:
        raise UsageError("with --master-addr, give --nnodes N: all nodes, spares among them")
    own = [options.node_rank, _number(env, "NODE_RANK"), rank, 0 if nodes == 1 else None]
    node = next((one for one in own if one is not None), None)
    if node is None:
        raise UsageError("with --master-addr, give each node its --node-rank, from 0 on")
    if node >= nodes:
        raise UsageError(
            f"--node-rank {node}: the {nodes} nodes of --nnodes, which counts spares, too, are 0 to "
            f"{nodes - 1}: give another"
        )
    key_file = env.get(KEY_FILE)
    if not key_file:
        raise UsageError(
            f"{KEY_FILE} is not set: put a secret of 16 bytes or more into a file of mode 0400 on each node, "
            "and name it there"
        )
    return Place(
        address=options.master_addr or env["MASTER_ADDR"],
        port=options.master_port or _number(env, "MASTER_PORT") or DEFAULT_PORT,
        nodes=nodes,
        node=node,
        key=read_key(Path(key_file)),
        local_addr=options.local_addr,
        daemon_port=options.port,
    )


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not re.fullmatch(r"\d{0,5}", text, re.ASCII):
        raise UsageError(f"{name} is {text[:40]!r}: it must be a number, or not be set")
    return int(text) if text else None


def _by_mpi(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return mpirun's number of this process, and how many there are, where that is one on each node."""
    for rank, size, local in _MPI:
        if rank in env and size in env:
            if env.get(local) != "1":
                raise UsageError(
                    f"mpirun has started {env.get(local, 'an unknown number of')} processes on this node: "
                    "start one on each (--map-by ppr:1:node), which starts the ranks (--nproc-per-node)"
                )
            return _number(env, rank), _number(env, size)
    return None, None


class OwnPeer:
    """Where this node's daemon is to listen: a port that is kept for it from the first word about it on."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._held: socket.socket | None = None

    def at(self, address: str) -> Peer:
        """Return it at `address`, if nothing else was said. Raises UsageError."""
        local = self._place.local_addr
        if local is not None:
            try:
                address = str(socket.getaddrinfo(local, None, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                raise UsageError(f"--local-addr {local} is no address here: give another") from error
        if self._held is not None:
            self._held.close()
        self._held = held_port(address, self._place.daemon_port)
        port = int(self._held.getsockname()[1])
        return Peer(node=self._place.node, name=socket.gethostname(), address=address, port=port)


class MeetingRun:
    """This node's part of a run, from the meeting on; owned by the event loop."""

    def __init__(
        self, config: SharedConfig, place: Place, *, state_dir: Path | None = None, verbose: bool = False
    ) -> None:
        self.config, self.place = config, place
        self._state_dir, self._verbose = state_dir, verbose
        self._stop: signal.Signals | None = None
        self._own = OwnPeer(place)

    async def run(self) -> int:
        """Meet the others, and be one node of the job. The exit code. Raises the tree's errors."""
        meeting = Meeting(self.place, self.config.spec, self._own) if self.place.node == 0 else None
        meet = asyncio.create_task(
            meeting.held() if meeting else join(self.place, self.config.spec, self._own)
        )
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self._stopped, number, meet)
        try:
            # no deadline: MEET_S
            table = await meet
            return await self._node(table).run()
        except asyncio.CancelledError:
            if self._stop is None:
                raise
            return 128 + self._stop
        finally:
            if meeting is not None:
                await meeting.close()

    def _stopped(self, number: signal.Signals, meet: "asyncio.Task[wire.Table]") -> None:
        self._stop = number
        meet.cancel()

    def _node(self, table: wire.Table) -> HostNode:
        spec = table.spec
        logger.info(
            "job %s: all %d nodes have met; this is node %d", spec.job, len(table.peers), self.place.node
        )
        # Another one for each run, which nobody has to send.
        key = hmac.new(self.place.key, b"ckptless job" + spec.launch.encode(), hashlib.sha256).digest()
        part = Part(self.place.node, table.peers, key, self._state_dir)
        return HostNode(replace(self.config, spec=spec), part, verbose=self._verbose)


# ------------------------------------------------------------------------------------ the others


async def join(place: Place, spec: JobSpec, own: OwnPeer) -> wire.Table:
    """Tell node 0 of this node, once it is there, and wait for the others. Raises StartError."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + MEET_S
    while True:
        try:
            return await _asked(place, spec, own, limit)
        except (OSError, TimeoutError, GreetingCutError) as error:
            why = str(error) or "no answer"
        except PeerError as error:
            raise StartError(
                f"{place.address}:{place.port} is no node 0 of this job: {error} of {KEY_FILE}"
            ) from error
        if loop.time() > limit:
            raise StartError(
                f"node 0 did not gather the job at {place.address}:{place.port} in {MEET_S:.0f} s: {why}"
            )
        await asyncio.sleep(AGAIN_S)


async def _asked(place: Place, spec: JobSpec, own: OwnPeer, limit: float) -> wire.Table:
    route = Route((place.address, place.port), None, 0)
    link: Member = await Link.dial(
        route, (MEETING, place.node), KeyCredentials(place.key), wire.ToMember, HANDSHAKE_DEADLINE_S
    )
    try:
        link.send(wire.Join(peer=own.at(link.own_address), spec=spec))
        async with asyncio.timeout_at(limit):
            answer = await link.receive()
    finally:
        link.close()
    if isinstance(answer, wire.Table):
        return answer
    reason = answer.reason if isinstance(answer, wire.Refused) else "it says what only other nodes say"
    raise StartError(f"node 0 refuses node {place.node}: {reason}")


# ----------------------------------------------------------------------------------------- node 0


class Meeting:
    """Takes the other nodes in until all are there, and refuses who comes then."""

    def __init__(self, place: Place, spec: JobSpec, own: OwnPeer) -> None:
        self._place, self._spec, self._own = place, spec, own
        self._members: dict[int, tuple[Member, Peer]] = {}
        self._all, self._begun = asyncio.Event(), False
        self._strangers = 0
        self._listener = Listener(self._came)
        self._tasks = Tasks()

    async def held(self) -> wire.Table:
        """Wait for all, and tell each of all. Raises StartError, UsageError."""
        place = self._place
        try:
            # Which address is this node's, the others say: a name may be a service's.
            self._listener.open("::" if ":" in place.address else "0.0.0.0", place.port)
        except OSError as error:
            raise UsageError(f"--master-port {place.port}: {error.strerror}; choose another") from error
        try:
            async with asyncio.timeout(MEET_S if place.nodes > 1 else None):
                while len(self._members) < place.nodes - 1:
                    self._all.clear()
                    await self._all.wait()
        except TimeoutError:
            missing = ", ".join(str(node) for node in range(1, place.nodes) if node not in self._members)
            raise StartError(f"in {MEET_S:.0f} s the nodes of rank {missing} have not come") from None
        table = self._table()
        self._begun = True
        for link, _ in self._members.values():
            link.send(table)
        return table

    def _table(self) -> wire.Table:
        own = next((link.own_address for link, _ in self._members.values()), "127.0.0.1")
        peers = [self._own.at(own), *(peer for _, (_, peer) in sorted(self._members.items()))]
        if len({peer.name for peer in peers}) < len(peers):
            peers = [replace(peer, name=f"node-{peer.node}") for peer in peers]
        spec = replace(self._spec, names=tuple(peer.name for peer in peers))
        return wire.Table(spec=spec, peers=tuple(peers))

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._take((reader, writer)))

    async def _take(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Hear one that has come, for as long as it is there."""
        address = streams[1].get_extra_info("peername")[0]
        try:
            link: Member = await Link.accept(
                streams, _node_0, KeyCredentials(self._place.key), wire.FromMember
            )
        except (CkptlessError, OSError, TimeoutError) as error:
            self._strangers += 1
            level = logging.WARNING if self._strangers <= MOST_TOLD else logging.DEBUG
            logger.log(level, "refused %s: %s", address, error)
            return
        try:
            link.limit = wire.MEMBER_LIMIT
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                joins = await link.receive()
                assert isinstance(joins, wire.Join)  # the only message of this edge
                why = self._why_not(link.node, joins)
                if why:
                    logger.warning("refused node %d at %s: %s", link.node, address, why)
                    link.send(wire.Refused(reason=why))
                    await link.drain()
                    return
            self._let_in(link, joins.peer)
            # no deadline: it says no more, and hangs up once it has the table
            await link.receive()
        except (CkptlessError, OSError, TimeoutError) as error:
            logger.debug("node %d at %s: %s", link.node, address, error)
        finally:
            if not self._begun and self._members.get(link.node, (None,))[0] is link:
                del self._members[link.node]
            link.close()

    def _let_in(self, link: Member, peer: Peer) -> None:
        earlier = self._members.pop(link.node, None)
        if earlier is not None:
            earlier[0].send(
                wire.Refused(reason="another has come with its --node-rank: each node needs its own")
            )
        self._members[link.node] = (link, peer)
        self._all.set()

    def _why_not(self, node: int, joins: wire.Join) -> str:
        """Why one cannot be part of the job; "" where it can."""
        if self._begun:
            return "the job has begun, and who comes late, or again, cannot join it: give it spares instead"
        if not 0 < node < self._place.nodes or joins.peer.node != node:
            return (
                f"node 0 waits for {self._place.nodes} nodes, spares among them: give all the same --nnodes"
            )
        for field in fields(JobSpec):
            ours, theirs = (getattr(spec, field.name) for spec in (self._spec, joins.spec))
            if field.name not in _NODE_0S and ours != theirs:
                said = f"{field.name} is {str(theirs)[:200]}, and {str(ours)[:200]} on node 0"
                return f"{said}: give all nodes the same command line"
        return ""

    async def close(self) -> None:
        """Listen no more."""
        await self._listener.close()
        await end_all(self._tasks)


def _node_0(job: str) -> int:
    if job != MEETING:
        raise PeerError(f"nobody meets here for {job!r}")
    return 0
