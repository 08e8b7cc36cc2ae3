"""The messages of the agent and its zygote, and the limits on them.

They share an AF_UNIX SOCK_SEQPACKET socket: a packet is sent whole or not at all, so a cancelled spawn
never leaves half a request behind. A packet is bounded by the socket's buffer, an environment is not;
therefore what to run (`Program`) travels in a memfd beside the packet that announces it.

A `Spawn` packet carries four descriptors, in the order of `SPAWN_FDS`. The gate is the read end of a pipe:
the new process runs nothing of the user's before the agent, having registered it, has written one byte there,
and ends if the gate closes without one. So a process of which the agent never heard cannot train.
"""

import os
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ckptless.daemon.protocol.errors import ProtocolError

VERSION = 4
MAX_PACKET_BYTES = 32 * 1024
MAX_PROGRAM_BYTES = 64 * 1024 * 1024
MAX_TEXT = 2000

SPAWN_FDS = ("program", "gate", "stdout", "stderr")


class Program(Struct, frozen=True, kw_only=True, tag="program", forbid_unknown_fields=True):
    """The program of a new process. Strings are bytes: the system's names need not be UTF-8.

    `argv` is the script (or the module, with `module`) and its arguments; `env` is the whole environment.
    `scratch`: where multiprocessing puts its sockets, "" for its own. `deaf`: signals that end a rank, or are
    the user's word to it, are ignored.
    """

    argv: tuple[bytes, ...]
    module: bool
    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    scratch: bytes = b""
    deaf: bool = False


class Spawn(Struct, frozen=True, kw_only=True, tag="spawn", forbid_unknown_fields=True):
    """Agent to zygote: fork a process for the program in the memfd. `id` comes back in the answer."""

    version: int
    id: int


class Ready(Struct, frozen=True, kw_only=True, tag="ready", forbid_unknown_fields=True):
    """Zygote to agent, once: everything is loaded, or `error` says what is not, and the zygote exits.

    `warnings` say what of it does not go well with fork.
    """

    version: int
    warnings: tuple[str, ...] = ()
    error: str = ""


class Spawned(Struct, frozen=True, kw_only=True, tag="spawned", forbid_unknown_fields=True):
    """Zygote to agent: the process is there, the agent's child, and waits at its gate; else `error`."""

    id: int
    pid: int = 0
    error: str = ""


Reply: TypeAlias = Ready | Spawned

M = TypeVar("M")
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Spawn | Reply) -> bytes:
    """Return `message` as one packet; raises ProtocolError if it does not fit one."""
    packet = msgspec.msgpack.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ProtocolError(f"a zygote packet of {len(packet)} bytes is over the limit of {MAX_PACKET_BYTES}")
    return packet


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes, what: str) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not {what}: {error}") from error


def decode_spawn(packet: bytes) -> Spawn:
    """Return the request in `packet`; raises ProtocolError if it is none, or of another version."""
    spawn = _decode(msgspec.msgpack.Decoder(Spawn), packet, "a spawn request")
    check_version(spawn.version)
    return spawn


def decode_reply(packet: bytes) -> Reply:
    """Return the zygote's answer in `packet`; raises ProtocolError if it is none."""
    return _decode(_replies, packet, "an answer of a zygote")


def check_version(version: int) -> None:
    """Raise ProtocolError unless the other side speaks our version: it may be an upgraded installation."""
    if version != VERSION:
        raise ProtocolError(
            f"the zygote's protocol is version {version}, the agent's {VERSION}: was it upgraded?"
        )


def shorten(text: str) -> str:
    """Return `text` cut to what a reply may carry."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def write_program(program: Program) -> int:
    """Return a memfd, the caller's to close, that holds `program`; raises ProtocolError if too large."""
    data = msgspec.msgpack.encode(program)
    _check_size(len(data))
    fd = os.memfd_create("ckptless-program", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_program(fd: int) -> Program:
    """Return the program in memfd `fd`, which stays open; raises ProtocolError if it breaks its format."""
    size = os.fstat(fd).st_size
    _check_size(size)
    data = os.pread(fd, size, 0)  # a memfd's is never short but at its end
    return _decode(msgspec.msgpack.Decoder(Program), data, "a program")


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_PROGRAM_BYTES:
        raise ProtocolError(
            f"a program with its environment takes {nbytes} bytes; limit: {MAX_PROGRAM_BYTES}"
        )
