"""One node of a job without Slurm; `python -m ckptless.daemon.launch.host` is that by ssh, for `hosts.py`.

Its standard input and output are the launcher's (`wire.py`). It runs its node as local mode runs all of them.
Where the launcher is gone, or this process is told to end, the node is lost: killed, without a goodbye that
would end the job. So the other hosts go on, unless they have lost their launcher, too.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ckptless.daemon.agent.ranks.signals import USERS, ignore_others
from ckptless.daemon.launch import wire
from ckptless.daemon.launch.console import last_words
from ckptless.daemon.launch.local import point_latest
from ckptless.daemon.launch.nodes import Node, Nodes
from ckptless.daemon.ledger.paths import default_state_dir
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.codec import PROTOCOL, Decoder, check_protocol, encode
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError, UsageError
from ckptless.daemon.settings.agent_config import AgentConfig, SharedConfig, on_host
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_S = 5.0


def held_port(address: str, port: int = 0) -> socket.socket:
    """A socket that keeps a port, any free one for 0, from others until a daemon listens there: it does not.

    Raises UsageError.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        what = f"port {port} of {address}" if port else address
        raise UsageError(f"cannot listen on {what}: {error.strerror}") from error
    return sock


@dataclass(frozen=True)
class Part:
    """A host's part of a job: its node's number, all nodes, the job's key; None: the default directory."""

    node: int
    peers: tuple[Peer, ...]
    key: bytes
    state_dir: Path | None = None


class HostNode(Nodes):
    """The one node of a job that is here."""

    def __init__(self, config: SharedConfig, part: Part, *, verbose: bool = False, console: int = 1) -> None:
        root = part.state_dir or default_state_dir().parent / config.spec.job
        super().__init__(config, root.absolute(), verbose=verbose, console=console)
        self._part = part
        self._living: asyncio.Task[Any] | None = None
        self._left = False

    async def live(self) -> None:
        """See `Nodes`; returns early where the node has left."""
        self._living = living = asyncio.current_task()
        try:
            await super().live()
        except asyncio.CancelledError:
            if not self._left or living is None:
                raise
            living.uncancel()

    async def _end_all(self) -> None:
        self._living = None  # what ends is not cut short
        await super()._end_all()

    def stop(self, number: signal.Signals) -> None:
        """Act on a signal of this process: Ctrl-C is a user's, others are of a machine that shuts down."""
        if number in (signal.SIGINT, signal.SIGQUIT):
            super().stop(number)
        elif not self._left:
            self._stop = number
            self.leave(f"{number.name}")

    def end_job(self, number: signal.Signals) -> None:
        """End the job on all hosts, by a signal of the launcher's."""
        super().stop(number)

    def leave(self, why: str) -> None:
        """End this node as one that is lost: the job's others go on."""
        logger.error("%s: this node is ended, as one that is lost", why)
        self._left = True
        for node in self._nodes:
            self.lose(node)
        if self._living is not None:
            self._living.cancel()

    def _prepare(self) -> None:
        part, folder = self._part, self.state_dir / f"node-{self._part.node}"
        me = next(peer for peer in part.peers if peer.node == part.node)
        key_file = folder / "key"
        daemon = LocalConfig(
            node=me.node,
            state_dir=str(folder),
            socket=self._socket(me.node, "daemon"),
            key_file=str(key_file),
            peers=part.peers,
            one_machine=False,
            log_format=self._config.log_format,
        )
        self._add(me, daemon)
        key_file.touch(mode=0o600)
        key_file.write_bytes(part.key)
        if part.state_dir is None:
            point_latest(self.state_dir)

    def _agent_config(self, node: Node) -> AgentConfig:
        return on_host(
            self._config,
            os.environ,
            node.peer.address,
            node=node.number,
            name=node.peer.name,
            daemon_socket=self._socket(node.number, "daemon"),
            rank_socket=self._socket(node.number, "ranks"),
            log_dir=str(self._logs_of(node)),
        )


# ----------------------------------------------------------------------------------------- by ssh


async def receive(reader: asyncio.StreamReader, decoder: Decoder[T]) -> T:
    """The next message. Raises ProtocolError, and EOFError at the end."""
    while True:
        # no deadline: the caller's
        found = decoder.feed(await reader.readexactly(decoder.missing))
        if found:
            return found[0]


class Launcher:
    """The launcher, at the other end of ssh."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: Decoder[wire.ToHost] = Decoder(wire.ToHost, wire.LAUNCHER_LIMIT)

    @classmethod
    async def here(cls) -> "Launcher":
        """The one at standard input and output."""
        loop = asyncio.get_running_loop()
        reader = await _read_end(sys.stdin)
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), sys.stdout
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def hear(self) -> wire.ToHost:
        """The next word. Raises ProtocolError; EOFError or TimeoutError where the launcher is gone."""
        async with asyncio.timeout(wire.SILENT_S):
            return await receive(self._reader, self._decoder)

    async def expect(self, kind: type[T]) -> T:
        """The next word but for beats, which has to be of this kind. Raises PeerError, too."""
        try:
            while isinstance(message := await self.hear(), wire.Beat):
                pass
        except (EOFError, TimeoutError) as error:
            raise PeerError("the launcher has gone before this node began") from error
        if not isinstance(message, kind):
            raise ProtocolError(f"the launcher says {type(message).__name__} where {kind.__name__} is due")
        return message

    async def say(self, message: wire.FromHost) -> None:
        """Send a word. Raises OSError."""
        self._writer.write(encode(message))
        # no deadline: the caller's
        await self._writer.drain()

    async def obeyed_by(self, node: HostNode) -> None:
        """Do what the launcher says, for as long as it is there."""
        try:
            while True:
                message = await self.hear()
                if isinstance(message, wire.Signal):
                    number = signal.Signals(message.number)
                    (node.forward if number in USERS else node.end_job)(number)
        except TimeoutError:
            node.leave(f"the launcher has said nothing for {wire.SILENT_S:.0f} s")
        except EOFError:
            node.leave("the launcher is gone")
        except (ProtocolError, ValueError) as error:
            node.leave(f"the launcher is not understood ({error})")

    async def shown(self, console: int) -> None:
        """Pass on what comes out of a pipe, to its end."""
        reader = await _read_end(os.fdopen(console, "rb"))
        # no deadline: ranks may be silent for as long as they like
        while data := await reader.read(wire.CONSOLE_NBYTES):
            await self.say(wire.Console(data=data))


async def _read_end(pipe: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def serve() -> int:
    """Run the node that the launcher has here; the exit code. Raises the tree's errors."""
    launcher = await Launcher.here()
    begin = await launcher.expect(wire.Begin)
    check_protocol(begin.protocol, "the launcher")
    try:
        config = msgspec.json.decode(begin.config, type=SharedConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the launcher's word to the agent is not understood: {error}") from error
    log.configure(f"host[{begin.name}]", verbose=begin.verbose, log_format=config.log_format)
    os.environ.update(begin.env)
    held = held_port(begin.address, begin.port)
    await launcher.say(wire.Here(protocol=PROTOCOL, port=held.getsockname()[1]))
    peers = (await launcher.expect(wire.Peers)).peers
    out, console = os.pipe()
    state_dir = Path(begin.state_dir) if begin.state_dir else None
    part = Part(begin.node, peers, begin.key, state_dir)
    node = HostNode(config, part, verbose=begin.verbose, console=console)
    shown = asyncio.create_task(launcher.shown(out))
    obeyed = asyncio.create_task(launcher.obeyed_by(node))
    try:
        await node.live()
    finally:
        held.close()
        os.close(console)
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(shown, FLUSH_S)
        await end_all([obeyed])
    outcome = node.outcome()
    if outcome is not None and outcome.exit_code != 0 and (file := node.log_of(outcome)) is not None:
        last_words(file, outcome.rank, "")
    with contextlib.suppress(TimeoutError, OSError):
        await asyncio.wait_for(launcher.say(wire.Ended(outcome=outcome)), FLUSH_S)
    return 0


def main() -> None:
    """Entry point."""
    ignore_others()
    try:
        sys.exit(asyncio.run(serve()))
    except CkptlessError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
