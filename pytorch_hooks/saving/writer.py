"""The writer: a process of the agent's that writes this node's part of one step, and ends.

`python -m ckptless.pytorch_hooks.saving.writer`, with the agent's socket in the environment. What it
writes comes as copies of versions in memfds: training goes on over it, and may even end.
"""

import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.daemon.protocol.saving import (
    ToWriter,
    WritePart,
    WriteRecord,
    WriterHello,
    WriteShard,
    Written,
)
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.saving.finish import finish, prune
from ckptless.pytorch_hooks.saving.write import Shard, write_part

AGENT_DEADLINE_S = 60.0
READ_NBYTES = 1 << 18
MAX_FDS = 16
PROCESS_NAME = "ckptless-save"
# Training goes first.
NICE = 10


def main() -> None:
    """Entry point."""
    os.nice(NICE)
    Path("/proc/self/comm").write_text(PROCESS_NAME)
    torch.set_num_threads(1)
    name = env.read().agent_socket
    if name is None:
        raise PeerError("no agent has started this writer")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(AGENT_DEADLINE_S)
        sock.connect(unix_address(name))
        sock.sendall(encode(WriterHello(protocol=PROTOCOL)))
        try:
            done = _work(sock)
        except (CkptlessError, OSError) as error:
            done = Written(error=str(error) or type(error).__name__)
        sock.sendall(encode(done))


def _work(sock: socket.socket) -> Written:
    shards: list[Shard] = []
    records: list[WriteRecord] = []
    for message, fd in _received(sock):
        if isinstance(message, WriteShard):
            assert fd is not None
            shards.append(Shard(message.shard, _mapped(fd, message.at.nbytes), message.at.digest))
        elif isinstance(message, WriteRecord):
            records.append(message)
        else:
            folder = Path(message.folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_part(folder, message.node, message.step, shards, records)
            if not message.finishes:
                return Written()
            path = finish(message)
            return Written(path=str(path), left=prune(Path(message.directory), message.keep))
    raise ProtocolError("nothing was asked for")


def _received(sock: socket.socket) -> Iterator[tuple[WriteShard | WriteRecord | WritePart, int | None]]:
    """Yield what the agent says, each shard with its memfd. Raises PeerError where it hangs up."""
    decoder: Decoder[ToWriter] = Decoder(ToWriter, RANK_LIMIT)
    fds: list[int] = []
    while True:
        # no deadline: the socket has one
        data, more, _, _ = socket.recv_fds(sock, READ_NBYTES, MAX_FDS)
        fds += more
        if not data:
            raise PeerError("the agent hung up")
        for message in decoder.feed(data):
            yield message, fds.pop(0) if isinstance(message, WriteShard) else None


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    try:
        mapping = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)


if __name__ == "__main__":
    main()
